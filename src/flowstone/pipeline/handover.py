"""From the caller of `save` to the threads that finish it: which of them owns a started capture.

save_run.py draws the states. A signal handler may raise at any point of `save`. So a capture is started
uninterrupted (`uninterrupted.py`), and is registered with the threads that finish saves before the caller goes on.
They wait for the caller's part. The caller then hands the save on or gives it up, also uninterrupted. If even that
could not begin, the thread that finishes saves notices that the call has ended, and gives the save up.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from flowstone.errors import CancelledError, ClosedError
from flowstone.events import Event
from flowstone.pipeline.in_flight import InFlight
from flowstone.pipeline.pacing import Captures
from flowstone.pipeline.save_run import SaveRun
from flowstone.runtime.turns import Turn
from flowstone.store.base import Store

_LOOK_S = 1.0  # between two looks at whether the caller is still there


class Handover:
    """Hands over the saves of one Checkpointer.

    watcher  the thread that completes `captured` when a lazy capture has ended
    """

    def __init__(
        self, store: Store, turn: Turn, in_flight: InFlight, captures: Captures, emit: Callable[[Event], None],
        watcher: ThreadPoolExecutor,
    ) -> None:
        self._store, self._turn, self._in_flight, self._captures = store, turn, in_flight, captures
        self._emit, self._watcher = emit, watcher

    def start(
        self, run: SaveRun, *, begin: Callable[[], None], encode: Callable[[], None], finish: Callable[[], None]
    ) -> None:
        """Start a save; it is handed on when this returns. A save that ends early leaves no file behind.

        begin   starts its capture; called uninterrupted
        encode  the caller's part
        finish  passes it to the thread that finishes saves, which calls `is_handed_on`; called uninterrupted
        """

        def act() -> None:
            begin()
            run.call = self._turn.calls
            self._enlist(run, finish)

        try:
            self._turn.uninterrupted(act)
            encode()
            if run.outlasts_save:
                self._captures.leave_alone(run)
            else:
                self._turn.uninterrupted(partial(self._tell_captured, run))
            run.handed_on.open()
        except BaseException:
            if run.capture is not None:
                self._turn.uninterrupted(partial(self._give_up, run))
            run.unwatch()
            raise

    def _enlist(self, run: SaveRun, finish: Callable[[], None]) -> None:
        # All captures under way: the writer's thread takes saves in order, so one waits for those before it.
        run.save.captured.expedite, run.save.committed.expedite = self._captures.expedite, self._in_flight.expedite
        try:
            if run.outlasts_save:
                self._captures.add(run)
                self._watcher.submit(self.watch, run)
            finish()
        except RuntimeError as error:
            raise ClosedError(
                f"cannot save step {run.save.step}: Python is shutting down", reason=str(error),
                next="save before the script ends, not in an exit handler",
            ) from error
        self._in_flight.add(run.save)

    def is_handed_on(self, run: SaveRun) -> bool:
        """Wait for the caller's part. False if the save was given up. Runs on the thread that finishes saves."""
        while not run.handed_on.wait(_LOOK_S):
            if not self._turn.is_in(run.call):
                self._give_up(run)
        return not run.given_up

    def watch(self, run: SaveRun) -> None:
        """Complete `captured` when the last lazy byte is captured. On the watcher's thread, or the caller's."""
        try:
            run.writing.wait_captured()
        finally:
            run.handed_on.wait()
            if not run.given_up:
                self._tell_captured(run)

    def _tell_captured(self, run: SaveRun) -> None:
        try:
            self._emit(run.captured())
        finally:  # in any case: a thread may be waiting
            run.save.captured.tell()

    def _give_up(self, run: SaveRun) -> None:
        """Unless it was handed on: end it, remove its draft, close its files, and complete its futures."""
        if run.handed_on.is_open:
            return
        run.given_up = True
        try:
            run.begun.abandon(self._store)
        finally:
            run.let_sources_go()
            run.save.captured.tell()
            run.save.committed.reported = True  # the call raises the cause itself
            run.save.committed.set_exception(CancelledError("save() was interrupted", next="save again"))
            self._in_flight.forget(run.save)
            run.handed_on.open()
