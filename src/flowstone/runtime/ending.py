"""The end of a Checkpointer that is never closed: the script ends, a process forked by `multiprocessing` ends, or the
last reference to it goes away."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress

from flowstone.errors import FlowstoneError
from flowstone.log import log
from flowstone.runtime.progress import say


def _nothing() -> None: ...


class Ending:
    """Closes a Checkpointer that is still open when the script ends; a failure ends the process with status 1.

    `atexit` is too late: it runs after the threads of executors have ended, and never in a process that
    `multiprocessing` has forked. Python has only private hooks that run earlier; where one is missing, nothing is
    done at that point.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        """`close` is a bound method; only a weak reference to its object is kept."""
        self._close = weakref.WeakMethod(close)
        self._expedite: Callable[[], None] | None = None
        self._failure: FlowstoneError | None = None
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def before_threads_end(self, expedite: Callable[[], None] = _nothing) -> None:
        """Also call `expedite` when Python begins to wait for threads, so that their remaining work is done fast.

        A process that `multiprocessing` has forked is closed at that point: later no hook runs in it.
        """
        register = getattr(threading, "_register_atexit", None)
        if register is not None and self._expedite is None:
            register(self._before_threads_end)
        self._expedite = expedite

    def call_off(self) -> None:
        """The Checkpointer was closed: do nothing at exit."""
        self._expedite = None
        atexit.unregister(self._at_exit)

    def fail(self, failure: FlowstoneError) -> None:
        """A save was lost and no call will raise it any more: end the process with status 1, not with success."""
        self._failure, self._expedite = failure, _nothing
        atexit.register(self._at_exit)

    def _before_threads_end(self) -> None:
        if self._expedite is None or os.getpid() != self._pid:
            return
        if _is_of_multiprocessing():
            self._at_exit()
        else:
            self._expedite()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        close, failure = self._close(), self._failure
        if close is not None:
            try:
                close()
            except FlowstoneError as error:
                failure = error
        if failure is not None:
            say(f"flowstone: {failure}")
            with suppress(Exception):  # the error was printed already; nothing reads the buffer after this
                sys.stdout.flush()
            os._exit(1)  # an exception in an exit handler would leave the status at 0


def _is_of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def without_frames(error: BaseException) -> BaseException:
    """The same error without the stack frames that it went through on a background thread.

    Otherwise a reference to a failed Save would keep its Checkpointer and the state alive. Errors of ours name their
    subject; for any other error, the place where it was raised is added as a note.
    """
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", "".join(traceback.format_exception(error)).rstrip())  # text: a record keeps frames alive
    if not isinstance(error, FlowstoneError):
        error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    seen: set[int] = set()
    linked: list[BaseException | None] = [error]
    while linked:
        one = linked.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            linked += [one.__cause__, one.__context__]
    return error
