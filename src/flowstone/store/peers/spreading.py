"""Spread a save's copies over a part of the measured time between two saves.

Gemini (SOSP 2023) measures the first iterations of a training job, and sends when the network is idle. A store does not
see the traffic of training, but it knows how often saves begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flowstone.config import PEER_SPREAD_S_MAX

# how many intervals between saves are remembered; the shortest is used, as others may contain a pause of training
_INTERVALS = 4
_DRAFTS_MAX = 8  # how many saves may still be sending copies


class CopyDeadline:
    """The time by which the copies of one save should be complete.

    time          in seconds of the clock of `CopySchedule`; None: as soon as possible
    is_expedited  whether a thread waits for the copies, so that they are sent at full rate; any thread may set it
    """

    def __init__(self, due: float | None) -> None:
        self.time, self.is_expedited = due, False

    def expedite(self) -> None:
        self.is_expedited = True


class CopySchedule:
    """Decides by when the copies of each save of one store should be sent. One thread at a time calls `note_save`; the
    other methods can be called on any thread.

    share  copies are spread over this part (0 to 1) of the time between the starts of two saves; 0: sent at full rate
    max_s  the longest time, in seconds, over which copies are spread
    """

    def __init__(
        self, share: float, max_s: float = PEER_SPREAD_S_MAX, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._share, self._max_s, self._now = share, max_s, now
        self._last: float | None = None  # the time when the last save began
        self._intervals: tuple[float, ...] = ()
        # (directory of an unfinished checkpoint, its deadline); the tuple is replaced, never changed
        self._dues: tuple[tuple[str, CopyDeadline], ...] = ()

    def bounded(self, max_s: float) -> CopySchedule:
        """A new schedule that spreads copies over at most `max_s` seconds. It has no measurements of saves yet."""
        return CopySchedule(self._share, min(self._max_s, max_s), self._now)

    def note_save(self, draft: str) -> None:
        """Note that the save into the directory `draft` begins. Further calls for the same directory do nothing."""
        if any(name == draft for name, _ in self._dues):
            return
        now = self._now()
        if self._last is not None:
            self._intervals = (*self._intervals, now - self._last)[-_INTERVALS:]
        self._last = now
        spread_s = min(self._share * min(self._intervals, default=0.0), self._max_s)
        self._dues = (*self._dues, (draft, CopyDeadline(now + spread_s if spread_s else None)))[-_DRAFTS_MAX:]

    def left_s(self, due: CopyDeadline) -> float:
        """How many seconds are left for copies that begin now; 0: send them at full rate."""
        return 0.0 if due.time is None or due.is_expedited else max(0.0, due.time - self._now())

    def due(self, draft: str) -> CopyDeadline:
        """The deadline of the save into the directory `draft`. For an unknown directory, copies are sent at full rate.
        """
        return next((due for name, due in self._dues if name == draft), CopyDeadline(None))

    def expedite(self) -> None:
        """Send the copies of all saves so far at full rate, because a thread waits for them."""
        for _, due in self._dues:
            due.expedite()
