"""Functions for tests of a first save for which one rank is late: rank 0 calls it, and continues meanwhile."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from acts import fill, opened, outcome, state_of, tensors

import flowstone as fs
from flowstone.coordination.save_coordinator import SaveCoordinator
from flowstone.save import capture_start, ownership
from flowstone.save.ownership import SaveOwnership
from flowstone.save.pending_plan import PendingPlan

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
    return all(torch.equal(tensor, other) for tensor, other in zip(kept, loaded, strict=True))


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
    equal = [is_saved(path, number, entry, state) for number, entry in enumerate(kept, 1)]
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
    reported = _Told("do not fit", lambda: all(map(torch.equal, kept, tensors(state))))
    logging.getLogger("flowstone").addHandler(reported)
    engine = fs.EngineOptions(request_bytes=2 << 20)
    with opened(path, budget_bytes=4 << 20, engine=engine, deadline_s=DEADLINE_S) as saver:
        if rank == 1:
            _store().wait(["told"])
        save = saver.save(1, state)
        _step(state)
        captured = save.captured.done()
        save.committed.result(60)
    dist.barrier()
    return [is_saved(path, 1, kept, state), captured, *([] if rank else reported.said)]


def _early() -> dict[str, object]:
    """A state without an optimizer: all must be captured before `save` returns, and `narrow` has no room for copies."""
    return {"x": {str(i): torch.full((1 << 20,), float(i)) for i in range(3)}, "few": torch.ones(10), "step": 1}


def _own(state: dict[str, object]) -> list[torch.Tensor]:
    return [*state["x"].values(), state["few"]]  # type: ignore[attr-defined]


def narrow(path: str, **options: object) -> fs.Checkpointer:
    engine = fs.EngineOptions(request_bytes=2 << 20)
    return opened(path, **{"budget_bytes": 8 << 20, "engine": engine, "deadline_s": DEADLINE_S} | options)


def told_of_waits() -> _Told:
    reported = _Told("save waits until all ranks have called it", lambda: True)
    logging.getLogger("flowstone").addHandler(reported)
    return reported


def no_room_for_what_must_not_wait(rank: int, path: str) -> object:
    """Rank 0's copies would not fit into its budget: its `save` waits for rank 1, and the log says so."""
    state = _early()
    own = _own(state)
    kept, events, reported = [tensor.clone() for tensor in own], list[object](), told_of_waits()
    with narrow(path, on_event=events.append) as saver:
        if rank == 1:
            _store().wait(["told"])
        begin = time.monotonic()
        save = saver.save(1, state)
        took_s, captured = time.monotonic() - begin, save.captured.done()
        for tensor in own:
            tensor.fill_(-1)
        checkpoint = save.committed.result(60)
        copied = saver._saves.captures._copied_bytes
    dist.barrier()
    names = [*(f"x.{index}" for index in range(3)), "few"]
    equal = all(torch.equal(checkpoint.read(name), tensor) for name, tensor in zip(names, kept, strict=True))
    blocked = next(event.blocked_s for event in events if isinstance(event, fs.Captured))
    # What is said of the time that `save` has blocked has the wait in it; afterwards nothing of the budget is in use.
    return [equal, captured, rank == 1 or blocked > took_s / 2, copied == 0, *(item for item, _ in reported.said)]


def no_room_but_for_small_ones(rank: int, path: str) -> list[object]:
    """Staging memory has all that it may have of the budget before the first save. Only small pieces must not wait."""
    state = {"large": torch.ones(36 << 20), "few": {str(i): torch.full((1000,), float(i)) for i in range(200)}}
    reported = told_of_waits()
    with narrow(path, budget_bytes=64 << 20) as saver:
        prepared = saver.prepare(state)
        if rank == 1:
            _store().wait(["saved"])
        save = saver.save(1, state, fence="manual")
        for tensor in state["few"].values():  # type: ignore[union-attr]
            tensor.fill_(-1)
        _store().set("saved", "1")
        checkpoint = save.committed.result(60)
        right = all((checkpoint.read(f"few.{index}") == index).all().item() for index in range(200))
        return [right, len(reported.said), prepared.bytes]


def dies_while_another_waits(rank: int, path: str, when: str) -> object:
    """Rank 0's `save` waits, and rank 1 is killed: before it calls it, in the middle of the plan, or of the capture."""
    state, reported = _early(), told_of_waits()
    saver = narrow(path, on_error="continue", deadline_s=8.0)
    if rank == 1:
        _store().wait(["told"])
        points: dict[str, tuple[object, str]] = {
            "before": (fs.Checkpointer, "save"), "plan": (SaveCoordinator, "assign"),
            "capture": (capture_start, "watch"),
        }
        with mock.patch.object(*points[when], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)):
            saver.save(1, state).committed.result(60)
    save = saver.save(1, state)
    error = save.committed.exception(60)
    saver.fence()
    saver.close()
    return [f"{type(error).__name__}: {error}", len(reported.said)]


