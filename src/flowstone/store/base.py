"""What a store can do: four protocols, and the capabilities that say what they hold.

`Names`, `BulkBytes`, `Commit` and `Lock`; a `Store` is all of them. What needs less asks for less: a listing takes
`Names`. Nothing asks what kind of store it has; what differs between stores is in `Capabilities`. Every store obeys one
suite, tests/store/contract.py; docs/ARCHITECTURE.md says how to add one.

Paths are names relative to the store's root, with "/" between them. What fails raises
StorageError with operation, errno and path, FullError when space is the reason.

What makes, writes, renames, syncs, removes or locks something follows no link in the store; what reads follows a link
to a directory, never one to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from flowstone.config import INTERRUPTS_MAX, POLL_S, Direction
from flowstone.errors import FlowstoneError
from flowstone.format.manifest import IoRecord
from flowstone.store.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flowstone import _native


class FilePlan(msgspec.Struct, frozen=True):
    """A segment to be created: its path in the store and its full size in bytes."""

    path: str
    bytes: int


class Encoded(msgspec.Struct, frozen=True, eq=False):
    """How chunks are stored by an encoder that is not identity, as columns with an entry for each chunk.

    offset, length  in bytes, in its segment
    codec           see format/codec.py
    same            nothing is stored of it: the base's chunk has the same bytes
    file_bytes      of each segment
    """

    offset: NDArray[np.uint64]
    length: NDArray[np.uint32]
    codec: NDArray[np.uint8]
    same: NDArray[np.bool_]
    file_bytes: Sequence[int]


class Receipt(msgspec.Struct, frozen=True):
    """What a writer reports: digests of all chunks, or the error that ended it. Durable if no error.

    digests  of the chunks as they are stored
    encoded  how they are stored; None: as they are, where the plan has put them
    spans    what the engine's threads have done
    synced   when making it durable began and ended, in seconds of the monotonic clock; None: it needed nothing
    """

    error: FlowstoneError | None
    digests: NDArray[np.uint64]
    io: IoRecord
    encoded: Encoded | None = None
    spans: Sequence[_native.SpanColumns] = ()
    synced: tuple[float, float] | None = None


class ReadReceipt(msgspec.Struct, frozen=True):
    """What a reader reports.

    error    why it ended early, if it did; DamagedError when a file ends before its extents do
    bad      positions, in the rows' digests, of chunks that differ from what was written
    touched  per row: whether some byte of its target has been changed
    spans    what the engine's threads have done
    """

    error: FlowstoneError | None
    bad: NDArray[np.uint64]
    touched: NDArray[np.bool_]
    requested_bytes: int
    copied_bytes: int
    direct_bytes: int
    requests: int
    spans: Sequence[_native.SpanColumns] = ()


class Pace(msgspec.Struct, frozen=True):
    """What lazy capture may take until somebody waits for it, and what a save may take at most.

    blocks       of the arena, at once; None for all
    bytes_per_s  None for what the device gives
    cap          in bytes per second, of everything, and whatever waits; None for what the device gives
    """

    blocks: int | None = None
    bytes_per_s: int | None = None
    cap: int | None = None


UNPACED = Pace()


class Watched(msgspec.Struct, frozen=True):
    """How lazy rows are watched until they are captured: each write is noticed, or some of their bytes are compared.

    insisted  the caller wants no samples
    row       the first that is sampled, and why
    """

    exact_bytes: int
    sampled_bytes: int
    insisted: bool = False
    row: int | None = None
    reason: str | None = None


class Writing(Protocol):
    """Segments on their way to the store."""

    @property
    def watched(self) -> Watched: ...

    def reserve(self) -> None:
        """Give the segments their full size, if nobody has, and begin to write what is captured already. Any thread.

        Blocks as long as the file system does. What that refuses ends the write, and is in the receipt. Who does not
        call it leaves it to `receipt`.
        """

    def wait_early(self) -> None:
        """Block until no source that is not lazy will be read any more; until it is queued, if on a device."""

    def wait_queued(self) -> None:
        """Block until no source on the host will be read any more, and every one on a device is queued."""

    def expedite(self) -> None:
        """Capture the rest as fast as memory and device allow; returns at once."""

    def wait_captured(self) -> None:
        """Block until no source will be read any more."""

    def receipt(self) -> Receipt:
        """Block until everything is durable, or has failed. Frees what the write held; call once."""

    def cancel(self) -> None:
        """Start nothing new; the receipt then carries a CancelledError."""

    @property
    def done_bytes(self) -> int: ...


class Reading(Protocol):
    """Extents on their way into memory."""

    def wait(self, timeout_s: float) -> bool: ...

    def receipt(self) -> ReadReceipt:
        """Block until the end."""

    def cancel(self) -> None: ...

    @property
    def done_bytes(self) -> int: ...


def finish_reading(reading: Reading, on_progress: Callable[[int], None] | None = None) -> ReadReceipt:
    """Wait for the end. `on_progress` is told the bytes done.

    Whatever else ends the wait (Ctrl-C, a signal's handler that raises) stops the reading, and is raised once no byte
    moves any more.
    """
    try:
        while not reading.wait(POLL_S):
            if on_progress is not None:
                on_progress(reading.done_bytes)
        return reading.receipt()
    except BaseException:
        stop_reading(reading)
        raise


def stop_reading(reading: Reading) -> None:
    """Return once no byte moves any more, however often somebody tries to interrupt that."""
    for _ in range(INTERRUPTS_MAX):
        try:
            reading.cancel()
            reading.receipt()
            return
        except BaseException:  # noqa: S112  (the first one is on its way already; memory that still changes is worse)
            continue


class Capabilities(msgspec.Struct, frozen=True):
    """What holds in a store. A checkpoint can be committed where `atomic_rename` or `conditional_put` does.

    atomic_rename      `rename` moves a directory with all that is in it, at once: before a crash or after it
    conditional_put    of `put`, a reader sees all or nothing; of two for one name, one is refused
    directory_sync     names are durable once `sync_directory` has returned
    durable_on_return  names and small files are durable when the call that makes, moves or removes them returns
    range_reads        `read` of a part costs as much as the part, not as the file
    appends            a file that is there can be made longer
    direct             bulk bytes can go past a page cache
    """

    atomic_rename: bool
    conditional_put: bool
    directory_sync: bool
    durable_on_return: bool
    range_reads: bool
    appends: bool
    direct: bool

    @property
    def needs_sync(self) -> bool:
        """Whether names become durable by `sync_directory`, and not before."""
        return self.directory_sync and not self.durable_on_return


class Names(Protocol):
    """What is there, and the bytes of small files."""

    @property
    def location(self) -> str:
        """For people and messages."""

    def exists(self, path: str = "") -> bool:
        """Whether there is something of that name. If that cannot be found out, it is a StorageError, not `False`."""

    def is_link(self, path: str) -> bool:
        """Whether there is a link to something else, which is somebody else's."""

    def names(self, path: str = "") -> tuple[str, ...]:
        """Entries of a directory, sorted; empty when it does not exist."""

    def size(self, path: str) -> int: ...
    def stamp(self, path: str) -> str | None:
        """What is another one once the file is; None where there is none."""

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        """The `length` bytes of a file from `offset` on, fewer where it ends before; or all of them.

        raises  DamagedError where the file has more than `bytes_max`: before any of them is read
        """

    def make_directory(self, path: str = "") -> None:
        """Create a directory that is not there.

        The root is created with its parents where they are missing, and its way is durable on return.
        """

    def remove(self, path: str) -> None:
        """Remove a file, or a directory that is empty."""


class BulkBytes(Protocol):
    """Segments: extents between memory and files, in batches, by the native engine or by what stands for it."""

    def free_bytes(self) -> int: ...

    def settings(self, direction: Direction) -> Settings:
        """How bytes move here. An arena for this store has blocks of one request of that direction."""

    def write(
        self, files: Sequence[FilePlan], rows: _native.WriteExtents, arena: _native.Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> Writing:
        """Create the segments with their full size and start writing them; returns without waiting.

        reserved  False: they get their size by `Writing.reserve`, and nothing is written before that

        Requests are no longer than a block of the arena. A segment whose name is taken is refused.
        """

    def read_extents(
        self, paths: Sequence[str], rows: _native.ReadExtents, arena: _native.Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False,
    ) -> Reading:
        """Start reading and checking extents of the files at `paths`; returns without waiting.

        wanted_bytes  of all chunks in `rows`: by it the settings choose
        stop_at_bad   start nothing new once a digest differs; else read on and report all that do
        past_cache    where it can be done, whatever was tuned: what is asked for is what the device holds
        """

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        """Whether a read of so many bytes, this file's among them, goes past the page cache: each asks the device."""


class Commit(Protocol):
    """What makes a checkpoint appear, at once and durably (docs/ORDERING.md)."""

    def put(self, path: str, data: bytes) -> None:
        """Write a small file that is not there, and sync it. Its name is durable once the directory is synced."""

    def rename(self, source: str, target: str) -> None:
        """Move a file to a name that is free; a directory with all that is in it, where `atomic_rename` holds.

        At once where that holds; elsewhere a crash may leave the file under both names.
        """

    def sync_directory(self, path: str = "") -> None:
        """Make the directory's entries durable. Called where `Capabilities.needs_sync` alone."""


class Lock(Protocol):
    """One writer: a lock, or a lease."""

    def lock(self, holder: str) -> None:
        """Become the one writer, until `unlock` or the death of the process; LockedError names who is."""

    def check_lock(self) -> None:
        """Raise LockedError unless this is the one writer still: before what only that may do."""

    def unlock(self) -> None: ...


class Store(Names, BulkBytes, Commit, Lock, Protocol):
    """One run's checkpoints."""

    @property
    def capabilities(self) -> Capabilities: ...

    def close(self) -> None: ...


PROTOCOLS: tuple[type, ...] = (Names, BulkBytes, Commit, Lock, Store)


def lacks(candidate: object) -> Mapping[str, tuple[str, ...]]:
    """What an object has not of a store, by protocol; empty for a store."""
    found = {one.__name__: tuple(name for name in members(one) if not hasattr(candidate, name)) for one in PROTOCOLS}
    return {protocol: missing for protocol, missing in found.items() if missing}


def members(protocol: type) -> tuple[str, ...]:
    """The names of what a protocol asks for by itself."""
    return tuple(name for name in vars(protocol) if not name.startswith("_"))
