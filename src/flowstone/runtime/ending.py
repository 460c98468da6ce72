"""The end of a Checkpointer that nobody closes: its script is over, its process is one that `multiprocessing` has
forked, or nobody holds it any more."""

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
from flowstone.runtime.progress import say

_log = logging.getLogger("flowstone")


class Ending:
    """Closes what was not closed, if it is alive when the script ends; a failure ends the process with 1.

    What `atexit` calls comes after the threads of executors have come to their ends, and in a process that
    `multiprocessing` has forked not at all. Python has no public name for the moment before, in either; where it has
    none at all, nothing is done then.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        """`close` is a bound method. Its object is not held."""
        self._close = weakref.WeakMethod(close)
        self._expedite: Callable[[], None] | None = None
        self._failure: FlowstoneError | None = None
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def before_threads_end(self, expedite: Callable[[], None]) -> None:
        """Have `expedite` called, too, when Python begins to wait for threads: for what they still have to do."""
        register = getattr(threading, "_register_atexit", None)
        if register is not None and self._expedite is None:
            register(self._before_threads_end)
        self._expedite = expedite

    def call_off(self) -> None:
        """It has been closed."""
        self._expedite = None
        atexit.unregister(self._at_exit)

    def fail(self, failure: FlowstoneError) -> None:
        """What nobody could see any more has lost a save: at its end the process must not look as if all were well."""
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
            with suppress(Exception):  # nobody reads it any more
                sys.stdout.flush()
            os._exit(1)  # an exception in an exit handler would leave the status at 0


def _nothing() -> None: ...


def _is_of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def without_frames(error: BaseException) -> BaseException:
    """The same error, that no longer keeps alive the frames that it went through: a background thread's.

    Whoever keeps a failed Save would keep its Checkpointer, and the state. Errors of ours say what they are about;
    where any other one came from is added to it as a note.
    """
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", "".join(traceback.format_exception(error)).rstrip())  # text: a record keeps no frame alive
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
