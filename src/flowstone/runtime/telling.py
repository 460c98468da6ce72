"""Events and log lines: every event goes to `on_event`, the important ones to the log too."""

from __future__ import annotations

import logging
from threading import current_thread

from flowstone.errors import StorageError
from flowstone.events import Committed, Event, LeftAlone, Loaded, OnEvent, RemovalFailed, Removed
from flowstone.log import log


class Teller:
    """Emits the events of one Checkpointer. Any thread.

    quiet  do not log commits and loads: rank 0 logs them, once for the whole job
    """

    def __init__(self, on_event: OnEvent | None, location: str) -> None:
        self._on_event, self._location = on_event, location
        self.quiet = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Committed | Loaded):
            log.log(logging.DEBUG if self.quiet else logging.INFO, "%s, in %s", event, self._location)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except BaseException as error:
            # `sys.exit()` there ends the loop that has called; a thread of Flowstone's would end with its work undone.
            if not isinstance(error, Exception) and not current_thread().name.startswith("flowstone-"):
                raise
            log.exception("on_event raised an error for %s", type(event).__name__)

    def removed(self, name: str, reason: str, error: StorageError | None) -> None:
        """Retention or a sweep has removed a directory, or failed to (`error`)."""
        self(Removed(name, reason) if error is None else RemovalFailed(name, f"{reason}: {error}"))
        if error is not None:
            log.warning("could not remove %s: %s", name, error)

    def left(self, name: str, why: str) -> None:
        """Retention or a sweep kept a name that this store did not write."""
        self(LeftAlone(name, why))
