"""Interrupted loads: the state cannot be saved until a load succeeds, and its bytes do not change any more."""

from __future__ import annotations

import errno
import io
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

import flowstone as fs
from flowstone.events.phases import Event, LoadProgress
from flowstone.store.base import ReadHandle, ReadReceipt
from flowstone.store.local import LocalStore
from forge import flip, place_of

ENGINE = fs.EngineOptions(queue_depth=2, request_bytes=2 << 20, workers=1)
ELEMENTS = 1 << 20


class Disturbed:
    """A reading during which something happens, once all of its bytes have arrived."""

    def __init__(self, reading: ReadHandle, happens: Callable[[], object]) -> None:
        self.reading, self._happens = reading, happens
        self._asked = False
        self.receipts = 0

    @property
    def done_bytes(self) -> int:
        return self.reading.done_bytes

    def wait(self, timeout_s: float) -> bool:
        while not self.reading.wait(timeout_s):
            pass
        if not self._asked:
            self._asked = True
            self._happens()
            return False
        return True

    def cancel(self) -> None:
        self.reading.cancel()

    def receipt(self) -> ReadReceipt:
        self.receipts += 1
        return self.reading.receipt()


class DisturbedStore(LocalStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root, ENGINE)
        self.happens: Callable[[], object] = lambda: None
        self.readings: list[Disturbed] = []

    def read_extents(self, *arguments: object, **more: object) -> Disturbed:  # type: ignore[override]
        self.readings.append(Disturbed(super().read_extents(*arguments, **more), self.happens))  # type: ignore[arg-type]
        return self.readings[-1]


def _state(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((ELEMENTS,), value) for name in ("first", "second")}


@pytest.fixture
def disturbed(store: Path) -> Iterator[DisturbedStore]:
    with fs.Checkpointer(store, engine=ENGINE) as checkpointer:
        checkpointer.save(1, _state(1.0))
        checkpointer.save(2, _state(2.0))
    opened = DisturbedStore(store)
    yield opened
    opened.close()


class Interrupted(Exception):
    """What a handler of signals may raise: an Exception, and none of ours."""


def _raise_in_a_handler() -> None:
    def handler(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def _raise(error: type[BaseException]) -> Callable[[], None]:
    def happens() -> None:
        raise error

    return happens


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(
    ("happens", "error"),
    [(_raise(KeyboardInterrupt), KeyboardInterrupt), (_raise(SystemExit), SystemExit),
     (_raise_in_a_handler, Interrupted), (_raise(MemoryError), MemoryError)],
    ids=["ctrl-c", "exit", "handler", "memory"],
)
def test_a_load_that_anything_ends_early_leaves_a_state_that_is_not_saved(
    disturbed: DisturbedStore, happens: Callable[[], None], error: type[BaseException], fallback: bool
) -> None:
    disturbed.happens = happens
    with fs.Checkpointer(disturbed) as checkpointer:
        blank = _state(0.0)
        with pytest.raises(error):
            checkpointer.load(blank, fallback=fallback)
        assert blank["first"][0] == 2.0, "the test proves nothing: nothing has changed"
        with pytest.raises(fs.DamagedError, match="the load of step 2 did not finish"):
            checkpointer.save(3, blank)
        disturbed.happens = lambda: None
        checkpointer.load(blank)
        assert checkpointer.save(3, blank).committed.result().step == 3


def test_an_on_event_that_exits_in_the_middle_of_a_load_leaves_a_state_that_is_not_saved(
    disturbed: DisturbedStore
) -> None:
    def on_event(event: Event) -> None:
        if isinstance(event, LoadProgress):
            raise KeyboardInterrupt

    with fs.Checkpointer(disturbed, on_event=on_event) as checkpointer:
        blank = _state(0.0)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.load(blank)
        with pytest.raises(fs.DamagedError, match="cannot save the state"):
            checkpointer.save(3, blank)


def test_an_on_event_that_raises_is_told_in_the_log_and_ends_no_load(disturbed: DisturbedStore) -> None:
    def on_event(event: Event) -> None:
        raise Interrupted

    with fs.Checkpointer(disturbed, on_event=on_event) as checkpointer:
        blank = _state(0.0)
        checkpointer.load(blank)
        checkpointer.save(3, blank).committed.result()


@pytest.mark.parametrize("times", [1, 5])
def test_interrupting_again_does_not_leave_a_load_that_goes_on(disturbed: DisturbedStore, times: int) -> None:
    """The engine must have let go of the caller's memory when `load` has raised, however often it was interrupted."""
    disturbed.happens = _raise(KeyboardInterrupt)
    left = times

    def receipt(self: Disturbed) -> ReadReceipt:
        nonlocal left
        self.receipts += 1
        if left:
            left -= 1
            raise KeyboardInterrupt
        return self.reading.receipt()

    with mock.patch.object(Disturbed, "receipt", receipt), fs.Checkpointer(disturbed) as checkpointer:
        with pytest.raises(KeyboardInterrupt):
            checkpointer.load(_state(0.0))
        (reading,) = disturbed.readings
        assert reading.receipts == times + 1
        assert reading.reading.wait(0.0), "it is still under way"


class Hangup(io.StringIO):
    """A terminal that has gone away."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__()
        self._error = error
        self.written = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += 1
        raise self._error()


@pytest.mark.parametrize(
    "error",
    [partial(OSError, errno.EIO, os.strerror(errno.EIO)), BrokenPipeError, partial(ValueError, "on closed file")],
    ids=["gone", "pipe", "closed"],
)
def test_a_terminal_that_goes_away_during_a_load_ends_nothing(
    disturbed: DisturbedStore, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]
) -> None:
    terminal = Hangup(error)
    monkeypatch.setattr("flowstone.runtime.progress._QUIET_FOR_S", 0.0)
    with fs.Checkpointer(disturbed) as checkpointer:
        blank = _state(0.0)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", terminal)
            checkpointer.load(blank)
        assert terminal.written == 1, "it is asked once, and then left alone"
        assert blank["second"][-1] == 2.0
        checkpointer.save(3, blank).committed.result()


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "closed"])
def test_without_a_standard_error_loads_go_on(
    disturbed: DisturbedStore, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    if stream is not None:
        stream.close()
    with fs.Checkpointer(disturbed) as checkpointer, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", stream)
        checkpointer.load(_state(0.0))


class Refusing:
    """An object whose own restore fails."""

    def __init__(self) -> None:
        self.refuse = False

    def state_dict(self) -> dict[str, object]:
        return {"n": 3}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if self.refuse:
            raise Interrupted


@pytest.mark.parametrize("verify_first", [False, True])
def test_an_object_that_fails_to_load_leaves_a_state_that_is_not_saved(store: Path, verify_first: bool) -> None:
    """Staged bytes are in place by then, though none was when the read ended."""
    state = {"weights": torch.ones(1000), "loader": Refusing()}
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        blank = {"weights": torch.zeros(1000), "loader": Refusing()}
        blank["loader"].refuse = True
        with pytest.raises(fs.StateError, match="loader"):
            checkpointer.load(blank, verify_first=verify_first)
        assert blank["weights"][0] == 1.0
        with pytest.raises(fs.DamagedError, match="cannot save the state"):
            checkpointer.save(2, blank)


def test_a_load_that_ended_before_the_first_byte_forbids_nothing(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(1000)}).committed.result()
        flip(*place_of(store / "step-00000001", "a"))
        blank = {"a": torch.zeros(1000)}
        with pytest.raises(fs.DamagedError):
            checkpointer.load(blank)
        assert not blank["a"].any()
        checkpointer.save(2, blank).committed.result()
