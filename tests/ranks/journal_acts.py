"""Functions that ranks run in tests of journals: each trains on batches of its own, and saves every step."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flowstone as fs
from flowstone.events.phases import Event
from flowstone.format.digest import digest
from flowstone.store.local_append import LocalAppendFile
from forge import tensor_bytes


class Training:
    """A network by AdamW, with something of its own on each rank. `how`: ddp, fsdp; plain: alone, as ddp begins."""

    def __init__(self, how: str, rank: int) -> None:
        torch.manual_seed(3)
        net: nn.Module = nn.Sequential(nn.Linear(96, 192), nn.ReLU(), nn.Linear(192, 96), nn.Linear(96, 8))
        if how == "fsdp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for module in (*net, net):  # type: ignore[misc]
                if not isinstance(module, nn.ReLU):
                    fully_shard(module, mesh=mesh)
        elif how == "ddp":
            net = DistributedDataParallel(net)
        self.model, self.rank = net, rank
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)
        self.inputs = torch.Generator().manual_seed(50 + rank)

    def state(self, step: int = 0) -> dict[str, object]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
            "inputs": fs.PerRank(self.inputs), "rng": fs.rng(), "step": step,
        }

    def train_step(self) -> None:
        self.model(torch.randn(4, 96, generator=self.inputs)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def bits(self) -> str:
        """A digest of all that this rank has."""
        parts = [self.inputs.get_state(), torch.get_rng_state(), torch.tensor(self.scheduler.get_last_lr())]
        for parameter in self.model.parameters():
            own = [parameter.detach(), *self.optimizer.state[parameter].values()]
            parts += [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in own]
        return digest(tensor_bytes(*parts))


class Learns(Protocol):
    def train_step(self) -> None: ...

    def bits(self) -> str: ...


def each_step(training: Learns, steps: int) -> list[str]:
    """What it is after each of them."""
    collected = []
    for _ in range(steps):
        training.train_step()
        collected.append(training.bits())
    return collected


def undisturbed(rank: int, how: str, steps: int) -> list[str]:
    return each_step(Training(how, rank), steps)


def slow_syncs(seconds: float, is_behind: Callable[[], bool] = lambda: False) -> None:
    """Of this process' journals, as on a store that is slow at them: for so long, and as long as `is_behind`."""
    sync = LocalAppendFile.sync

    def slow(appending: LocalAppendFile) -> None:
        time.sleep(seconds)
        deadline = time.monotonic() + 60.0
        while is_behind() and time.monotonic() < deadline:
            time.sleep(0.01)
        sync(appending)

    LocalAppendFile.sync = slow  # type: ignore[method-assign]


def train(
    rank: int, path: str, how: str, steps: int, recovery_s: float = 60.0, lag_steps: int = 1, sync_s: float = 0.0,
    held_until: int = 0,
) -> dict[str, object]:
    """Go on from what there is, and note how far it came.

    sync_s      how long syncs of journals take at least
    held_until  syncs that begin after the second step before this one was saved wait until this one is, too
    """
    training, events = Training(how, rank), list[Event]()
    saved = [0]
    slow_syncs(sync_s, lambda: held_until - 3 < saved[0] < held_until)
    with fs.Checkpointer(
        path, every_step=True, recovery_s=recovery_s, lag_steps=lag_steps, keep=2, deadline_s=10.0,
        on_event=events.append,
    ) as checkpointer:
        done = 0
        if checkpointer.latest() is not None:
            done = checkpointer.load(training.state()).step
        loaded = training.bits()
        Path(f"{path}.loaded.{rank}").write_text(str(done))
        for step in range(done + 1, steps + 1):
            training.train_step()
            save = checkpointer.save(step, training.state(step))
            if step == 1:
                save.committed.result()  # what all others begin with
            Path(f"{path}.begun.{rank}").write_text(str(step))
            saved[0] = step
    return {
        "done": done, "loaded": loaded, "bits": training.bits(),
        "whole": [event.step for event in events if isinstance(event, fs.Committed)],
        "journaled": [event.step for event in events if isinstance(event, fs.Journaled)],
        "bytes": sum(event.bytes for event in events if isinstance(event, fs.Journaled)),
        "synced": max((event.synced for event in events if isinstance(event, fs.Journaled)), default=0),
        "not_journaled": [(event.step, event.reason) for event in events if isinstance(event, fs.NotJournaled)],
    }


def upset(rank: int, path: str, kind: str, lag_steps: int = 1, sync_s: float = 0.0) -> dict[str, object]:
    """Eight steps; with the fourth something is wrong on rank 1 alone. What each save came to, and what was told.

    lag_steps  if more than 1, no step is waited for before the end, and all are 14
    """
    slow_syncs(sync_s)
    training, events = Training("ddp", rank), list[Event]()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    saves = []
    with fs.Checkpointer(
        path, every_step=True, lag_steps=lag_steps, on_error="continue", deadline_s=10.0, on_event=events.append
    ) as checkpointer:
        for step in range(1, 9 if lag_steps == 1 else 15):
            training.train_step()
            is_upset = rank == 1 and step == 4
            if is_upset and kind == "changes":
                with torch.no_grad():
                    next(training.model.parameters()).mul_(1.0)  # not by its optimizer
            if is_upset and kind == "full":
                checkpointer.fence()
                saves[-1].committed.exception()
                resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
            number = step + 1 if is_upset and kind == "steps" else step
            saves.append(checkpointer.save(number, training.state(step)))
            if step == 1 or lag_steps == 1:
                saves[-1].committed.exception()
            if is_upset and kind == "full":
                saves[-1].committed.exception()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        outcomes = [type(save.committed.exception()).__name__ for save in saves[1:]]
    return {
        "bits": training.bits(), "outcomes": outcomes,
        "not_journaled": [(event.step, event.reason) for event in events if isinstance(event, fs.NotJournaled)],
        "whole": [event.step for event in events if isinstance(event, fs.Committed)],
    }


def differ(rank: int, path: str) -> dict[str, object]:
    """Six steps by ranks that were given different lags."""
    return train(rank, path, "ddp", 6, 60.0, 1 if rank else 4)


def load(rank: int, path: str, how: str, step: int | None = None, fallback: bool = False) -> dict[str, object]:
    """What a fresh training loads, or the name of the error."""
    training = Training(how, rank)
    with fs.Checkpointer(path, deadline_s=10.0) as checkpointer:
        try:
            report = checkpointer.load(training.state(), step=step, fallback=fallback)
        except fs.FlowstoneError as error:
            return {"error": type(error).__name__, "told": str(error)}
    replay = report.replay
    return {
        "step": report.step, "bits": training.bits(), "reason": "" if replay is None else replay.reason,
        "newest": None if replay is None else replay.newest,
    }
