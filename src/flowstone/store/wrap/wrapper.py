"""A store that passes each call to another store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from flowstone._native import Arena, ReadExtents, WriteExtents, WriteJob
from flowstone.config import Direction, PathShare
from flowstone.errors import FlowstoneError
from flowstone.store.appendable import AppendableStore, AppendFile
from flowstone.store.base import (
    UNPACED,
    Capabilities,
    FilePlan,
    Pace,
    ReadHandle,
    ReadReceipt,
    Receipt,
    Store,
    WatchCoverage,
    WriteHandle,
)
from flowstone.store.multi_path import MultiPath
from flowstone.store.prefetching import Prefetcher
from flowstone.store.settings import Settings

if TYPE_CHECKING:
    from flowstone.store.striped.stripe_member import FailoverLimits, OpenExtents, OpenSegments, StripeMember

T = TypeVar("T")


class Wrapper:
    """A store that forwards calls to `inner`. A subclass overrides single methods, or `_call`, which makes each call.

    A write of segments, or a read of ranges of files, counts as two calls. "write" and "read_extents" start them;
    "written" and "read_through" return their results, with any error.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def _call(self, verb: str, path: str, act: Callable[[], T]) -> T:
        """Call `act`, which does `verb` on `path`, and return its result."""
        return act()

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def location(self) -> str:
        return self.inner.location

    def exists(self, path: str = "") -> bool:
        return self._call("exists", path, lambda: self.inner.exists(path))

    def is_link(self, path: str) -> bool:
        return self._call("is_link", path, lambda: self.inner.is_link(path))

    def names(self, path: str = "") -> tuple[str, ...]:
        return self._call("names", path, lambda: self.inner.names(path))

    def size(self, path: str) -> int:
        return self._call("size", path, lambda: self.inner.size(path))

    def stamp(self, path: str) -> str | None:
        return self._call("stamp", path, lambda: self.inner.stamp(path))

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        return self._call(
            "read", path, lambda: self.inner.read(path, offset=offset, length=length, bytes_max=bytes_max)
        )

    def ahead(self) -> Prefetcher | None:
        """Returns None, as prefetched reads would bypass this wrapper."""
        return None

    def append_to_new(self, path: str) -> AppendFile:
        return self._call("append_to_new", path, lambda: cast("AppendableStore", self.inner).append_to_new(path))

    def read_into(self, path: str, offset_bytes: int, target: memoryview) -> int:
        return self._call(
            "read", path, lambda: cast("AppendableStore", self.inner).read_into(path, offset_bytes, target)
        )

    def make_directory(self, path: str = "") -> None:
        self._call("make_directory", path, lambda: self.inner.make_directory(path))

    def remove(self, path: str) -> None:
        self._call("remove", path, lambda: self.inner.remove(path))

    def put(self, path: str, data: bytes) -> None:
        self._call("put", path, lambda: self.inner.put(path, data))

    def rename(self, source: str, target: str) -> None:
        self._call("rename", target, lambda: self.inner.rename(source, target))

    def link(self, source: str, target: str) -> None:
        self._call("link", target, lambda: self.inner.link(source, target))

    def sync_directory(self, path: str = "") -> None:
        self._call("sync_directory", path, lambda: self.inner.sync_directory(path))

    def lock(self, holder: str) -> None:
        self._call("lock", "", lambda: self.inner.lock(holder))

    def check_lock(self) -> None:
        self._call("check_lock", "", self.inner.check_lock)

    def unlock(self) -> None:
        self._call("unlock", "", self.inner.unlock)

    def free_bytes(self) -> int:
        return self._call("free_bytes", "", self.inner.free_bytes)

    def settings(self, direction: Direction) -> Settings:
        return self.inner.settings(direction)

    def write(
        self, files: Sequence[FilePlan], rows: WriteExtents, arena: Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> WriteHandle:
        path = files[0].path if files else ""
        writing = self._call("write", path, lambda: self.inner.write(files, rows, arena, pace, reserved=reserved))
        return _WrappedWriting(writing, lambda act: self._call("written", path, act))

    def read_extents(
        self, paths: Sequence[str], rows: ReadExtents, arena: Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> ReadHandle:
        path = paths[0] if paths else ""
        reading = self._call("read_extents", path, lambda: self.inner.read_extents(
            paths, rows, arena, wanted_bytes=wanted_bytes, stop_at_bad=stop_at_bad, past_cache=past_cache, ahead=ahead
        ))
        return _WrappedReading(reading, lambda act: self._call("read_through", path, act))

    def open_segments(
        self, files: Sequence[FilePlan], arena: Arena, *, of_path: int, moving: FailoverLimits | None
    ) -> OpenSegments:
        path = files[0].path if files else ""
        inner = cast("StripeMember", self.inner)
        opened = self._call(
            "write", path, lambda: inner.open_segments(files, arena, of_path=of_path, moving=moving)
        )
        return _WrappedSegments(opened, lambda verb, act: self._call(verb, path, act))

    def open_extents(
        self, paths: Sequence[str], arena: Arena, *, of_path: int, wanted_bytes: int, past_cache: bool
    ) -> OpenExtents:
        inner = cast("StripeMember", self.inner)
        return self._call("read_extents", paths[0] if paths else "", lambda: inner.open_extents(
            paths, arena, of_path=of_path, wanted_bytes=wanted_bytes, past_cache=past_cache
        ))

    def shares(self) -> tuple[PathShare, ...]:
        return cast("MultiPath", self.inner).shares()

    def sync_segments(self, directory: str) -> None:
        self._call("sync_directory", directory, lambda: cast("MultiPath", self.inner).sync_segments(directory))

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        return self._call("reads_past_cache", path, lambda: self.inner.reads_past_cache(path, wanted_bytes))

    def close(self) -> None:
        self._call("close", "", self.inner.close)


class _WrappedWriting:
    def __init__(self, inner: WriteHandle, around: Callable[[Callable[[], Receipt]], Receipt]) -> None:
        self._inner, self._around = inner, around
        self.reserve, self.cancel, self.expedite = inner.reserve, inner.cancel, inner.expedite
        self.wait_early, self.wait_queued = inner.wait_early, inner.wait_queued
        self.wait_captured = inner.wait_captured

    @property
    def watched(self) -> WatchCoverage:
        return self._inner.watched

    @property
    def done_bytes(self) -> int:
        return self._inner.done_bytes

    def receipt(self) -> Receipt:
        return self._around(self._inner.receipt)


class _WrappedSegments:
    """Segments that a job of another store writes. If the wrapper raises an error at their end, that error is returned.
    """

    def __init__(self, inner: OpenSegments, around: Callable[[str, Callable[[], object]], object]) -> None:
        self._inner, self._around = inner, around
        self.engine, self.natives, self.begin, self.close = inner.engine, inner.natives, inner.begin, inner.close
        self.error, self.refusal, self.open_written = inner.error, inner.refusal, inner.open_written

    def reserve(self) -> None:
        self._around("reserve", self._inner.reserve)

    def end(self, job: WriteJob, ends: Sequence[int]) -> FlowstoneError | None:
        try:
            return cast("FlowstoneError | None", self._around("end", lambda: self._inner.end(job, ends)))
        except FlowstoneError as error:
            return error


class _WrappedReading:
    def __init__(self, inner: ReadHandle, around: Callable[[Callable[[], ReadReceipt]], ReadReceipt]) -> None:
        self._inner, self._around = inner, around
        self.aim, self.wait, self.cancel = inner.aim, inner.wait, inner.cancel

    @property
    def done_bytes(self) -> int:
        return self._inner.done_bytes

    def receipt(self) -> ReadReceipt:
        return self._around(self._inner.receipt)
