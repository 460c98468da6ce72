"""One path (disk or bucket) of a striped store: how fast it is, and whether it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flowstone.config import (
    PATH_RETRY_S,
    PATH_RETRY_S_MAX,
    PATH_SAMPLE_BYTES,
    PATH_SHARE_MIN,
    Direction,
    PathShare,
    Watch,
)
from flowstone.errors import FlowstoneError
from flowstone.log import log
from flowstone.store.base import Store
from flowstone.store.settings import Settings
from flowstone.store.striped.stripe_member import StripeMember

if TYPE_CHECKING:
    from flowstone._native import Arena, Engine

_ADAPTED = 0.3  # weight of a new measurement: one save beside other traffic must not change the rate much
# a share changes only if its relative change is at least this, because smaller ones are noise, and each change costs a
# new plan
_CHANGED = 0.1


class StripeMemberStore(Store, StripeMember, Protocol):
    """A store with `Capabilities.parts`."""


class StripedPath:
    """A path of a striped store, and its state. Can be used on any thread, since each attribute is set atomically.

    number  the path's number, which is in segments' names; 0: the path with the manifests
    given   the weight that the user gave; None: the measured rate is used
    rate    bytes per second while at least one write request was running; None: not measured yet
    """

    def __init__(
        self, number: int, store: StripeMemberStore, given: float | None, now: Callable[[], float], *,
        writes: bool = True
    ) -> None:
        self.number, self.store, self.given, self.writes = number, store, given, writes
        self.rate: float | None = None
        self._now = now
        self._retry_at = 0.0
        self._failures = 0

    @property
    def root(self) -> Path:
        """The root directory of the path, for messages."""
        return Path(self.store.location)

    @property
    def is_usable(self) -> bool:
        """Whether the next save may use the path."""
        return self.writes and (self._failures == 0 or self._now() >= self._retry_at)

    def mark_failed(self, error: FlowstoneError) -> None:
        """Do not use the path for a while after a failure: for 1 s, then 2 s, 4 s, and so on, up to 5 minutes."""
        pause = min(PATH_RETRY_S_MAX, PATH_RETRY_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._retry_at = self._now() + pause
        log.warning(
            "path %d (%s) of a striped store failed; other paths get its bytes, and this path is tried again in %g s: "
            "%s", self.number, self.store.location, pause, error,
        )

    def mark_working(self) -> None:
        if self._failures:
            log.warning("path %d (%s) of a striped store works again", self.number, self.store.location)
        self._failures = 0

    def add_measurement(self, bytes_: int, seconds: float) -> None:
        """Note that the path has written `bytes_` bytes in `seconds`."""
        if bytes_ < PATH_SAMPLE_BYTES or seconds <= 0:
            return
        rate = bytes_ / seconds
        self.rate = rate if self.rate is None else self.rate + _ADAPTED * (rate - self.rate)


class PathProvider(Protocol):
    """The methods of StripedStore that its reads and writes call."""

    @property
    def location(self) -> str: ...
    @property
    def watch(self) -> Watch: ...
    def paths(self) -> dict[int, StripedPath]: ...
    def check_path(self, number: int, missing: str) -> None: ...
    def locate(self, path: str, *, is_new: bool = False) -> tuple[int, str]: ...
    def mark_unsynced(self, path: str, number: int) -> None: ...
    def mark_synced(self, path: str, number: int) -> None: ...
    def shares(self) -> tuple[PathShare, ...]: ...
    def sync_segments(self, directory: str, of: int | None = None) -> None: ...
    def measure(
        self, before: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]], of: Sequence[int]
    ) -> None: ...
    def settings(self, direction: Direction) -> Settings: ...
    def engine(
        self, queues: Sequence[Engine], direction: Direction, arena: Arena
    ) -> Engine: ...


def weights(paths: list[StripedPath], before: dict[int, float]) -> dict[int, float]:
    """Returns each path's share of a save's bytes: number of the path -> share, from 0 to 1.

    Shares are in proportion to weights. A weight that the user gave is used unchanged. Otherwise the weight is the
    path's measured rate, divided by the mean rate of all paths; it is 1 without a measurement. `before`: the previous
    shares, which stay if no share would change much.
    """
    rates = [path.rate for path in paths if path.rate is not None]
    mean = sum(rates) / len(rates) if rates else 1.0
    raw = {
        path.number: path.given if path.given is not None else (path.rate or mean) / mean for path in paths
    }
    total = sum(raw.values())
    if total <= 0:
        return {path.number: 1 / len(paths) for path in paths}
    parts = {
        number: weight / total if paths[index].given is not None else max(weight / total, PATH_SHARE_MIN)
        for index, (number, weight) in enumerate(raw.items())
    }
    same = parts.keys() == before.keys()
    if same and all(abs(parts[number] - before[number]) <= _CHANGED * before[number] for number in parts):
        return before
    return parts
