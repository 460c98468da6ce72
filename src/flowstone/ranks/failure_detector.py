"""The failure detector: whether awaited ranks are alive, and whether they will make the call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from flowstone.config import SILENCE_S
from flowstone.ranks.heartbeat import RankStatus, opened_key, status_key
from flowstone.ranks.kv_store import KeyValueStore

_EXAMINED_MAX = 8  # how many Checkpointers of one rank are examined, the newest ones

Prospect: TypeAlias = Literal["coming", "idle", "elsewhere", "silent", "closed", "left"]
"""The state of an awaited rank. coming: it has made the call, or may have; idle: it is alive, but has not made the
call; elsewhere: it will probably not make the call, as it closed its Checkpointer before it joined the group, or waits
with a Checkpointer of another store; silent: it counts as dead; closed: it will not make the call; left: an exception
has ended the call on that rank.
"""


class Liveness(msgspec.Struct, frozen=True):
    """The state of an awaited rank.

    prospect  whether the rank will make the call
    text   what the rank is doing, as the rest of a sentence that begins "rank N ..."
    mark   a value that changes whenever the rank makes or ends a call
    call   the number of the call that an exception has ended on that rank; 0: none
    """

    rank: int
    prospect: Prospect
    text: str = ""
    mark: tuple[int, ...] = ()
    silent_s: float = 0.0
    call: int = 0


class FailureDetector:
    """Tells a waiting rank whether other ranks live, by the last report (heartbeat) of each rank and its time.

    label  location of the store of these ranks' Checkpointers
    """

    def __init__(self, kv_store: KeyValueStore, *, label: str = "", silence_s: float = SILENCE_S) -> None:
        self._kv_store, self._label, self._silence_s = kv_store, label, silence_s
        self._serials: Sequence[int] | None = None
        self._left: dict[int, int] = {}  # rank -> number of its last interrupted call that all ranks know about
        self._last: dict[int, tuple[int, int, float]] = {}  # rank -> serial, beat, time when this beat was first seen

    def join(self, serials: Sequence[int]) -> None:
        """Note that the ranks have met. `serials`: for each rank, the number of its Checkpointer in the group."""
        self._serials = serials

    def liveness_of(self, rank: int, step: int | None) -> Liveness:
        """The state of a rank that has not sent its message. `step`: the step to be saved, if any."""
        if self._serials is not None:
            serial = self._serials[rank]
            status = self._status(rank, serial)
            return Liveness(rank, "coming") if status is None else self._member(rank, serial, status, step)
        return self._unmet(rank, step)

    def note_left_call(self, rank: int, call: int) -> None:
        """Note that all ranks know about the interrupted call of `rank`. From now on they wait for this rank again."""
        self._left[rank] = max(call, self._left.get(rank, 0))

    def _member(self, rank: int, serial: int, status: RankStatus, step: int | None) -> Liveness:
        activity = status.activity
        mark = (serial, activity.calls, activity.is_inside)
        if status.is_closed:
            return Liveness(rank, "closed", f"has closed its Checkpointer of {self._label}", mark)
        silent_s = self._silent_s(rank, serial, status)
        if silent_s > self._silence_s:
            return Liveness(rank, "silent", "", mark, silent_s)
        is_told = status.left <= self._left.get(rank, 0)
        if step is not None and activity.step >= step:
            return Liveness(rank, "coming", "has made this call, but has not reached this point", mark)
        if status.left == activity.calls and not is_told:
            return Liveness(rank, "left", status.why, mark, call=status.left)
        if activity.is_inside:
            return Liveness(rank, "coming", f"is in {activity.last}(), at {status.line}", mark)
        last = f", after {activity.last}()" if activity.last else ""
        return Liveness(rank, "idle", f"is alive, but has not made this call{last}; it is at {status.line}", mark)

    def _unmet(self, rank: int, step: int | None) -> Liveness:
        """The state of a rank before the ranks have met: it may have no Checkpointer of this store yet, or
        Checkpointers of other stores.
        """
        count = self._kv_store.add(opened_key(rank), 0)
        reports = [(serial, self._status(rank, serial)) for serial in range(count, max(0, count - _EXAMINED_MAX), -1)]
        liveness = [(serial, status) for serial, status in reports if status is not None]
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
                words = f"{verb} for other ranks with a Checkpointer of {status.label}, not of {self._label}"
                return Liveness(rank, "elsewhere", words, mark)
        of_label = [status for _, status in liveness if status.label == self._label]
        if of_label and not of_label[0].group:
            return Liveness(rank, "elsewhere", f"has closed its Checkpointer of {self._label}", mark)
        line = "" if newest.is_closed else f"; it is at {newest.line}"
        missing = "no other Checkpointer" if of_label else "no Checkpointer"
        return Liveness(rank, "idle", f"has constructed {missing} of {self._label}{line}", mark)

    def _status(self, rank: int, serial: int) -> RankStatus | None:
        key = status_key(rank, serial)
        if not self._kv_store.check([key]):
            return None
        return msgspec.msgpack.decode(self._kv_store.get(key), type=RankStatus)

    def _silent_s(self, rank: int, serial: int, status: RankStatus) -> float:
        """Seconds since this process first saw the current `status` of `rank`."""
        now = time.monotonic()
        if self._last.get(rank, (0, 0, 0.0))[:2] != (serial, status.beat):
            self._last[rank] = (serial, status.beat, now)
        return now - self._last[rank][2]
