"""From the caller of `save` to the threads that finish it: in whose hands a capture is that has been started.

A signal's handler may raise at any instant of `save`. So a capture is started where none interrupts
(`uninterrupted.py`), and is known to the threads that finish saves before the caller goes on. They wait for his part:
what is no tensor is encoded on his thread, and he waits until what is not lazy is captured. He hands it on, or it is
given up, likewise uninterrupted. If not even that could begin, the thread that finishes saves finds that the call has
ended, and does it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from flowstone import saving
from flowstone.errors import CancelledError, ClosedError
from flowstone.events import Event
from flowstone.in_flight import InFlight
from flowstone.saving import Captures, Flight
from flowstone.stage.streams import as_on_this_thread
from flowstone.state import Described
from flowstone.store.base import Store
from flowstone.turns import Turn

_LOOK_S = 1.0  # between two looks at whether the caller is still there


class Handover:
    """Of the saves of one Checkpointer.

    watcher  the thread that tells when a lazy capture has ended
    """

    def __init__(
        self, store: Store, turn: Turn, in_flight: InFlight, captures: Captures, emit: Callable[[Event], None],
        watcher: ThreadPoolExecutor,
    ) -> None:
        self._store, self._turn, self._in_flight, self._captures = store, turn, in_flight, captures
        self._emit, self._watcher = emit, watcher

    def start(
        self, described: Described, begin: Callable[[], Flight], finish: Callable[[Flight], object]
    ) -> None:
        """Start a save, which is handed on when this returns; what ends it early leaves nothing of it.

        begin   starts the capture of what is `described`; where nothing interrupts it
        finish  gives it to the thread that finishes saves, and there to `is_handed_on`; likewise
        """
        begun: list[Flight] = []
        streams = as_on_this_thread(memory.device for memory in described.places.apart.values())

        def act() -> None:
            with streams():
                flight = begin()
            flight.call = self._turn.calls
            begun.append(flight)
            self._enlist(flight, finish)

        try:
            self._turn.uninterrupted(act)
            saving.encode(begun[0], described)
            if begun[0].outlasts_save:
                self._captures.leave_alone(begun[0])
            else:
                self._turn.uninterrupted(partial(self._tell_captured, begun[0]))
            begun[0].handed_on.open()
        except BaseException:
            if begun:
                self._turn.uninterrupted(partial(self._give_up, begun[0]))
            raise

    def _enlist(self, flight: Flight, finish: Callable[[Flight], object]) -> None:
        # All that are under way: the writer's thread takes them in order, so that one waits for those before it.
        flight.save.captured.hurry = flight.save.committed.hurry = self._captures.hurry
        try:
            if flight.outlasts_save:
                self._captures.add(flight)
                self._watcher.submit(self.watch, flight)
            finish(flight)
        except RuntimeError as error:
            raise ClosedError(
                f"cannot save step {flight.save.step}: Python is ending", reason=str(error),
                next="save before the script ends, not in an exit handler",
            ) from error
        self._in_flight.add(flight.save)

    def is_handed_on(self, flight: Flight) -> bool:
        """Wait for its caller's part. No, if it was given up. On the thread that finishes saves."""
        while not flight.handed_on.wait(_LOOK_S):
            if not self._turn.is_in(flight.call):
                self._give_up(flight)
        return not flight.given_up

    def watch(self, flight: Flight) -> None:
        """On the watcher's thread: tell when the last lazy byte is captured."""
        try:
            flight.writing.wait_captured()
        finally:
            flight.handed_on.wait()
            if not flight.given_up:
                self._tell_captured(flight)

    def _tell_captured(self, flight: Flight) -> None:
        try:
            self._emit(flight.captured())
        finally:  # whatever happens, somebody may be waiting
            flight.save.captured.tell()

    def _give_up(self, flight: Flight) -> None:
        """Unless it was handed on: end it, leave neither a draft nor a descriptor, and let nobody wait for it."""
        if flight.handed_on.is_open:
            return
        flight.given_up = True
        try:
            saving.give_up(flight, self._store)
        finally:
            flight.let_sources_go()
            flight.save.captured.tell()
            flight.save.committed.reported = True  # by what ends the call
            flight.save.committed.set_exception(CancelledError("save() was interrupted", next="save again"))
            self._in_flight.forget(flight.save)
            flight.handed_on.open()
