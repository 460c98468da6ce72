"""The thread of one farther tier: it acts when something is due, and does what others ask of it in between."""

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
    """One thread, so that what it does is in order. `act` says in how many seconds it is due again; None: when woken.

    A daemon thread: a tier that never answers does not keep the process from ending.
    """

    def __init__(self, name: str, act: Callable[[], float | None], first: Callable[[], None]) -> None:
        """`first` is called on the thread, before anything else."""
        self._act, self._first = act, first
        self._changed = threading.Condition()
        self._asked: deque[Callable[[], None]] = deque()
        self._is_due, self._is_ended = False, False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Raises StorageError if the system refuses a thread."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StorageError(
                "cannot start the thread of a tier", reason=str(error),
                next="raise the limits on threads and processes (ulimit -u, pids.max)",
            ) from error

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def ask(self, act: Callable[[], T]) -> Future[T]:
        """Do it before anything that is due. Any thread."""
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(act())
            except BaseException as error:  # told by the future
                future.set_exception(error)

        with self._changed:
            self._asked.append(answer)
            self._changed.notify_all()
        return future

    def wake(self) -> None:
        """`act` is due now. Any thread."""
        with self._changed:
            self._is_due = True
            self._changed.notify_all()

    @property
    def is_asked(self) -> bool:
        """Whether an answer is waited for."""
        return bool(self._asked)

    def pause(self, seconds: float) -> None:
        """On the thread: wait, unless something is asked meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._is_ended, seconds)

    def end(self, timeout_s: float) -> bool:
        """End the thread after what it is doing. Whether it has ended within that time."""
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
                asked = self._asked.popleft() if self._asked else None
                if asked is None:
                    self._is_due = False
            if asked is not None:
                asked()
                continue
            try:
                delay = self._act()
            except Exception:
                log.exception("a tier's thread failed")  # on this thread, an exception would be lost
                delay = _AFTER_AN_ERROR_S
            due = None if delay is None else self.now() + delay
