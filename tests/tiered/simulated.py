"""Tiers whose threads are calls and whose clock is the test's; and stores that fail when the test requests it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch

import flowstone as fs
from flowstone.errors import FullError, StorageError
from flowstone.store.base import Store
from flowstone.store.wrap import Wrapper

T = TypeVar("T")
ENGINE = fs.EngineOptions(request_bytes=2 << 20, workers=1)


class Clock:
    """Time that passes when the test says so. `workers`: those that were made, with what is due."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.workers: list[Inline] = []

    def advance(self, seconds: float) -> None:
        """Let time pass; what is due meanwhile is done at its time."""
        end = self.now + seconds
        while True:
            due = [worker for worker in self.workers if worker.due is not None and worker.due <= end]
            if not due:
                break
            first = min(due, key=lambda worker: worker.due or 0.0)
            self.now = max(self.now, first.due or 0.0)
            first.run()
        self.now = end


class Inline:
    """A Worker without a thread: what is asked is done at once, and what is due when the clock says so."""

    def __init__(self, clock: Clock, act: Callable[[], float | None]) -> None:
        self._clock, self._act = clock, act
        self.due: float | None = None
        self._is_running, self.is_asked, self._is_ended = False, False, False
        clock.workers.append(self)

    def start(self) -> None: ...

    def now(self) -> float:
        return self._clock.now

    def submit(self, act: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(act())
        except Exception as error:
            future.set_exception(error)
        return future

    def wake(self) -> None:
        if not self._is_running and not self._is_ended:
            self.run()

    def run(self) -> None:
        self._is_running, self.due = True, None
        try:
            delay = self._act()
        finally:
            self._is_running = False
        self.due = None if delay is None else self._clock.now + delay

    def pause(self, seconds: float) -> None:
        self._clock.now += seconds

    def end(self, timeout_s: float) -> bool:
        self._is_ended, self.due = True, None
        return True


@contextmanager
def simulated() -> Iterator[Clock]:
    """Tiers made inside have no threads."""
    clock = Clock()
    with mock.patch("flowstone.tiered.flusher.Worker", lambda name, act, first: Inline(clock, act)):
        yield clock


class Unsteady(Wrapper):
    """A store that refuses every call while it is `down`, and every write while it is `full`."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.down = self.full = False
        self.calls = 0

    def _call(self, verb: str, path: str, act: Callable[[], T]) -> T:
        self.calls += 1
        if self.down and verb not in ("unlock", "close"):
            raise StorageError(f"cannot {verb} {path}: unreachable", errno=errno.EHOSTUNREACH)
        if self.full and verb in ("put", "write"):
            raise FullError(f"cannot {verb} {path}: no space", errno=errno.ENOSPC)
        return act()


def state(step: int, elements: int = 300_000) -> dict[str, Any]:
    return {"weights": torch.arange(elements, dtype=torch.float32) + step, "rng": fs.rng(), "step": step}


def is_of(step: int, record: dict[str, Any]) -> bool:
    return bool(torch.equal(record["weights"], state(step)["weights"])) and record["step"] == step


def save(checkpointer: fs.Checkpointer, step: int) -> None:
    checkpointer.save(step, state(step)).committed.result()
    checkpointer._saves.sole_writer.drain()  # retention, and what follows a commit


def told(events: list[Any], kind: type[T]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]
