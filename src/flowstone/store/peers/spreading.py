"""When the copies of a save are made: over a part of the time between two saves, which is learned as they begin.

Gemini (SOSP 2023) profiles a training's first iterations, and sends in the spans in which the network idles. A store
does not see what training sends, but how long it goes on until the next save.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flowstone.config import PEER_SPREAD_S_MAX

_INTERVALS = 4  # that are known: the shortest of them counts, as one may have a pause in it
_KEPT = 8  # drafts that may still be written


class Due:
    """When the copies of one save are to be there.

    time          by the spreading's clock; None: as soon as they can be
    is_expedited  a thread waits for them. Set by any thread
    """

    def __init__(self, due: float | None) -> None:
        self.time, self.is_expedited = due, False


class Spreading:
    """The copies of one store's saves. `began` is called by one thread at a time; the others by any.

    share  of the time between two saves, from the beginning of the first on; 0: copies are not spread
    max_s  that they are spread over at most
    """

    def __init__(
        self, share: float, max_s: float = PEER_SPREAD_S_MAX, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._share, self._max_s, self._now = share, max_s, now
        self._last: float | None = None  # when the last save began
        self._intervals: tuple[float, ...] = ()
        self._dues: tuple[tuple[str, Due], ...] = ()  # by draft; replaced, never changed

    def bounded(self, max_s: float) -> Spreading:
        """What has learned nothing yet, and spreads over less."""
        return Spreading(self._share, min(self._max_s, max_s), self._now)

    def began(self, draft: str) -> None:
        """A save begins; it may say so several times."""
        if any(name == draft for name, _ in self._dues):
            return
        now = self._now()
        if self._last is not None:
            self._intervals = (*self._intervals, now - self._last)[-_INTERVALS:]
        self._last = now
        spread_s = min(self._share * min(self._intervals, default=0.0), self._max_s)
        self._dues = (*self._dues, (draft, Due(now + spread_s if spread_s else None)))[-_KEPT:]

    def left_s(self, due: Due) -> float:
        """Seconds that there are for copies which begin now; 0: none, at full rate."""
        return 0.0 if due.time is None or due.is_expedited else max(0.0, due.time - self._now())

    def due(self, draft: str) -> Due:
        """That of a save which has begun; else that of copies at full rate."""
        return next((due for name, due in self._dues if name == draft), Due(None))

    def expedite(self) -> None:
        """A thread waits for all saves so far."""
        for _, due in self._dues:
            due.is_expedited = True
