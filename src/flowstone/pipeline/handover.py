"""From the caller of `save` to the threads that finish it: which of them owns a started capture.

save_run.py draws the states. A signal handler may raise at any point of `save`. So a capture is started
uninterrupted (`uninterrupted.py`), and is registered with the threads that finish saves before the caller goes on.
They wait for the caller's part. The caller then hands the save on or gives it up, also uninterrupted. If even that
could not begin, the thread that finishes saves notices that the call has ended, and gives the save up.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from flowstone.config import HELD_S
from flowstone.errors import CancelledError, ClosedError
from flowstone.events import Event
from flowstone.pipeline.in_flight import InFlight
from flowstone.pipeline.pacing import Captures
from flowstone.pipeline.save_run import SaveRun
from flowstone.runtime.turns import Turn
from flowstone.store.base import Store

if TYPE_CHECKING:
    from flowstone.pipeline.unplanned import Unplanned

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

    def start_unplanned(
        self, run: SaveRun, waiting: Unplanned, *, enlist: Callable[[], None],
        pressing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Hand on a save that has no plan yet. If it holds its caller, that waits here, and what ends the wait ends it.

        enlist    passes it to the thread that finishes saves; called uninterrupted
        pressing  as of RankGroup
        """
        try:
            self._turn.uninterrupted(enlist)
            if waiting.holds_caller:
                self.await_release(waiting, pressing)
                run.blocked_s = run.spans.whole("blocked").seconds
                run.handed_on.open()
                if run.capture is None or not run.outlasts_save:  # it has failed, or nothing is left to be captured
                    run.save.captured.await_end()
        except BaseException:
            if waiting.holds_caller and run.unplanned is not None:
                self._turn.uninterrupted(partial(self.forget, run))
            raise

    def await_release(self, waiting: Unplanned, pressing: Callable[[], AbstractContextManager[None]]) -> None:
        """Until what must not change once `save` returns is captured, or copied, or the save has failed."""
        if not waiting.released.wait(HELD_S):
            with pressing():
                waiting.released.wait()

    def let_go_on(self, run: SaveRun) -> None:
        """End the wait of a caller which had no plan and no room for copies. Runs on the thread that finishes saves.

        raises  CancelledError  it was interrupted: what was captured may have changed meanwhile
        """
        assert run.unplanned is not None, "what has a plan is captured by its caller"
        if not run.unplanned.holds_caller:
            run.handed_on.open()
        run.unplanned.released.open()
        while not run.handed_on.wait(_LOOK_S):
            if not self._turn.is_in(run.call):
                self.forget(run)
        self.check_wanted(run)

    def check_wanted(self, run: SaveRun) -> None:
        """Raise CancelledError if the caller was interrupted while it waited."""
        if run.given_up:
            raise CancelledError("save() was interrupted", next="save again")

    def forget(self, run: SaveRun) -> None:
        """The caller was interrupted while it waited, and may change the state. The writer's thread ends the save."""
        if run.handed_on.is_open:
            return
        run.given_up = True
        run.save.captured.tell()
        run.save.committed.reported = True  # the call raises the cause itself
        self._in_flight.forget(run.save)
        run.handed_on.open()

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
