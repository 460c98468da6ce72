"""The thread of one farther tier. It calls `act` when `act` is due, and runs requests of other threads in between."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from flowstone.errors import StorageError
from flowstone.log import log

T = TypeVar("T")
_AFTER_AN_ERROR_S = 60.0


class Worker:
    """Runs a tier's work in order, on one thread. `act` returns the seconds until its next call; None: its next call is
    after `wake`.

    The thread is a daemon, so a tier that never answers does not keep the process from exiting.
    """

    def __init__(self, name: str, act: Callable[[], float | None], first: Callable[[], None]) -> None:
        """`first` is called once on the thread, before anything else."""
        self._act, self._first = act, first
        self._changed = threading.Condition()
        self._asked: deque[Callable[[], None]] = deque()
        self._is_due, self._is_ended = False, False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Raises StorageError if the system refuses."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StorageError(
                "cannot start the thread that flushes to a tier", reason=str(error),
                next="raise the limits on threads and processes (ulimit -u, pids.max)",
            ) from error

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Run `act` on the thread, before the next call of the tier's work. Can be called on any thread."""
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(act())
            except BaseException as error:  # the future raises it
                future.set_exception(error)

        with self._changed:
            self._asked.append(answer)
            self._changed.notify_all()
        return future

    def wake(self) -> None:
        """Let the worker call `act` now. Can be called on any thread."""
        with self._changed:
            self._is_due = True
            self._changed.notify_all()

    @property
    def is_asked(self) -> bool:
        """Whether a request of another thread waits."""
        return bool(self._asked)

    def pause(self, seconds: float) -> None:
        """On the worker's thread: wait `seconds`, or until another thread sends a request."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._is_ended, seconds)

    def end(self, timeout_s: float) -> bool:
        """End the thread after its current work. Returns whether it has ended within `timeout_s`."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._first()
        due: float | None = None
        while True:
            with self._changed:
                left = None if due is None else max(0.0, due - self.now())
                self._changed.wait_for(lambda: self._asked or self._is_due or self._is_ended, left)
                if self._is_ended:
                    return
                request = self._asked.popleft() if self._asked else None
                if request is None:
                    self._is_due = False
            if request is not None:
                request()
                continue
            try:
                delay = self._act()
            except Exception:
                # otherwise the exception would be lost, since nothing reads this thread's result
                log.exception("a tier's thread failed")
                delay = _AFTER_AN_ERROR_S
            due = None if delay is None else self.now() + delay
