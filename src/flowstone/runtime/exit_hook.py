"""Closes a Checkpointer that the script never closes: at the end of the script, or of a process that `multiprocessing`
forked."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress

from flowstone.errors import FlowstoneError
from flowstone.log import log
from flowstone.runtime.interpreter import call_before_threads_end
from flowstone.runtime.progress import print_stderr


def _nothing() -> None: ...


class ExitHook:
    """Closes a Checkpointer that is still open when the script ends; a failure ends the process with status 1.

    `atexit` alone is too late: see `before_threads_end`.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        """`close` is a bound method. Only a weak reference to its object is kept, so that the hook does not keep that
        object alive.
        """
        self._close = weakref.WeakMethod(close)
        self._expedite: Callable[[], None] | None = None
        self._failure: FlowstoneError | None = None
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def before_threads_end(self, expedite: Callable[[], None] = _nothing) -> None:
        """Also call `expedite` when Python begins to wait for threads, so that saves finish fast.

        In a process that `multiprocessing` forked, the Checkpointer is closed at that time, because no later hook runs
        there.
        """
        if self._expedite is None:
            call_before_threads_end(self._before_threads_end)
        self._expedite = expedite

    def cancel(self) -> None:
        """Do nothing at exit, because the Checkpointer was closed."""
        self._expedite = None
        atexit.unregister(self._at_exit)

    def exit_with_failure(self, failure: FlowstoneError) -> None:
        """End the process with status 1, because a save has failed, and no later call will raise its error."""
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
            print_stderr(f"flowstone: {failure}")
            with suppress(Exception):  # the error is already printed
                sys.stdout.flush()
            os._exit(1)  # an exception in an exit handler would leave the exit status at 0


def _is_of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def without_frames(error: BaseException) -> BaseException:
    """The error without the stack frames of the background thread.

    With these frames, a reference to a failed Save would keep its Checkpointer and the state alive. Flowstone's own
    errors say what failed. Other errors get a note with the line that raised them.
    """
    if log.isEnabledFor(logging.DEBUG):
        # logged as text, since a log record with the error would keep the frames alive
        log.debug("%s", "".join(traceback.format_exception(error)).rstrip())
    if not isinstance(error, FlowstoneError):
        error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    seen: set[int] = set()
    linked: list[BaseException | None] = [error]
    while linked:
        current = linked.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            current.with_traceback(None)
            linked += [current.__cause__, current.__context__]
    return error
