"""Runs calls on another thread, so that no signal handler interrupts them: Python runs handlers on the main thread.

A handler can raise between any two instructions, such as after a lock is taken and before the owner is recorded. No
`try` covers every such gap. Here the main thread only waits; an exception raised in it meanwhile is raised again once
the call is over.
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

from flowstone.runtime.interpreter import request_short_slice

_Result = TypeVar("_Result")
_RECHECK_S = 1.0  # seconds; a waiter that was interrupted may have missed the release, so waits are repeated


class Latch:
    """An event that is set once and stays set. If a signal handler interrupts a waiter, no lock stays held.

    If a signal handler raises inside of a method of the standard library's Event, Future or Executor, the lock of that
    object is never released. So the main thread waits for a Latch instead.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Set the latch. Does nothing if it is set. Can be called on any thread."""
        self.is_open = True
        with suppress(RuntimeError):  # the latch is open already
            self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the latch is open, at most `timeout_s`. Returns whether it is open."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_open:
            left = _RECHECK_S if deadline is None else min(_RECHECK_S, deadline - time.monotonic())
            if left <= 0:
                return False
            if self._lock.acquire(timeout=left):  # if interrupted here, other waiters still see `is_open`
                with suppress(RuntimeError):
                    self._lock.release()
        return True


class SignalShield:
    """Runs calls of one owner on one thread, which the first call starts. Between calls the thread holds no references.
    """

    _thread: _Thread | None = None

    def run(self, act: Callable[[], _Result], *, first: Callable[[], None]) -> _Result:
        """Run `act`; return its result, or raise its error. Signal handlers run before or after `act`.

        first  called once on the new thread, before anything else

        A call costs two thread switches; the first call also starts the thread. Python runs signal handlers only on the
        main thread, so other threads call `act` directly. The main thread also calls `act` directly if no thread can be
        started: at Python's exit, or because of a limit of the system.
        """
        if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
            return act()
        thread = self._started(first)
        if thread is None:
            return act()
        queued = _ShieldedCall(act)
        try:
            thread.acts.put(queued)
            while not queued.over.wait(_RECHECK_S):
                if not thread.is_there:
                    break
        except BaseException:
            if not queued.begun.acquire(blocking=False):
                _await(queued.over)
                queued.forget()
            raise
        if not queued.over.is_open:
            return act()  # the thread has ended before it began this call
        if queued.errors:
            raise queued.errors.pop()
        return queued.results.pop()

    def end(self) -> None:
        """End the thread after the current shielded call. A later call starts a new thread."""
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


class _ShieldedCall(Generic[_Result]):
    """One call on the shield's thread. The thread acquires the lock `begun` before it runs the call; the caller
    acquires `begun` to cancel the call. Whichever acquires it first wins.
    """

    def __init__(self, act: Callable[[], _Result]) -> None:
        self._to_do, self.results = [act], list[_Result]()
        self.errors: list[BaseException] = []
        self.begun, self.over = threading.Lock(), Latch()

    def run(self) -> None:
        if not self.begun.acquire(blocking=False):
            return  # the caller was interrupted, and has cancelled the call
        try:
            # popped, so that no reference to the call is left when the caller continues
            self.results.append(self._to_do.pop()())
        except BaseException as error:
            self.errors.append(error)
        self.over.open()

    def forget(self) -> None:
        """Drop the result, which will not be used. The thread may still hold it for a moment."""
        self.results.clear()
        self.errors.clear()


class _Thread(threading.Thread):
    """Runs the calls that it receives, until it receives anything else. A forked child does not have this thread."""

    def __init__(self, owner: SignalShield, first: Callable[[], None]) -> None:
        super().__init__(name="flowstone-act", daemon=True)
        self.acts: SimpleQueue[object] = SimpleQueue()  # put is one C call, which no handler interrupts
        self.acts.put(_ShieldedCall(first))
        self._owner = weakref.ref(owner, self.acts.put)  # also one C call; ends the thread with its owner
        self._pid, self._ended = os.getpid(), False

    @property
    def is_there(self) -> bool:
        return not self._ended and os.getpid() == self._pid

    def run(self) -> None:
        try:
            # the caller waits for this thread, and torch's threads still use the processors after the end of a step
            request_short_slice()
            while os.getpid() == self._pid and isinstance(act := self.acts.get(), _ShieldedCall):
                act.run()
                del act
        finally:
            self._ended = True  # also set after an error: otherwise a caller would wait forever


def _await(over: Latch) -> None:
    """Wait until `over` is open. Ignores exceptions that signal handlers raise meanwhile."""
    while not over.is_open:
        with suppress(BaseException):
            over.wait()
