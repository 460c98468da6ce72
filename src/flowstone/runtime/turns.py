"""One verb of a Checkpointer at a time: other threads wait for their turn, and a verb inside of a verb is an error."""

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
    """Whose turn it is.

    lock  held by the thread that is in a verb. Reentrant only so that asking whether it is ours cannot block:
          `check` refuses a verb inside of a verb, which would find what the outer one is in the middle of
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pid = os.getpid()  # a fork's copy may be locked by a thread that the fork does not have
        self.verb: str | None = None
        self.calls, self.last = 0, ""  # how many verbs were entered, and the last of them
        self._thread: int | None = None  # that is in `verb`
        self.on_interrupt: Callable[[BaseException], None] = _nothing  # told what has ended a verb in its midst
        self._background: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # that saves are finished on
        self._acts = Acts()

    def leave_out_this_thread(self) -> None:
        """This is a thread that verbs wait for: a verb that is called on it would wait for itself."""
        self._background.add(threading.current_thread())

    def is_background(self) -> bool:
        """Whether this is such a thread."""
        return threading.current_thread() in self._background and os.getpid() == self.pid

    def uninterrupted(self, act: Callable[[], _Result]) -> _Result:
        """`act()`, which no signal's handler cuts in two: on a thread of its own, from which no verb can be called."""
        return self._acts.do(act, first=self.leave_out_this_thread)

    def end_acts(self) -> None:
        """Once the one is over that this is called in."""
        self._acts.end()

    def enter(self, verb: str) -> None:
        """With the lock held: from now on this thread is in `verb`."""
        self.verb = self.last = verb
        self._thread = threading.get_ident()
        self.calls += 1

    def leave(self) -> None:
        self.verb = self._thread = None

    def is_in(self, call: int) -> bool:
        """Whether the verb that was entered as number `call` has not ended yet. Any thread."""
        return self.verb is not None and self.calls == call

    def check(self, verb: str) -> None:
        """Raise BusyError where `verb` could only wait for itself."""
        self.check_thread(verb)
        is_owned: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        is_ours = self._thread == threading.get_ident()
        while is_owned() and not is_ours:
            self.lock.release()  # of a verb that was interrupted just behind `leave`
        # Who was interrupted just before it has given the lock back, and is in no verb.
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
    """A public verb of an object with a `_turn`: it waits until no other thread is in any of them.

    raises  BusyError  where it would wait for itself
    """
    verb = method.__name__

    @wraps(method)
    def in_turn(self: _Self, *args: _P.args, **named: _P.kwargs) -> _Result:
        turn = self._turn
        if os.getpid() != turn.pid:
            return method(self, *args, **named)  # which says that this is a fork
        turn.check(verb)
        # Nothing may come between: a signal's exception would leave a lock that nobody holds.
        with turn.lock:
            try:
                turn.enter(verb)
                return method(self, *args, **named)
            except Exception:
                raise
            except BaseException as error:  # a signal's: others may be in the midst of the same
                turn.on_interrupt(error)
                raise
            finally:
                turn.leave()

    return cast("Callable[Concatenate[_Self, _P], _Result]", in_turn)
