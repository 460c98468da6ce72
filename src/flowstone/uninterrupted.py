"""What no signal's handler may cut in two: it runs on a thread of its own, for handlers run on the main one.

A handler can raise between any two instructions: when a lock is taken and nobody knows of it yet, when half of what
belongs together is closed. No `try` closes every such gap. Here the main thread does nothing but wait, and what is
raised in it meanwhile is raised once the act is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

_Result = TypeVar("_Result")
_RECHECK_S = 1.0  # of somebody who has lost the word that it is open


class Latch:
    """Opens once, and stays open. Whoever is interrupted while he waits leaves nothing behind that others wait for.

    The standard library's Event, Future and Executor do: a lock that is taken in one of their methods, and never
    given back, where a signal's handler raises there. So the main thread waits by this.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """A second time it changes nothing. Any thread."""
        self.is_open = True
        with suppress(RuntimeError):  # somebody has opened it already
            self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is open, after at most `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_open:
            left = _RECHECK_S if deadline is None else min(_RECHECK_S, deadline - time.monotonic())
            if left <= 0:
                return False
            if self._lock.acquire(timeout=left):  # if that is where it ends, others come to know by `is_open`
                with suppress(RuntimeError):
                    self._lock.release()
        return True


def uninterrupted(act: Callable[[], _Result], *, first: Callable[[], None]) -> _Result:
    """What `act` returns, or raises. Handlers' exceptions come when it is over, or before it has begun.

    first  called on the act's thread, before it

    About 0.1 ms. On other threads than the main one handlers do not run: there it is a plain call. So it is where no
    thread can be started: at the end of Python, or by a limit.
    """
    if threading.current_thread() is not threading.main_thread():
        return act()
    results: list[_Result] = []
    errors: list[BaseException] = []
    begun, over = threading.Lock(), Latch()

    def run() -> None:
        if not begun.acquire(blocking=False):
            return  # its caller was interrupted before
        try:
            first()
            results.append(act())
        except BaseException as error:
            errors.append(error)
        over.open()

    try:
        try:
            threading.Thread(target=run, name="flowstone-act", daemon=True).start()
        except RuntimeError:
            return act()
        over.wait()
    except BaseException:
        if not begun.acquire(blocking=False):
            _await(over)
        raise
    if errors:
        raise errors.pop()
    return results.pop()


def _await(over: Latch) -> None:
    """Until it is open, whatever is raised here: once is enough."""
    while not over.is_open:
        with suppress(BaseException):
            over.wait()
