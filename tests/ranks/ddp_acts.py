"""Functions that ranks run in tests of DistributedDataParallel: each trains on batches of its own."""

from __future__ import annotations

import logging
import threading
import time
from unittest import mock

import torch
import torch.distributed as dist
from acts import local, opened
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import flowstone as fs
from flowstone import Save
from flowstone.config import EngineOptions
from flowstone.errors import RankError, StateChangedError
from flowstone.events.phases import Captured, Event, SaveStarted
from flowstone.events.rare_events import BuffersFromOneRank
from flowstone.save.pacing import Captures
from lagging_loops import CRAWL


def training(how: str = "ddp") -> dict[str, object]:
    """More than a window on each of two ranks. `how`: replicated, or as FSDP2 ("fsdp") or FSDP1 have it."""
    torch.manual_seed(5)
    net: nn.Module = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 512))
    if how == "ddp":
        net = DistributedDataParallel(net)
    elif how == "fsdp":
        net = fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=how == "original")
    return {"model": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=1e-2)}


def step(state: dict[str, object], seed: int) -> None:
    model, optimizer = state["model"], state["optimizer"]
    batch = torch.randn(16, 512, generator=torch.Generator().manual_seed(seed))
    model(batch).square().mean().backward()  # type: ignore[operator]
    optimizer.step()  # type: ignore[attr-defined]
    optimizer.zero_grad()  # type: ignore[attr-defined]


def statistics(state: dict[str, object]) -> list[float]:
    """A few of the running means that this rank has."""
    statistics: list[float] = state["model"].module[1].running_mean[:4].tolist()  # type: ignore[attr-defined]
    return statistics


def save_statistics(rank: int, path: str, steps: int) -> dict[str, object]:
    """Train and save, each step; of each, what this rank's statistics were. And what was told of buffers."""
    state = training()
    events: list[Event] = []
    held = []
    with opened(path, on_event=events.append) as saver:
        for number in range(1, steps + 1):
            step(state, 10 * number + rank)
            held.append(statistics(state))
            saver.save(number, state).committed.result(60)
    buffers = [(event.step, event.tensors) for event in events if isinstance(event, BuffersFromOneRank)]
    return {"held": held, "buffers": buffers}


def train_beside(rank: int, path: str, how: str) -> list[bool]:
    """Save, then forward and backward while the capture stays behind, then a row that changes on rank 1 alone.

    Of each save, whether it failed by the name of that row's tensor.
    """
    state, collected = training(how), []
    engine = EngineOptions(request_bytes=2 << 20)
    still = mock.patch.object(Captures, "pace", return_value=CRAWL)
    with still, opened(path, on_error="continue", engine=engine) as saver:
        for number in (1, 2, 3, 4):
            save = saver.save(number, state)
            state["model"](torch.randn(4, 512)).square().mean().backward()  # type: ignore[operator]
            assert number != 3 or not save.captured.done(), "it was changed too late"
            if number == 3 and rank == 1:
                spoil(state)
            state["optimizer"].step()  # type: ignore[attr-defined]
            state["optimizer"].zero_grad()  # type: ignore[attr-defined]
            collected.append(is_change(save.committed.exception(60)))
    return collected


@torch.no_grad()
def spoil(state: dict[str, object]) -> None:
    """One element of every moment: of replicas those alone matter that this rank writes."""
    for slots in state["optimizer"].state.values():  # type: ignore[attr-defined]
        for slot in ("exp_avg", "exp_avg_sq"):
            local(slots[slot]).view(-1)[:1].add_(1)


def is_change(error: BaseException | None) -> bool:
    assert error is None or isinstance(error, StateChangedError | RankError), error
    assert error is None or "exp_avg" in str(error), error
    return error is not None


def follow(rank: int, path: str, budget_bytes: int) -> list[object]:
    """Save twice, and each time change an encoder that follows, of 2 MiB, before anything can be captured late.

    Of each save: why it failed, and how many MiB of it were captured before `save` returned.
    """
    torch.manual_seed(5)
    model = nn.ModuleDict({"encoder": nn.Linear(512, 512), "follower": nn.Linear(512, 1024).requires_grad_(False)})
    state = {"model": model, "optimizer": torch.optim.SGD(model["encoder"].parameters(), lr=0.1)}
    events: list[Event] = []
    has_followed = threading.Event()

    def hear(event: Event) -> None:
        events.append(event)
        assert not isinstance(event, SaveStarted) or event.step > 1 or has_followed.wait(60)

    collected: list[object] = []
    engine = EngineOptions(request_bytes=2 << 20)
    with opened(path, on_event=hear, on_error="continue", engine=engine, budget_bytes=budget_bytes) as saver:
        for number in (1, 2):
            save = saver.save(number, state)
            with torch.no_grad():
                model["follower"].weight.add_(1)
            has_followed.set()
            error = save.committed.exception(60)
            assert error is None or "model.follower.weight changed before it was captured" in str(error), error
            collected.append(error is not None)
    early = [event.early_bytes >> 20 for event in events if isinstance(event, Captured)]
    return [*collected, max(early) > 1]


class _Said(logging.Handler):
    """Warnings, and how long after it was made each came, in seconds."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.began, self.lines = time.monotonic(), list[tuple[float, str]]()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic() - self.began, record.getMessage()))


def only_rank_0_saves(rank: int, path: str, steps: int, every: int) -> dict[str, object]:
    """Each rank trains, slowly, and has a Checkpointer with what is the default; rank 0 saves each so many steps.

    The error of each save and how long after the call it was known, how long each step took with its save, how long the
    end, and the warnings.
    """
    state, saves, took = training(), list[tuple[float, Save]](), []
    step(state, 0)
    message = _Said()
    logging.getLogger("flowstone").addHandler(message)
    with fs.Checkpointer(path, on_error="continue") as saver:
        for number in range(1, steps + 1):
            began = time.monotonic()
            if rank == 0 and number % every == 0:
                saves.append((began, saver.save(number, state)))
            step(state, number)
            took.append(time.monotonic() - began)
            time.sleep(0.1)
        ended = time.monotonic()
    return {
        "errors": [str(save.committed.exception(0)) for _, save in saves], "took": took, "said": message.lines,
        "end": time.monotonic() - ended,
    }
