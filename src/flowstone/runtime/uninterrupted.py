"""Acts that a signal handler must not interrupt run on a thread of their own: Python runs handlers on the main one.

A handler can raise between any two instructions: after a lock is taken and before that is noted, or when one of two
objects that belong together is closed. No `try` closes every such gap. Here the main thread only waits; an exception
raised in it meanwhile is raised again once the act is over.
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

from flowstone.runtime import time_slice

_Result = TypeVar("_Result")
_RECHECK_S = 1.0  # in case a waiter was interrupted and missed the release


class Latch:
    """An event that is set once and stays set. A waiter that is interrupted leaves no lock behind.

    The standard library's Event, Future and Executor do leave one: if a signal handler raises inside of their methods,
    a lock that they took is never released. So the main thread waits on a Latch.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Set it; setting it again does nothing. Any thread."""
        self.is_open = True
        with suppress(RuntimeError):  # it is open already
            self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is open, at most `timeout_s`. Returns whether it is."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_open:
            left = _RECHECK_S if deadline is None else min(_RECHECK_S, deadline - time.monotonic())
            if left <= 0:
                return False
            if self._lock.acquire(timeout=left):  # if interrupted here, other waiters still see `is_open`
                with suppress(RuntimeError):
                    self._lock.release()
        return True


class Acts:
    """Runs acts of one owner on one thread, which the first act starts; the thread holds no reference between acts."""

    _thread: _Thread | None = None

    def do(self, act: Callable[[], _Result], *, first: Callable[[], None]) -> _Result:
        """Run `act`; return its result, or raise its error. Signal handlers raise before or after it.

        first  called once on the thread of acts, when it starts

        An act costs two thread switches; the first also starts the thread. Threads other than the main one run no
        handlers, so there `act` is simply called; also if no thread can be started, at Python's exit or because of a
        limit.
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
            return act()  # the thread ended meanwhile, before it began this act
        if one.errors:
            raise one.errors.pop()
        return one.results.pop()

    def end(self) -> None:
        """End the thread after the act that calls this. A later act starts a new thread."""
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
    """One act. Its thread takes `begun` to run it, its caller to cancel it; the first one wins."""

    def __init__(self, act: Callable[[], _Result]) -> None:
        self._to_do, self.results = [act], list[_Result]()
        self.errors: list[BaseException] = []
        self.begun, self.over = threading.Lock(), Latch()

    def run(self) -> None:
        if not self.begun.acquire(blocking=False):
            return  # its caller was interrupted, and has cancelled it
        try:
            self.results.append(self._to_do.pop()())  # popped: nothing refers to it once the caller goes on
        except BaseException as error:
            self.errors.append(error)
        self.over.open()

    def forget(self) -> None:
        """Drop the result, which will not be used. The thread may still hold it for a moment."""
        self.results.clear()
        self.errors.clear()


class _Thread(threading.Thread):
    """Runs acts until it is sent anything else. A forked child does not have this thread."""

    def __init__(self, owner: Acts, first: Callable[[], None]) -> None:
        super().__init__(name="flowstone-act", daemon=True)
        self.acts: SimpleQueue[object] = SimpleQueue()  # put is one C call, which no handler interrupts
        self.acts.put(_Act(first))
        self._owner = weakref.ref(owner, self.acts.put)  # also one C call; ends the thread with its owner
        self._pid, self._ended = os.getpid(), False

    @property
    def is_there(self) -> bool:
        return not self._ended and os.getpid() == self._pid

    def run(self) -> None:
        try:
            time_slice.shorten()  # its caller only waits for it, and torch's threads still spin when a step has ended
            while os.getpid() == self._pid and isinstance(act := self.acts.get(), _Act):
                act.run()
                del act
        finally:
            self._ended = True  # whatever has ended it: a caller that did not learn of it would wait for ever


def _await(over: Latch) -> None:
    """Wait until `over` is open, even if an exception is raised here; it is raised afterwards, the first one only."""
    while not over.is_open:
        with suppress(BaseException):
            over.wait()
