"""The failure detector: whether ranks that are waited for live, and whether they will come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from flowstone.config import SILENCE_S
from flowstone.ranks.heartbeat import Status, key, opened
from flowstone.ranks.kv_store import KeyValueStore

_LOOKED_AT_MAX = 8  # of the Checkpointers of one rank, the newest

Prospect: TypeAlias = Literal["coming", "idle", "elsewhere", "silent", "closed", "left"]
"""Of a rank that is waited for: it is on its way, or may be; it lives, and has not begun the call; it is not likely to
come, as it has closed the Checkpointer before it met the others, or waits for them with one of another store; it is
taken for dead; it will not come; something has ended the call there."""


class Liveness(msgspec.Struct, frozen=True):
    """What is known of a rank that is waited for.

    words  after "which"
    mark   changes when the rank does anything
    call   the number of the one that was left
    """

    rank: int
    prospect: Prospect
    words: str = ""
    mark: tuple[int, ...] = ()
    silent_s: float = 0.0
    call: int = 0


class FailureDetector:
    """When each rank last reported, and what, as seen by a rank that waits for it.

    label    what the Checkpointer saves into whose ranks are waited for
    serials  which of each rank's Checkpointers is in the group; None before they have met
    """

    def __init__(self, kv_store: KeyValueStore, *, label: str = "", silence_s: float = SILENCE_S) -> None:
        self._kv_store, self._label, self._silence_s = kv_store, label, silence_s
        self.serials: Sequence[int] | None = None
        self._left: dict[int, int] = {}  # of each rank, the last call that it has left, if all have been told
        self._last: dict[int, tuple[int, int, float]] = {}  # serial, beat, when that was first seen

    def of(self, rank: int, step: int | None) -> Liveness:
        """What is known of a rank that has not come. `step`: what is to be saved, if anything is."""
        if self.serials is not None:
            serial = self.serials[rank]
            status = self._status(rank, serial)
            return Liveness(rank, "coming") if status is None else self._member(rank, serial, status, step)
        return self._unmet(rank, step)

    def has_left(self, rank: int, call: int) -> None:
        """All have been told that this rank has left that call: from now on it is waited for as before."""
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
        """Of a rank that may have no Checkpointer of that store yet, and others besides."""
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
        """How long it has said the same, as far as we have listened."""
        now = time.monotonic()
        if self._last.get(rank, (0, 0, 0.0))[:2] != (serial, status.beat):
            self._last[rank] = (serial, status.beat, now)
        return now - self._last[rank][2]
