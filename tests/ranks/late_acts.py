"""What ranks do in tests of a first save that one of them comes to late: rank 0 calls it, and goes on meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from acts import fill, opened, outcome, state_of, tensors

import flowstone as fs

DEADLINE_S = 20.0  # far more than it takes, far less than a run may take: a rank that waits for the other fails


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _step(state: dict[str, object]) -> None:
    optimizer = state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.step()


def _copies(state: dict[str, object]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors(state)]


def is_saved(path: str, step: int, kept: Sequence[torch.Tensor], state: dict[str, object]) -> bool:
    """Whether that step holds what is kept of this state, bit by bit."""
    fs.open(path, step=step).verify()
    now = _copies(state)
    with opened(path) as loader:
        loader.load(state, step=step)
    loaded = _copies(state)
    for tensor, before in zip(tensors(state), now, strict=True):
        tensor.copy_(before)
    return all(torch.equal(one, other) for one, other in zip(kept, loaded, strict=True))


def rank_1_is_late(rank: int, path: str, saves: int) -> dict[str, object]:
    """Rank 0 saves, steps, and saves again, before rank 1 comes to the first of these saves."""
    torch.manual_seed(0)
    state, events = state_of("whole"), []
    with opened(path, budget_bytes=512 << 20, deadline_s=DEADLINE_S, on_event=events.append) as saver:
        if rank == 1:
            _store().wait(["stepped"])
        kept, futures, known = [], [], []
        for number in range(1, saves + 1):
            kept.append(_copies(state))
            save = saver.save(number, state)
            futures.append(save)
            _step(state)
            known.append(save.captured.done())
        _store().set("stepped", "1")
        for save in futures:
            save.committed.result(60)
    dist.barrier()
    fenced = [event.waited_s for event in events if isinstance(event, fs.Fenced)]
    blocked = [event.blocked_s for event in events if isinstance(event, fs.Captured)]
    equal = [is_saved(path, number, one, state) for number, one in enumerate(kept, 1)]
    return {"equal": equal, "known": known, "fenced": fenced, "blocked": blocked}


class _Told(logging.Handler):
    """The first line that has these words, and what was so when it was written; then rank 1 comes."""

    def __init__(self, words: str, look: Callable[[], bool]) -> None:
        super().__init__()
        self._words, self._look = words, look
        self.said: list[tuple[str, bool]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.said.append((record.getMessage(), self._look()))
            _store().set("told", "1")


def no_room(rank: int, path: str) -> object:
    """Rank 0's copies would not fit into its budget: its step waits for rank 1, and the log says so."""
    torch.manual_seed(0)
    state = state_of("whole")
    kept = _copies(state)
    told = _Told("do not fit", lambda: all(map(torch.equal, kept, tensors(state))))
    logging.getLogger("flowstone").addHandler(told)
    engine = fs.EngineOptions(request_bytes=2 << 20)
    with opened(path, budget_bytes=4 << 20, engine=engine, deadline_s=DEADLINE_S) as saver:
        if rank == 1:
            _store().wait(["told"])
        save = saver.save(1, state)
        _step(state)
        captured = save.captured.done()
        save.committed.result(60)
    dist.barrier()
    return [is_saved(path, 1, kept, state), captured, *([] if rank else told.said)]


def changed_before_the_plan(rank: int, path: str, how: str) -> str:
    """Rank 0 changes a weight after `save`, before rank 1 has come to it, and steps. What becomes of that save."""
    torch.manual_seed(0)
    state = state_of("whole")
    model = state["model"]
    assert isinstance(model, torch.nn.Module)
    weight = next(model.parameters()).detach()  # which counts with the parameter
    kept = weight.clone()
    with opened(path, budget_bytes=512 << 20, deadline_s=DEADLINE_S, on_error="continue") as saver:
        if rank == 1:
            _store().wait(["changed"])
        save = saver.save(1, state)
        if rank == 0:
            if how == "by numpy":
                weight.numpy()[:] += 1
            elif how == "freed":
                weight.untyped_storage().resize_(0)
            else:
                weight[5, 5] += 1
            if how == "no step":
                _store().set("changed", "1")
                error = save.committed.exception(60)
            saver.fence()
            _store().set("changed", "1")
        error = save.committed.exception(60)
        if how == "freed" and rank == 0:
            weight.untyped_storage().resize_(kept.nbytes)
        fill(state, 2)
        again = outcome(saver, 2, state)
    assert again is None, again
    assert not list(Path(path).glob("step-00000001"))
    return f"{type(error).__name__}: {error}"
