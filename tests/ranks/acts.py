"""Functions that tests run on every rank of a job of real processes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flowstone as fs
from flowstone.errors import is_damage
from flowstone.store.system import System


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(300, 401), nn.Linear(401, 300), nn.Linear(300, 7))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def state_of(how: str) -> dict[str, object]:
    """A model and its optimizer, stepped once: "whole" on each rank, "rows" or "columns" of it, or as FSDP has it.

    That is FSDP2 ("fsdp"), or FSDP1 with "flat" parameters or the "original" ones.
    """
    model: nn.Module = Net()
    if dist.is_initialized() and how != "whole":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if how == "fsdp":
            for layer in model.body:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif how in ("flat", "original"):
            model = FullyShardedDataParallel(
                model, device_id=torch.device("cpu"), use_orig_params=how == "original"
            )
        else:
            shard(model, mesh, how)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": fs.rng(), "step": 0}


def shard(model: nn.Module, mesh: object, how: str) -> None:
    for module in model.body:
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = parameter.dim() - 1 if how == "columns" else 0
            made = distribute_tensor(parameter.detach(), mesh, [Shard(dim)])  # type: ignore[arg-type]
            setattr(module, name, nn.Parameter(made))


def tensors(state: dict[str, object]) -> list[torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    slots = [slot for of in optimizer.state.values() for slot in of.values()]
    return [*(p.data for p in model.parameters()), *model.buffers(), *slots]


def fill(state: dict[str, object], value: float) -> None:
    for tensor in tensors(state):
        tensor.fill_(value)
    state["step"] = int(value)


def pattern(state: dict[str, object]) -> list[torch.Tensor]:
    """What each tensor holds in the test of layouts: every element another number. Whole, in order."""
    return [torch.arange(t.numel(), dtype=torch.float32).view(t.shape) + i for i, t in enumerate(tensors(state))]


def put(state: dict[str, object], wholes: list[torch.Tensor]) -> None:
    for tensor, whole in zip(tensors(state), wholes, strict=True):
        tensor.copy_(as_it_lies(tensor, whole))


def as_it_lies(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else whole


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def opened(path: str | list[str], **options: object) -> fs.Checkpointer:
    return fs.Checkpointer(path, **{"budget_bytes": 32 << 20, "deadline_s": 60.0, **options})  # type: ignore[arg-type]


def outcome(checkpointer: fs.Checkpointer, step: int, state: dict[str, object]) -> BaseException | None:
    """Why `state` is not saved as `step`, whether that is refused at once or told in the end."""
    try:
        return checkpointer.save(step, state).committed.exception(60)
    except fs.FlowstoneError as refused:
        return refused


def save_steps(rank: int, path: str, how: str, steps: int) -> None:
    """Save again and again, each step with a number of its own."""
    state = state_of(how)
    with opened(path) as checkpointer:
        for step in range(1, steps + 1):
            fill(state, step)
            checkpointer.save(step, state)
            state["optimizer"].step()  # type: ignore[attr-defined]


def load_and_save_on(rank: int, path: str, how: str) -> list[object]:
    """What a load raises without `fallback`, and what it changes; what one with it loads; save the next step.
    """
    state = state_of(how)
    fill(state, 0)
    with opened(path) as checkpointer:
        refused = [raised(checkpointer.latest), raised(lambda: checkpointer.load(state))]
        untouched = all(bool((tensor == 0).all()) for tensor in tensors(state))
        report = checkpointer.load(state, fallback=True)
        held = {value for tensor in tensors(state) for value in local(tensor).unique().tolist()}
        fill(state, report.step + 1)
        checkpointer.save(report.step + 1, state).committed.result(60)
        return [refused, untouched, report.step, sorted(held), list(report.notes)]


def raised(act: Callable[[], object]) -> tuple[bool, str]:
    """Whether an error tells damage, and what it says."""
    try:
        act()
    except fs.FlowstoneError as error:
        return is_damage(error), error.message
    return False, ""


def save_pattern(rank: int, path: str, how: str) -> None:
    state = state_of(how)
    put(state, pattern(state))
    with opened(path) as checkpointer:
        checkpointer.save(1, state).committed.result(60)
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.step == 1


def load_pattern(rank: int, path: str, how: str) -> int:
    """Whether every element is where it belongs; the bytes that this rank read."""
    state = state_of(how)
    fill(state, -1)
    with opened(path) as checkpointer:
        report = checkpointer.load(state)
    assert report.step == 1
    for tensor, whole in zip(tensors(state), pattern(state), strict=True):
        assert torch.equal(local(tensor), local(as_it_lies(tensor, whole)))
    return report.bytes


def one_cannot(rank: int, path: str, failing: int) -> str:
    """One rank has something in its state that cannot be saved, then not any more. What it and the others are told."""
    state = state_of("rows")
    fill(state, 1)
    with opened(path, on_error="continue") as checkpointer:
        checkpointer.save(1, state).committed.result(60)
        bad = {**state, "extra": object()} if rank == failing else state
        error = outcome(checkpointer, 2, bad)
        fill(state, 3)
        assert checkpointer.save(3, state).committed.result(60).step == 3
    return f"{type(error).__name__}: {error}"


def first_fails(rank: int, path: str) -> str:
    """The very first save fails on one rank, while the others already step; the same step is then saved."""
    state = state_of("rows")
    fill(state, 1)
    bad = {"extra": object()} if rank == 1 else {}
    with opened(path, on_error="continue") as checkpointer:
        try:
            save = checkpointer.save(1, {**state, **bad})
            state["optimizer"].step()  # type: ignore[attr-defined]
            error = save.committed.exception(60)
        except fs.FlowstoneError as refused:
            error = refused
        fill(state, 1)
        assert checkpointer.save(1, state).committed.result(60).step == 1
    return type(error).__name__


def one_full_disk(rank: int, path: str, failing: int) -> str:
    """There is no room for one rank's segment. What every rank is told; the next try succeeds."""
    state = state_of("rows")
    fill(state, 1)
    with opened(path, on_error="continue") as checkpointer:
        checkpointer.save(1, state).committed.result(60)
        full = mock.patch.object(System, "reserve", side_effect=OSError(errno.ENOSPC, "No space left on device"))
        with full if rank == failing else nullcontext():
            error = outcome(checkpointer, 2, state)
        fill(state, 2)
        assert checkpointer.save(2, state).committed.result(60).step == 2
    return f"{type(error).__name__}: {error}"


