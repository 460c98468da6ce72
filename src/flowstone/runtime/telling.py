"""Telling what happens: every event to who asked for them, and to the log what everybody wants to know."""

from __future__ import annotations

import logging

from flowstone.errors import StorageError
from flowstone.events import Committed, Event, LeftAlone, Loaded, OnEvent, RemovalFailed, Removed

_log = logging.getLogger("flowstone")


class Teller:
    """Tells of one Checkpointer. Any thread.

    quiet  its commits and loads are for another rank's log to have: a line for each, not one for each rank
    """

    def __init__(self, on_event: OnEvent | None, location: str) -> None:
        self._on_event, self._location = on_event, location
        self.quiet = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Committed | Loaded):
            _log.log(logging.DEBUG if self.quiet else logging.INFO, "%s, in %s", event, self._location)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            _log.exception("on_event raised an error for %s", type(event).__name__)

    def removed(self, name: str, reason: str, error: StorageError | None) -> None:
        """Retention or a sweep has removed a directory, or could not."""
        self(Removed(name, reason) if error is None else RemovalFailed(name, f"{reason}: {error}"))
        if error is not None:
            _log.warning("could not remove %s: %s", name, error)

    def left(self, name: str, why: str) -> None:
        """Retention or a sweep has left alone what is not this store's to remove."""
        self(LeftAlone(name, why))