def is_elsewhere_while_another_waits(rank: int, path: str, deadline_s: float) -> str:
    """Rank 1 waits for rank 0, in training's own way, before it calls `save`; and rank 0 waits for it in there."""
    state = _early()
    with mock.patch.object(ownership, "BLOCKED_CALLER_WAIT_S", 1.0), narrow(
        path, on_error="continue", deadline_s=deadline_s
    ) as saver:
        if rank == 1:
            dist.barrier()
        error = outcome(saver, 1, state)
        if rank == 0:
            dist.barrier()
        assert outcome(saver, 2, state) is None
    return f"{type(error).__name__}: {error}"


def is_interrupted_while_it_waits(rank: int, path: str, when: str) -> object:
    """Ctrl-C ends the wait of rank 0's `save`, and the state changes at once. Then all save that step again.

    when  before rank 1 has come to it; after the capture; or twice, so that nothing could be done at the first time
    """
    state, awaited = _early(), SaveOwnership.await_release
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(owned: SaveOwnership, waiting: PendingPlan, short_wait: object) -> None:
        if when != "before":
            _store().set("go", "1")
            awaited(owned, waiting, short_wait)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):  # the handler runs here
            time.sleep(0.01)

    fails = mock.patch.object(SaveOwnership, "forget", side_effect=KeyboardInterrupt)
    twice = fails if when == "twice" else nullcontext()
    with narrow(path, on_error="continue") as saver:
        message = "nothing"
        try:
            if rank == 1:
                _store().wait(["go"])
                saver.save(1, state).committed.result(60)
            with mock.patch.object(SaveOwnership, "await_release", interrupted), twice:
                saver.save(1, state)
        except (fs.FlowstoneError, KeyboardInterrupt) as error:
            message = f"{type(error).__name__}: {error}"
        saver.fence()
        for tensor in _own(state):
            tensor.fill_(-1)
        _store().set("go", "1")
        checkpoint = saver.save(1, state).committed.result(60)
    return [message, all((checkpoint.read(name) == -1).all().item() for name in ("x.0", "x.2", "few"))]


def layouts_that_wait(rank: int, path: str) -> list[object]:
    """Saves of three layouts, one after the other; each is waited for, and one has a tensor larger than the budget."""
    reported, right = told_of_waits(), []
    with narrow(path) as saver:
        for step, added in enumerate(({}, {"large": torch.ones(3 << 20)}, {"other": torch.ones(1 << 20)}), 1):
            state: dict[str, object] = _early() | added
            saves = [saver.save(2 * step - 1, state)]
            for tensor in (*_own(state), *added.values()):
                tensor += 1
            saves.append(saver.save(2 * step, state))
            for tensor in (*_own(state), *added.values()):
                tensor.fill_(-1)
            for number, save in enumerate(saves):
                checkpoint = save.committed.result(60)
                names = {"x.1": 1.0, "few": 1.0, **dict.fromkeys(added, 1.0)}
                right += [bool((checkpoint.read(name) == value + number).all()) for name, value in names.items()]
    return [right, len(reported.said)]


def a_lazy_save_comes_first(rank: int, path: str) -> list[object]:
    """A save waits for room behind one that is captured so slowly, beside training, that it would take an hour."""
    del rank
    torch.manual_seed(0)
    model = torch.nn.Linear(2048, 2048)
    slow = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with narrow(path) as saver:
        saver.save(1, slow).committed.result(60)
        saver._saves.captures._overlaps_s = (3600.0,)
        first = saver.save(2, slow)
        begin = time.monotonic()
        second = saver.save(3, _early())
        took_s = time.monotonic() - begin
        return [took_s < DEADLINE_S, first.committed.result(60).step, second.committed.result(60).step]


def changed_before_the_plan(rank: int, path: str, how: str, steps: bool) -> str:
    """Rank 0 changes a tensor after `save`, before rank 1 has come to it. What becomes of that save.

    steps  a step of rank 0 copies the state before rank 1 comes
    """
    torch.manual_seed(0)
    state = state_of("whole")
    model = state["model"]
    assert isinstance(model, torch.nn.Module)
    optimizer = state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    parameter = next(model.parameters())
    weight = parameter.detach()  # which counts with the parameter
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
            elif how == "one row through data":
                weight.data[5] += 1
            elif how == "one row by numpy":
                weight.numpy()[-1] = 7
            elif how == "one row of a moment":
                optimizer.state[parameter]["exp_avg"].data[5] += 1
            else:
                weight[5, 5] += 1
            if not steps:
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