def different_steps(rank: int, path: str) -> str:
    state = state_of("rows")
    with opened(path, on_error="continue", deadline_s=4.0) as checkpointer:
        return str(checkpointer.save(rank + 1, state).committed.exception(60))


def one_step_behind(rank: int, path: str) -> list[str]:
    """Rank 1 tries a step twice that rank 0 tries once: it lags, loses that call, and has caught up with the next."""
    state = state_of("rows")
    reported = []
    with opened(path, on_error="continue") as checkpointer:
        for step in (1, 2, 2, 3) if rank == 1 else (1, 2, 3):
            bad = {"extra": object()} if rank == 1 and step == 2 and len(reported) == 1 else {}
            fill(state, step)
            reported.append(type(outcome(checkpointer, step, {**state, **bad})).__name__)
    return reported


def try_unequally(rank: int, checkpointer: fs.Checkpointer, state: dict[str, object]) -> None:
    """Step 1 is saved. Then rank 1 tries step 2 twice while the other tries 3, which fails."""
    checkpointer.save(1, state).committed.result(60)
    for _ in range(2 * rank):
        outcome(checkpointer, 2, state)
    outcome(checkpointer, 3, {**state, **({"extra": object()} if rank == 1 else {})})


def unequal_tries(rank: int, path: str) -> list[str]:
    """Both try step 2, until they have it."""
    state = state_of("rows")
    with opened(path, on_error="continue") as checkpointer:
        try_unequally(rank, checkpointer, state)
        tries = [str(outcome(checkpointer, 2, state)) for _ in range(2)]
        fill(state, 3)
        checkpointer.save(3, state).committed.result(60)
    return tries


def rewound_after_unequal_tries(rank: int, path: str) -> list[str]:
    """All go back to step 1, and save 2 and 3 once."""
    state = state_of("rows")
    with opened(path, on_error="continue") as checkpointer:
        try_unequally(rank, checkpointer, state)
        checkpointer.rewind(1)
        tries = []
        for step in (2, 3):
            fill(state, step)
            tries.append(str(outcome(checkpointer, step, state)))
        return tries


def other_values(rank: int, path: str) -> str:
    """A value that differs between ranks, without being declared per rank."""
    state = {**state_of("rows"), "note": f"rank {rank}"}
    with opened(path, on_error="continue") as checkpointer:
        return str(checkpointer.save(1, state).committed.exception(60))


def begin_afresh(rank: int, path: str) -> list[str]:
    """As a script does that may be the first: load, or begin where there is nothing. What it was told."""
    state = state_of("rows")
    reported = []
    with opened(path) as checkpointer:
        for step in (None, 7, None):
            try:
                checkpointer.load(state, step=step)
            except fs.NoCheckpointError as error:
                reported.append(str(error))
            if step is None:
                checkpointer.save(len(reported), state).committed.result(60)
    return reported


def wrong_shape(rank: int, path: str) -> str:
    """A load that cannot be on one rank is none on all, and nothing has changed anywhere."""
    state: dict[str, object] = {"x": torch.zeros(8)}
    with opened(path) as checkpointer:
        checkpointer.save(1, state).committed.result(60)
        target: dict[str, object] = {"x": torch.full((9 if rank == 1 else 8,), 5.0)}
        try:
            checkpointer.load(target)
        except fs.FlowstoneError as error:
            assert torch.equal(target["x"], torch.full_like(target["x"], 5.0))  # type: ignore[call-overload]
            return f"{type(error).__name__}: {error}"
    return "loaded"


def save_documents(rank: int, path: str, length: int) -> None:
    """A model with its documents, which the first rank alone has."""
    documents = {"config.json": b"{}", "tokenizer.json": b"t" * length} if rank == 0 else None
    with opened(path) as checkpointer:
        checkpointer.save(1, {**state_of("whole"), "huggingface": fs.PerRank(documents)})
