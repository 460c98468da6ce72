"""One verb of a Checkpointer at a time: other threads wait for their turn; a verb inside of a verb is an error."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from flowstone.errors import BusyError
from flowstone.runtime.uninterrupted import Acts

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def _nothing(_: BaseException) -> None: ...


class Turn:
    """The lock that makes verbs run one at a time, and what it needs to tell callers apart.

    lock  held by the thread that runs a verb. Reentrant only so that the same thread does not block on it:
    `check` refuses a verb inside of a verb, since the outer one is half done
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pid = os.getpid()  # after a fork, the lock may be held by a thread that the child does not have
        self.verb: str | None = None
        self.calls, self.last = 0, ""  # how many verbs were entered, and the name of the last one
        self._thread: int | None = None  # the thread that runs a verb
        self.on_interrupt: Callable[[BaseException], None] = _nothing  # called with what interrupted a verb
        self._background: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads that finish saves
        self._acts = Acts()

    def leave_out_this_thread(self) -> None:
        """Mark this thread as one that verbs wait for: a verb called on it would wait for itself."""
        self._background.add(threading.current_thread())

    def is_background(self) -> bool:
        """Whether this thread is marked so."""
        return threading.current_thread() in self._background and os.getpid() == self.pid

    def uninterrupted(self, act: Callable[[], _Result]) -> _Result:
        """`act()` on a thread of its own, so that no signal handler interrupts it; no verb can be called there."""
        return self._acts.do(act, first=self.leave_out_this_thread)

    def end_acts(self) -> None:
        """End the thread of acts, after the act that calls this."""
        self._acts.end()

    def enter(self, verb: str) -> None:
        """Note that this thread runs `verb` from now on. The caller holds the lock."""
        self.verb = self.last = verb
        self._thread = threading.get_ident()
        self.calls += 1

    def leave(self) -> None:
        self.verb = self._thread = None

    def is_in(self, call: int) -> bool:
        """Whether the verb with call number `call` is still running. Any thread."""
        return self.verb is not None and self.calls == call

    def check(self, verb: str) -> None:
        """Raise BusyError if `verb` would wait for itself."""
        self.check_thread(verb)
        is_owned: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        is_ours = self._thread == threading.get_ident()
        while is_owned() and not is_ours:
            self.lock.release()  # of a verb that was interrupted right after `leave`
        # A verb interrupted just before this line has released the lock, and no longer runs.
        if is_ours and is_owned() and os.getpid() == self.pid:
            raise BusyError(
                f"{verb}() was called inside of {self.verb}() of the same Checkpointer: in on_event, in a method of an "
                "object of the state, or in a signal handler",
                next=f"set a flag there, and call {verb}() once {self.verb}() has returned",
            )

    def check_thread(self, verb: str) -> None:
        """Raise BusyError on a thread that `verb` may have to wait for."""
        if self.is_background():
            raise BusyError(
                f"{verb}() was called on a thread that finishes saves: in on_event, or in a callback of a Future",
                next=f"set a flag there, and call {verb}() from the training loop",
            )


class _TakesTurns(Protocol):
    _turn: Turn


_Self = TypeVar("_Self", bound=_TakesTurns)


def one_at_a_time(
    method: Callable[Concatenate[_Self, _P], _Result],
) -> Callable[Concatenate[_Self, _P], _Result]:
    """Make a method a public verb of an object with a `_turn`: it waits until no other thread runs one.

    raises  BusyError  if it would wait for itself
    """
    verb = method.__name__

    @wraps(method)
    def in_turn(self: _Self, *args: _P.args, **named: _P.kwargs) -> _Result:
        turn = self._turn
        if os.getpid() != turn.pid:
            return method(self, *args, **named)  # the method refuses a forked child
        turn.check(verb)
        # Nothing may come between these lines: an exception from a signal handler would leave the lock held for ever.
        with turn.lock:
            try:
                turn.enter(verb)
                return method(self, *args, **named)
            except Exception:
                raise
            except BaseException as error:  # from a signal handler: other ranks may be in the middle of the same call
                turn.on_interrupt(error)
                raise
            finally:
                turn.leave()

    return cast("Callable[Concatenate[_Self, _P], _Result]", in_turn)
