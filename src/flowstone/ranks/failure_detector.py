"""The failure detector: whether the ranks that are waited for are alive, and whether they will come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from flowstone.config import SILENCE_S
from flowstone.ranks.heartbeat import Status, key, opened
from flowstone.ranks.kv_store import KeyValueStore

_LOOKED_AT_MAX = 8  # Checkpointers of one rank, the newest ones

Prospect: TypeAlias = Literal["coming", "idle", "elsewhere", "silent", "closed", "left"]
"""What to expect of a rank that is waited for. coming: on its way, or may be; idle: alive, and has not begun the call;
elsewhere: not likely to come, as it closed the Checkpointer before it met the others, or waits for them with one of
another store; silent: counts as dead; closed: will not come; left: an exception has ended the call there."""


class Liveness(msgspec.Struct, frozen=True):
    """What is known about a rank that is waited for.

    words  the rest of a sentence that begins "rank N, which"
    mark   changes when the rank does anything
    call   the number of the call that was left
    """

    rank: int
    prospect: Prospect
    words: str = ""
    mark: tuple[int, ...] = ()
    silent_s: float = 0.0
    call: int = 0


class FailureDetector:
    """The last report of each rank and its time, as seen by a rank that waits.

    label    location that the Checkpointer of these ranks saves into
    serials  which of each rank's Checkpointers is in the group; None before they have met
    """

    def __init__(self, kv_store: KeyValueStore, *, label: str = "", silence_s: float = SILENCE_S) -> None:
        self._kv_store, self._label, self._silence_s = kv_store, label, silence_s
        self.serials: Sequence[int] | None = None
        self._left: dict[int, int] = {}  # per rank, the last call that it left, once all ranks know of it
        self._last: dict[int, tuple[int, int, float]] = {}  # serial, beat, time when that was first seen

    def of(self, rank: int, step: int | None) -> Liveness:
        """What is known about a rank that has not come. `step`: the step to be saved, if any."""
        if self.serials is not None:
            serial = self.serials[rank]
            status = self._status(rank, serial)
            return Liveness(rank, "coming") if status is None else self._member(rank, serial, status, step)
        return self._unmet(rank, step)

    def has_left(self, rank: int, call: int) -> None:
        """All ranks know that this rank left that call: from now on it is waited for as before."""
        self._left[rank] = max(call, self._left.get(rank, 0))

    def _member(self, rank: int, serial: int, status: Status, step: int | None) -> Liveness:
        activity = status.activity
        mark = (serial, activity.calls, activity.is_inside)
        if status.is_closed:
            return Liveness(rank, "closed", f"has closed its Checkpointer of {self._label}", mark)
        silent_s = self._silent_s(rank, serial, status)
        if silent_s > self._silence_s:
            return Liveness(rank, "silent", "", mark, silent_s)
        is_told = status.left <= self._left.get(rank, 0)
        if step is not None and activity.step >= step:
            return Liveness(rank, "coming", "has made this call, but is not that far yet", mark)
        if status.left == activity.calls and not is_told:
            return Liveness(rank, "left", status.why, mark, call=status.left)
        if activity.is_inside:
            return Liveness(rank, "coming", f"is in {activity.last}(), at {status.line}", mark)
        last = f", after {activity.last}()" if activity.last else ""
        return Liveness(rank, "idle", f"is alive, but has not made this call{last}; it is at {status.line}", mark)

    def _unmet(self, rank: int, step: int | None) -> Liveness:
        """What is known about a rank that may have no Checkpointer of that store yet, and may have others."""
        count = self._kv_store.add(opened(rank), 0)
        found = [(serial, self._status(rank, serial)) for serial in range(count, max(0, count - _LOOKED_AT_MAX), -1)]
        liveness = [(serial, status) for serial, status in found if status is not None]
        for serial, status in liveness:
            if status.label == self._label and not status.group and not status.is_closed:
                return self._member(rank, serial, status, step)
        mark = (count, -1)
        if not liveness:
            return Liveness(rank, "idle", f"has constructed no Checkpointer of {self._label}", mark)
        serial, newest = liveness[0]
        silent_s = self._silent_s(rank, serial, newest)
        if silent_s > self._silence_s and not newest.is_closed:
            return Liveness(rank, "silent", "", mark, silent_s)
        for _, status in liveness:
            if status.waits and not status.group:
                verb = "waited" if status.is_closed else "waits"
                words = f"{verb} for others with a Checkpointer of {status.label}, not of {self._label}"
                return Liveness(rank, "elsewhere", words, mark)
        of_it = [status for _, status in liveness if status.label == self._label]
        if of_it and not of_it[0].group:
            return Liveness(rank, "elsewhere", f"has closed its Checkpointer of {self._label}", mark)
        where = "" if newest.is_closed else f"; it is at {newest.line}"
        none = "no other Checkpointer" if of_it else "no Checkpointer"
        return Liveness(rank, "idle", f"has constructed {none} of {self._label}{where}", mark)

    def _status(self, rank: int, serial: int) -> Status | None:
        at = key(rank, serial)
        if not self._kv_store.check([at]):
            return None
        return msgspec.msgpack.decode(self._kv_store.get(at), type=Status)

    def _silent_s(self, rank: int, serial: int, status: Status) -> float:
        """Seconds since its status last changed, as far as this rank has watched."""
        now = time.monotonic()
        if self._last.get(rank, (0, 0, 0.0))[:2] != (serial, status.beat):
            self._last[rank] = (serial, status.beat, now)
        return now - self._last[rank][2]
