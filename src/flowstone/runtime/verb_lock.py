"""Runs one verb (save, load, ...) of a Checkpointer at a time. Other threads wait. A verb that is called from within
another verb raises an error.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from flowstone.errors import BusyError
from flowstone.runtime.signal_shield import SignalShield

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


class VerbCounter:
    """Counts the calls of a Checkpointer's verbs (save, load, ...).

    calls  how many calls have begun
    last   verb of the last call
    verb   verb of the running call; None if no call runs
    """

    def __init__(self) -> None:
        self.calls, self.last = 0, ""
        self.verb: str | None = None

    def enter(self, verb: str) -> None:
        self.verb = self.last = verb
        self.calls += 1

    def leave(self) -> None:
        self.verb = None

    def is_in(self, call: int) -> bool:
        """Whether the verb with call number `call` is still running. Can be called on any thread."""
        return self.verb is not None and self.calls == call


class VerbLock:
    """The lock that lets only one verb (a method of a Checkpointer such as save or load) run at a time, and the record
    of which thread runs which verb.

    lock          held by the thread that runs a verb. It is reentrant, so that a verb called from within another verb
                  raises an error in `check_not_nested` instead of waiting forever for itself
    on_interrupt  called with the exception that interrupts a verb
    """

    def __init__(self, counter: VerbCounter, on_interrupt: Callable[[BaseException], None]) -> None:
        self.lock = threading.RLock()
        self._ownership = threading.Condition(self.lock)  # a Condition can tell whether this thread holds the lock
        self.pid = os.getpid()  # after a fork, a thread that the child does not have may hold the lock
        self.counter, self.on_interrupt = counter, on_interrupt
        self._thread: int | None = None  # the thread that runs a verb
        self._background: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads that finish saves
        self._acts = SignalShield()

    def mark_background_thread(self) -> None:
        """Mark this thread as a background thread. Verbs wait for such threads, so a verb must not be called on one."""
        self._background.add(threading.current_thread())

    def is_background_thread(self) -> bool:
        """Whether this thread is marked as a background thread."""
        return threading.current_thread() in self._background and os.getpid() == self.pid

    def uninterrupted(self, act: Callable[[], _Result]) -> _Result:
        """Run `act` on another thread, so that no signal handler interrupts it. `act` must not call verbs."""
        return self._acts.run(act, first=self.mark_background_thread)

    def end_shield(self) -> None:
        """After its current call, end the thread that runs calls which no signal handler may interrupt."""
        self._acts.end()

    def enter(self, verb: str) -> None:
        """Record that this thread runs `verb` from now on. The caller holds the lock."""
        self._thread = threading.get_ident()
        self.counter.enter(verb)

    def leave(self) -> None:
        self.counter.leave()
        self._thread = None

    def check_not_nested(self, verb: str) -> None:
        """Raise BusyError if `verb` would wait for itself."""
        self.check_thread(verb)
        is_ours = self._thread == threading.get_ident()
        while self._is_owned() and not is_ours:
            self.lock.release()  # held by a verb that was interrupted right after `leave`
        # A verb that was interrupted right before `leave` no longer runs: it has released the lock, but not cleared
        # `_thread`. So this thread must also hold the lock.
        if is_ours and self._is_owned() and os.getpid() == self.pid:
            outer = self.counter.verb or self.counter.last  # a signal handler may call right before or after a verb
            raise BusyError(
                f"{verb}() was called inside of {outer}() of the same Checkpointer: from on_event, from a method "
                "of an object in the state, or from a signal handler",
                next=f"set a flag there, and call {verb}() once {outer}() has returned",
            )

    def _is_owned(self) -> bool:
        """Whether this thread holds the lock."""
        try:
            self._ownership.notify()  # wakes no thread; it only raises if this thread does not hold the lock
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise  # the error comes from a signal handler
            return False
        return True

    def check_thread(self, verb: str) -> None:
        """Raise BusyError if `verb` may have to wait for this thread."""
        if self.is_background_thread():
            raise BusyError(
                f"{verb}() was called on a thread that finishes saves: from on_event, or from a callback of a Future",
                next=f"set a flag there, and call {verb}() from the training loop",
            )


class _TakesTurns(Protocol):
    _verb_lock: VerbLock


_Self = TypeVar("_Self", bound=_TakesTurns)


def exclusive_verb(
    method: Callable[Concatenate[_Self, _P], _Result],
) -> Callable[Concatenate[_Self, _P], _Result]:
    """Decorate a public verb of an object with a `_verb_lock`: the verb waits until no other thread runs one.

    raises  BusyError  the verb would wait for itself
    """
    verb = method.__name__

    @wraps(method)
    def in_turn(self: _Self, *args: _P.args, **named: _P.kwargs) -> _Result:
        verb_lock = self._verb_lock
        if os.getpid() != verb_lock.pid:
            return method(self, *args, **named)  # the method itself refuses to run in a forked child
        verb_lock.check_not_nested(verb)
        # No code may be between these lines: an exception from a signal handler would leave the lock held for ever.
        with verb_lock.lock:
            try:
                verb_lock.enter(verb)
                return method(self, *args, **named)
            except Exception:
                raise
            except BaseException as error:  # from a signal handler: other ranks may be in the middle of the same call
                verb_lock.on_interrupt(error)
                raise
            finally:
                verb_lock.leave()

    return cast("Callable[Concatenate[_Self, _P], _Result]", in_turn)
