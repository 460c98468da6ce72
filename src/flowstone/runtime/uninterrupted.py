"""What no signal's handler may cut in two: it runs on a thread of its own, for handlers run on the main one.

A handler can raise between any two instructions: when a lock is taken and nobody knows of it yet, when half of what
belongs together is closed. No `try` closes every such gap. Here the main thread does nothing but wait, and what is
raised in it meanwhile is raised once the act is over.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

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


class Acts:
    """Of one owner. They happen on one thread, which is started for the first of them, and holds nothing meanwhile."""

    _thread: _Thread | None = None

    def do(self, act: Callable[[], _Result], *, first: Callable[[], None]) -> _Result:
        """What `act` returns, or raises. Handlers' exceptions come when it is over, or before it has begun.

        first  called once on the thread of acts

        It costs two changes of threads, and the first of them starts the thread. On other threads than the main one
        handlers do not run: there it is a plain call. So it is where no thread can be started: at the end of Python, or
        by a limit.
        """
        if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
            return act()
        thread = self._started(first)
        if thread is None:
            return act()
        one = _Act(act)
        try:
            thread.acts.put(one)
            while not one.over.wait(_RECHECK_S):
                if not thread.is_there:
                    break
        except BaseException:
            if not one.begun.acquire(blocking=False):
                _await(one.over)
                one.forget()
            raise
        if not one.over.is_open:
            return act()  # the thread was ended at the same time, and has not come to it
        if one.errors:
            raise one.errors.pop()
        return one.results.pop()

    def end(self) -> None:
        """Once the act is over in which this is called. One that comes later starts a thread anew."""
        if self._thread is not None:
            self._thread.acts.put(None)
            self._thread = None

    def _started(self, first: Callable[[], None]) -> _Thread | None:
        if self._thread is not None and self._thread.is_there:
            return self._thread
        thread = _Thread(self, first)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:
            return None
        except BaseException:
            thread.acts.put(None)
            raise
        return thread


class _Act(Generic[_Result]):
    """`begun` is taken by whoever decides: the thread of acts that it is done, its caller that it is not."""

    def __init__(self, act: Callable[[], _Result]) -> None:
        self._to_do, self.results = [act], list[_Result]()
        self.errors: list[BaseException] = []
        self.begun, self.over = threading.Lock(), Latch()

    def run(self) -> None:
        if not self.begun.acquire(blocking=False):
            return  # its caller was interrupted before
        try:
            self.results.append(self._to_do.pop()())  # nothing of it is held here once its caller goes on
        except BaseException as error:
            self.errors.append(error)
        self.over.open()

    def forget(self) -> None:
        """Nobody will take what came of it. Its thread may have it in hand for a moment yet."""
        self.results.clear()
        self.errors.clear()


class _Thread(threading.Thread):
    """Does acts until it gets anything else. A forked child has none."""

    def __init__(self, owner: Acts, first: Callable[[], None]) -> None:
        super().__init__(name="flowstone-act", daemon=True)
        self.acts: SimpleQueue[object] = SimpleQueue()  # a put is one call of C, which nothing cuts in two
        self.acts.put(_Act(first))
        self._owner = weakref.ref(owner, self.acts.put)  # so is this one, once nobody holds the owner
        self._pid, self._ended = os.getpid(), False

    @property
    def is_there(self) -> bool:
        return not self._ended and os.getpid() == self._pid

    def run(self) -> None:
        while os.getpid() == self._pid and isinstance(act := self.acts.get(), _Act):
            act.run()
            del act
        self._ended = True


def _await(over: Latch) -> None:
    """Until it is open, whatever is raised here: once is enough."""
    while not over.is_open:
        with suppress(BaseException):
            over.wait()
