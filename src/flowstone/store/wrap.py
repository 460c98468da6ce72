"""Wrappers: stores around a store that trace its calls, make them fail, or retry them."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from msgspec.structs import replace

from flowstone import _native
from flowstone.config import Direction, Share
from flowstone.errors import FlowstoneError, StorageError
from flowstone.log import log
from flowstone.store.appends import Appending, Appends
from flowstone.store.asks_ahead import Ahead
from flowstone.store.base import (
    UNPACED,
    Capabilities,
    FilePlan,
    Pace,
    Reading,
    ReadReceipt,
    Receipt,
    Store,
    Watched,
    Writing,
)
from flowstone.store.parts import Moving, OpenExtents, OpenSegments, Parts
from flowstone.store.settings import Settings
from flowstone.store.spreads import Spreads

T = TypeVar("T")


class Wrapper:
    """A store that forwards to `inner`. A subclass overrides single methods; or `_call`, which wraps each of them.

    A write and a read of extents count as two calls: "write" and "read_extents" start them, "written" and
    "read_through" are their receipts, with any error.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def _call(self, verb: str, path: str, act: Callable[[], T]) -> T:
        """The result of the call of `verb` on `path`; `act` makes the call."""
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

    def ahead(self) -> Ahead | None:
        """None: nothing is read past this one."""
        return None

    def append_to_new(self, path: str) -> Appending:
        return self._call("append_to_new", path, lambda: cast("Appends", self.inner).append_to_new(path))

    def read_into(self, path: str, offset_bytes: int, target: memoryview) -> int:
        return self._call("read", path, lambda: cast("Appends", self.inner).read_into(path, offset_bytes, target))

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
        self, files: Sequence[FilePlan], rows: _native.WriteExtents, arena: _native.Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> Writing:
        path = files[0].path if files else ""
        writing = self._call("write", path, lambda: self.inner.write(files, rows, arena, pace, reserved=reserved))
        return _WrappedWriting(writing, lambda act: self._call("written", path, act))

    def read_extents(
        self, paths: Sequence[str], rows: _native.ReadExtents, arena: _native.Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> Reading:
        path = paths[0] if paths else ""
        reading = self._call("read_extents", path, lambda: self.inner.read_extents(
            paths, rows, arena, wanted_bytes=wanted_bytes, stop_at_bad=stop_at_bad, past_cache=past_cache, ahead=ahead
        ))
        return _WrappedReading(reading, lambda act: self._call("read_through", path, act))

    def open_segments(
        self, files: Sequence[FilePlan], arena: _native.Arena, *, of_path: int, moving: Moving | None
    ) -> OpenSegments:
        path = files[0].path if files else ""
        inner = cast("Parts", self.inner)
        opened = self._call(
            "write", path, lambda: inner.open_segments(files, arena, of_path=of_path, moving=moving)
        )
        return _WrappedSegments(opened, lambda verb, act: self._call(verb, path, act))

    def open_extents(
        self, paths: Sequence[str], arena: _native.Arena, *, of_path: int, wanted_bytes: int, past_cache: bool
    ) -> OpenExtents:
        inner = cast("Parts", self.inner)
        return self._call("read_extents", paths[0] if paths else "", lambda: inner.open_extents(
            paths, arena, of_path=of_path, wanted_bytes=wanted_bytes, past_cache=past_cache
        ))

    def shares(self) -> tuple[Share, ...]:
        return cast("Spreads", self.inner).shares()

    def sync_segments(self, directory: str) -> None:
        self._call("sync_directory", directory, lambda: cast("Spreads", self.inner).sync_segments(directory))

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        return self._call("reads_past_cache", path, lambda: self.inner.reads_past_cache(path, wanted_bytes))

    def close(self) -> None:
        self._call("close", "", self.inner.close)


class _WrappedWriting:
    def __init__(self, inner: Writing, around: Callable[[Callable[[], Receipt]], Receipt]) -> None:
        self._inner, self._around = inner, around
        self.reserve, self.cancel, self.expedite = inner.reserve, inner.cancel, inner.expedite
        self.wait_early, self.wait_queued = inner.wait_early, inner.wait_queued
        self.wait_captured = inner.wait_captured

    @property
    def watched(self) -> Watched:
        return self._inner.watched

    @property
    def done_bytes(self) -> int:
        return self._inner.done_bytes

    def receipt(self) -> Receipt:
        return self._around(self._inner.receipt)


class _WrappedSegments:
    """Segments of another store's job. Their end counts as "written"; an error of `before` is in it."""

    def __init__(self, inner: OpenSegments, around: Callable[[str, Callable[[], object]], object]) -> None:
        self._inner, self._around = inner, around
        self.engine, self.natives, self.begin, self.close = inner.engine, inner.natives, inner.begin, inner.close
        self.error, self.refusal, self.open_written = inner.error, inner.refusal, inner.open_written

    def reserve(self) -> None:
        self._around("reserve", self._inner.reserve)

    def end(self, job: _native.WriteJob, ends: Sequence[int]) -> FlowstoneError | None:
        try:
            return cast("FlowstoneError | None", self._around("end", lambda: self._inner.end(job, ends)))
        except FlowstoneError as error:
            return error


class _WrappedReading:
    def __init__(self, inner: Reading, around: Callable[[Callable[[], ReadReceipt]], ReadReceipt]) -> None:
        self._inner, self._around = inner, around
        self.aim, self.wait, self.cancel = inner.aim, inner.wait, inner.cancel

    @property
    def done_bytes(self) -> int:
        return self._inner.done_bytes

    def receipt(self) -> ReadReceipt:
        return self._around(self._inner.receipt)


@dataclass(frozen=True, slots=True)
class Call:
    """A finished call.

    verb   the method; for bulk bytes, see Wrapper
    bytes  moved by it, if known
    error  raised by it, or in its receipt
    """

    verb: str
    path: str
    seconds: float
    bytes: int
    error: BaseException | None


class Traced(Wrapper):
    """Passes each finished call to `on_call`, on the thread that made it."""

    def __init__(
        self, inner: Store, on_call: Callable[[Call], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self._on_call, self._clock = on_call, clock

    def _call(self, verb: str, path: str, act: Callable[[], T]) -> T:
        return self._timed(verb, path, act)

    def put(self, path: str, data: bytes) -> None:
        self._timed("put", path, lambda: self.inner.put(path, data), len(data))

    def _timed(self, verb: str, path: str, act: Callable[[], T], given_bytes: int = 0) -> T:
        began = self._clock()
        try:
            found = act()
        except BaseException as error:
            self._on_call(Call(verb, path, self._clock() - began, 0, error))
            raise
        seconds = self._clock() - began
        failure = found.error if isinstance(found, Receipt | ReadReceipt) else None
        self._on_call(Call(verb, path, seconds, given_bytes + _moved_bytes(found), failure))
        return found


def _moved_bytes(found: object) -> int:
    if isinstance(found, bytes):
        return len(found)
    if isinstance(found, Receipt):
        return found.io.copied_bytes
    if isinstance(found, ReadReceipt):
        return found.requested_bytes or found.copied_bytes  # of mapped files nothing is requested
    return 0


class Faulty(Wrapper):
    """Makes calls fail. `before` and `after` get each verb and path, and return an error or None.

    before  the call is not made, and the error is raised
    after   the call is made, and its result is lost; not used for calls that only start bulk bytes
    A receipt contains the error of either; no byte moves any more by then.
    """

    def __init__(
        self, inner: Store, before: Callable[[str, str], FlowstoneError | None] = lambda verb, path: None,
        after: Callable[[str, str], FlowstoneError | None] = lambda verb, path: None,
    ) -> None:
        super().__init__(inner)
        self._before, self._after = before, after

    def _call(self, verb: str, path: str, act: Callable[[], T]) -> T:
        error = self._before(verb, path)
        if error is not None and verb not in ("written", "read_through"):
            raise error
        found = act()
        if error is None and verb not in ("write", "read_extents"):
            error = self._after(verb, path)
        if error is not None and isinstance(found, Receipt | ReadReceipt):
            return replace(found, error=found.error or error)
        if error is not None:
            raise error
        return found


_IDEMPOTENT = frozenset({
    "exists", "is_link", "names", "size", "stamp", "read", "sync_directory", "check_lock", "free_bytes", "read_extents",
    "reads_past_cache",
})
_TRANSIENT = frozenset({
    errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
    errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETRESET, errno.ESTALE,
})


class Retrying(Wrapper):
    """Repeats a call that failed for a reason that may pass, if the call may be repeated.

    Calls that create, move or remove are made once: the first attempt may have succeeded, though its result was lost.

    attempts       per call, in all
    first_delay_s  before the second attempt; each later delay is twice as long, up to `delay_s_max`
    """

    def __init__(
        self, inner: Store, *, attempts: int = 5, first_delay_s: float = 0.1, delay_s_max: float = 5.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._delays = [min(delay_s_max, first_delay_s * 2**number) for number in range(attempts - 1)]
        self._sleep = sleep

    def _call(self, verb: str, path: str, act: Callable[[], T]) -> T:
        for delay in self._delays if verb in _IDEMPOTENT else ():
            try:
                return act()
            except StorageError as error:
                if error.errno not in _TRANSIENT:
                    raise
                log.warning("%s: %s; trying again in %g s", self.location, error.message, delay)
                self._sleep(delay)
        return act()


__all__ = ["Call", "Faulty", "Retrying", "Traced", "Wrapper"]
