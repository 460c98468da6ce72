"""The pulse: every rank says from time to time that it is alive, so that a dead one is known from a slow one."""

from __future__ import annotations

import logging
import time
from threading import Event, Thread

from flowstone.config import PULSE_S, SILENCE_S
from flowstone.ranks.board import Board

_log = logging.getLogger(__name__)


class Pulse:
    """Beats until stopped, or until the board is gone. Never waits in the store, so it may share a connection."""

    def __init__(self, board: Board, rank: int, *, every_s: float = PULSE_S) -> None:
        self._board, self._rank, self._every_s = board, rank, every_s
        self._stopped = Event()
        self._thread = Thread(target=self._beat, name="flowstone-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        number = 0
        while not self._stopped.is_set():
            try:
                self._board.set(key(self._rank), str(number).encode())
            except RuntimeError as error:  # torch's, of every kind: whoever waits for something meets it, too
                _log.debug("no more pulse of rank %d: %s", self._rank, error)
                return
            number += 1
            self._stopped.wait(self._every_s)


class Hearing:
    """When each rank was last heard of, by whoever waits for it."""

    def __init__(self, board: Board, *, silence_s: float = SILENCE_S) -> None:
        self._board, self._silence_s = board, silence_s
        self._last: dict[int, tuple[bytes, float]] = {}

    def silent_s(self, rank: int) -> float | None:
        """How long nothing has been heard of a rank, in seconds, if that is too long to be chance."""
        now = time.monotonic()
        if not self._board.check([key(rank)]):
            return None  # it has not begun: late, perhaps, but not silent
        beat = self._board.get(key(rank))
        if rank not in self._last or self._last[rank][0] != beat:
            self._last[rank] = (beat, now)
        silent = now - self._last[rank][1]
        return silent if silent > self._silence_s else None


def key(rank: int) -> str:
    return f"alive/{rank}"
