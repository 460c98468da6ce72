"""Events and log lines. Every event is passed to `on_event`, and the important ones are logged, too."""

from __future__ import annotations

import logging
from threading import current_thread

from flowstone.errors import StorageError
from flowstone.events.phases import Committed, Event, LeftAlone, Loaded, OnEvent, RemovalFailed, Removed
from flowstone.log import log


class EventEmitter:
    """Emits the events of one Checkpointer. Can be called on any thread.

    quiet  whether to log commits and loads only at debug level. True on all ranks but 0, which logs them for the job
    """

    def __init__(self, on_event: OnEvent | None, location: str, *, quiet: bool = False) -> None:
        self._on_event, self._location, self.quiet = on_event, location, quiet

    def __call__(self, event: Event) -> None:
        if isinstance(event, Committed | Loaded):
            log.log(logging.DEBUG if self.quiet else logging.INFO, "%s, in %s", event, self._location)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except BaseException as error:
            # `sys.exit()` in on_event may end the training loop. On a thread of Flowstone it would only end unfinished
            # work.
            if not isinstance(error, Exception) and not current_thread().name.startswith("flowstone-"):
                raise
            log.exception("on_event raised an error for %s", type(event).__name__)

    def removed(self, name: str, reason: str, error: StorageError | None) -> None:
        """Emit the event that retention or a sweep has removed a directory, or could not remove it (`error`)."""
        self(Removed(name, reason) if error is None else RemovalFailed(name, f"{reason}: {error}"))
        if error is not None:
            log.warning("could not remove %s: %s", name, error)

    def left(self, name: str, why: str) -> None:
        """Emit the event that retention or a sweep kept an entry, because this store did not write it."""
        self(LeftAlone(name, why))
