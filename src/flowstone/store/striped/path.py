"""One path of a striped store: its rate, and whether it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flowstone.config import PATH_RETRY_S, PATH_RETRY_S_MAX, PATH_SAMPLE_BYTES, PATH_SHARE_MIN, Direction, Share, Watch
from flowstone.errors import FlowstoneError
from flowstone.log import log
from flowstone.store.base import Store
from flowstone.store.parts import Parts
from flowstone.store.settings import Settings

if TYPE_CHECKING:
    from flowstone import _native

_ADAPTED = 0.3  # of a new measurement: a save beside other traffic counts little
_CHANGED = 0.1  # of a share: less is noise, and each change costs a plan


class PartStore(Store, Parts, Protocol):
    """A store with `Capabilities.parts`."""


class StripedPath:
    """A path, and what is known of it. Any thread: each attribute is set as a whole.

    number  in segments' names; 0: the path that has the checkpoints
    given   a fixed weight; None: its measured rate
    rate    bytes per second that it wrote while any of its requests was under way; None: not measured yet
    """

    def __init__(
        self, number: int, store: PartStore, given: float | None, now: Callable[[], float], *, writes: bool = True
    ) -> None:
        self.number, self.store, self.given, self.writes = number, store, given, writes
        self.rate: float | None = None
        self._now = now
        self._retry_at = 0.0
        self._failures = 0

    @property
    def root(self) -> Path:
        """Of its files, for messages."""
        return Path(self.store.location)

    @property
    def is_usable(self) -> bool:
        """Whether the next save may try it."""
        return self.writes and (self._failures == 0 or self._now() >= self._retry_at)

    def failed(self, error: FlowstoneError) -> None:
        """Leave it out for a while: 1 s, 2 s, 4 s, up to 5 minutes."""
        pause = min(PATH_RETRY_S_MAX, PATH_RETRY_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._retry_at = self._now() + pause
        log.warning(
            "path %d (%s) failed, and the other paths get its part; it is tried again in %g s: %s", self.number,
            self.store.location, pause, error,
        )

    def worked(self) -> None:
        if self._failures:
            log.warning("path %d (%s) works again", self.number, self.store.location)
        self._failures = 0

    def measured(self, bytes_: int, seconds: float) -> None:
        """It has moved so many bytes, and had requests under way for so long."""
        if bytes_ < PATH_SAMPLE_BYTES or seconds <= 0:
            return
        rate = bytes_ / seconds
        self.rate = rate if self.rate is None else self.rate + _ADAPTED * (rate - self.rate)


class Striping(Protocol):
    """What a write or a read over several paths needs of their store. See StripedStore."""

    @property
    def location(self) -> str: ...
    @property
    def watch(self) -> Watch: ...
    def paths(self) -> dict[int, StripedPath]: ...
    def check_path(self, number: int, missing: str) -> None: ...
    def place(self, path: str, *, is_new: bool = False) -> tuple[int, str]: ...
    def made(self, path: str, number: int) -> None: ...
    def brought(self, path: str, number: int) -> None: ...
    def shares(self) -> tuple[Share, ...]: ...
    def sync_segments(self, directory: str, of: int | None = None) -> None: ...
    def measure(
        self, before: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]], of: Sequence[int]
    ) -> None: ...
    def settings(self, direction: Direction) -> Settings: ...
    def engine(
        self, queues: Sequence[_native.Engine], direction: Direction, arena: _native.Arena
    ) -> _native.Engine: ...


def weights(paths: list[StripedPath], before: dict[int, float]) -> dict[int, float]:
    """What each of the paths gets, as a part of all, by number.

    A weight that is given counts as it is, beside the others' rates over their mean; what was not measured counts like
    the mean. `before`: what they got, which stays where no share changes by much.
    """
    rates = [path.rate for path in paths if path.rate is not None]
    mean = sum(rates) / len(rates) if rates else 1.0
    raw = {
        path.number: path.given if path.given is not None else (path.rate or mean) / mean for path in paths
    }
    total = sum(raw.values())
    if total <= 0:
        return {path.number: 1 / len(paths) for path in paths}
    found = {
        number: one / total if paths[at].given is not None else max(one / total, PATH_SHARE_MIN)
        for at, (number, one) in enumerate(raw.items())
    }
    same = found.keys() == before.keys()
    if same and all(abs(found[number] - before[number]) <= _CHANGED * before[number] for number in found):
        return before
    return found
