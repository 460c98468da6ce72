"""The interface of a store: four protocols, and capabilities that say what a store guarantees.

The protocols are `Names`, `BulkBytes`, `Commit` and `Lock`; a `Store` has all four. Functions take the smallest
protocol that they need: a listing takes `Names`. No code depends on the type of a store: differences between stores are
in `Capabilities`. Every store passes the suite tests/store/contract.py; docs/ARCHITECTURE.md says how to add a store.

Paths are relative to the store's root, and their names are separated by "/". Failures raise StorageError, which names
operation, errno and path; FullError if no space is left.

Calls that create, write, rename, sync, remove or lock follow no symbolic link in the store. Calls that read follow
symbolic links to directories, never links to files.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import msgspec

from flowstone.config import INTERRUPTS_MAX, POLL_S, Direction, PathShare
from flowstone.errors import FlowstoneError
from flowstone.format.manifest import IoRecord
from flowstone.store.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flowstone._native import Arena, ReadExtents, SpanColumns, WriteExtents
    from flowstone.store.multi_path import MultiPath


class FilePlan(msgspec.Struct, frozen=True):
    """A segment to be created: its path in the store and its full size in bytes.

    begins  length and digest of the bytes before the first chunk (the header); None: not known yet
    header  for a file whose size an encoder decides (at most `bytes`): returns the file's first bytes, given its size.
            Their length is a multiple of 4096; no row of this file's write overlaps them
    """

    path: str
    bytes: int
    header: Callable[[int], builtins.bytes] | None = None
    begins: tuple[int, str] | None = None


class EncodedChunks(msgspec.Struct, frozen=True, eq=False):
    """How an encoder has stored chunks. Each array has one entry for each chunk.

    offset, length  where the chunk's bytes are in its segment, in bytes
    codec           id of the chunk's codec (format/codec.py)
    same            whether no byte is stored, because the same chunk of the earlier checkpoint (the base) has the same
                    bytes
    captured        digest of the chunk before encoding, for segments that store chunks in any order
    derived         whether no byte is stored, because the chunk can be computed from other chunks of the save
    file_bytes      size of each segment in bytes (one entry for each segment)
    """

    offset: NDArray[np.uint64]
    length: NDArray[np.uint32]
    codec: NDArray[np.uint8]
    same: NDArray[np.bool_]
    captured: NDArray[np.uint64]
    derived: NDArray[np.bool_]
    file_bytes: Sequence[int]


class Receipt(msgspec.Struct, frozen=True):
    """The result of a write: the digests of all chunks, or the error that ended the write. Without an error, everything
    is durable.

    digests  digests of the chunks' stored bytes
    encoded  how an encoder has stored the chunks; None: they are not encoded, and are where the plan puts them
    spans    times that the engine's threads have recorded, for a trace
    synced   begin and end of the sync, in seconds of the monotonic clock; None: none was needed
    """

    error: FlowstoneError | None
    digests: NDArray[np.uint64]
    io: IoRecord
    encoded: EncodedChunks | None = None
    spans: Sequence[SpanColumns] = ()
    synced: tuple[float, float] | None = None

    @property
    def has_copies(self) -> bool:
        """Whether chunks were not stored because they equal other chunks of the same save."""
        return self.encoded is not None and bool((self.encoded.derived & (self.encoded.codec == 0)).any())


class ReadReceipt(msgspec.Struct, frozen=True):
    """The result of a read.

    error    why the read ended early, if it did; DamagedError if a file is shorter than the ranges that are read from
             it
    bad      the chunks that do not match their digest, as positions in the list of expected digests
    touched  for each row of the request: whether any byte of the memory to fill has changed
    spans    times that the engine's threads have recorded, for a trace
    """

    error: FlowstoneError | None
    bad: NDArray[np.uint64]
    touched: NDArray[np.bool_]
    requested_bytes: int
    copied_bytes: int
    direct_bytes: int
    requests: int
    spans: Sequence[SpanColumns] = ()


class Pace(msgspec.Struct, frozen=True):
    """Limits of a save's speed. `blocks` and `bytes_per_s` apply to data that is captured after `save` has returned,
    and only until a thread waits for the end of this capture.

    blocks       how many blocks of the arena (staging memory) may be in use; None: all
    bytes_per_s  limit of bytes per second; None: as fast as the device
    cap          limit of bytes per second for all data, even while a thread waits; None: no limit
    """

    blocks: int | None = None
    bytes_per_s: int | None = None
    cap: int | None = None


UNPACED = Pace()


class WatchCoverage(msgspec.Struct, frozen=True):
    """How memory that is captured after `save` has returned is watched for changes until its capture: how many bytes
    exactly, and how many by samples.

    huge_bytes  how many of exact_bytes are in huge pages
    is_exact_required    whether the caller does not accept samples
    row         the first row of the request that is watched by samples; None: there is none
    reason      why that row is watched by samples
    """

    exact_bytes: int
    sampled_bytes: int
    huge_bytes: int
    is_exact_required: bool = False
    row: int | None = None
    reason: str | None = None


class WriteHandle(Protocol):
    """A running write of segments (files of tensor data)."""

    @property
    def watched(self) -> WatchCoverage: ...

    def reserve(self) -> None:
        """Reserve the segments' space, if that was not done before, and start to write captured data. Can be called on
        any thread.

        Blocks until the space is reserved. If the file system refuses, the write ends, and its receipt has the error.
        If this is never called, `receipt` reserves the space.
        """

    def wait_early(self) -> None:
        """Block until no memory of the rows marked as early will be read any more; for memory on a device, until its
        copy is queued.
        """

    def wait_queued(self) -> None:
        """Block until no host memory of the state will be read any more, and all copies from devices are queued."""

    def expedite(self) -> None:
        """Capture all remaining bytes as fast as memory and device allow. Does not wait for them."""

    def wait_captured(self) -> None:
        """Block until no memory of the state will be read any more."""

    def receipt(self) -> Receipt:
        """Block until everything is durable, or the write has failed. Frees the resources of the write, so call it only
        once.
        """

    def cancel(self) -> None:
        """Start no new requests. The receipt then has a CancelledError, unless the write had already ended."""

    @property
    def done_bytes(self) -> int: ...


class ReadHandle(Protocol):
    """A running read of ranges of files into memory."""

    def aim(self, rows: ReadExtents) -> None:
        """For a read with `ahead`: set the memory to fill. `rows` are those of `read_extents`, now with addresses. Call
        it once.
        """

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the end. Returns whether the read has ended. For a read with `ahead`, call `aim`
        or `cancel` before.
        """

    def receipt(self) -> ReadReceipt:
        """Block until the read has ended, and return its result."""

    def cancel(self) -> None: ...

    @property
    def done_bytes(self) -> int: ...


def finish_reading(reading: ReadHandle, on_progress: Callable[[int], None] | None = None) -> ReadReceipt:
    """Wait for the end of a read. `on_progress` is called from time to time with the number of bytes read so far.

    If an exception ends the wait (such as Ctrl-C, raised by a signal handler), the read is stopped. The exception is
    raised once no memory is written any more.
    """
    try:
        while not reading.wait(POLL_S):
            if on_progress is not None:
                on_progress(reading.done_bytes)
        return reading.receipt()
    except BaseException:
        stop_reading(reading)
        raise


def stop_reading(reading: ReadHandle) -> None:
    """Stop a read. Returns once the read writes no memory any more, even if signals interrupt the wait repeatedly."""
    for _ in range(INTERRUPTS_MAX):
        try:
            reading.cancel()
            reading.receipt()
            return
        except BaseException:  # noqa: S112  (the first one is on its way already; memory that still changes is worse)
            continue


class Capabilities(msgspec.Struct, frozen=True):
    """The abilities and guarantees of a store. A store can commit checkpoints if `atomic_rename` or `conditional_put`
    is true.

    atomic_rename      `rename` moves a directory with its content atomically: a crash leaves it moved or not moved
    conditional_put    readers see all of a `put` file or nothing; of two puts to one name, one is refused
    directory_sync     names are durable after `sync_directory`
    durable_on_return  names and small files are durable when the call that creates, moves or removes them returns
    range_reads        the cost of reading a part of a file depends on the length of the part, not on that of the file
    appends            an existing file can grow: the store has `append_to_new` (see store.appendable)
    direct             reads and writes of segments can bypass the page cache
    links              `link` gives a file a further name; its bytes exist until the last name is removed
    drafts_max         how many checkpoints may be written at once; None: any number
    checks_room        `write` raises an error for a save that does not fit into the free space, even with
                       `reserved=False`
    parts              a read or write of another store can include this store's segments: it has `open_segments` and
                       `open_extents` (store/striped/stripe_member.py)
    spreads            segments of one save go to several paths (disks): the store has `shares` (see store.multi_path)
    volatile           the contents are lost with this process or this machine: "durable" means only complete in memory
    distant            each call waits for a server, so callers make independent calls concurrently
    asks_ahead         files can be prefetched: the store has `ahead` (see store.prefetching)
    """

    atomic_rename: bool
    conditional_put: bool
    directory_sync: bool
    durable_on_return: bool
    range_reads: bool
    appends: bool
    direct: bool
    links: bool
    drafts_max: int | None = None
    volatile: bool = False
    checks_room: bool = False
    distant: bool = False
    asks_ahead: bool = False
    parts: bool = False
    spreads: bool = False

    @property
    def needs_sync(self) -> bool:
        """Whether names become durable only by `sync_directory`."""
        return self.directory_sync and not self.durable_on_return


class Names(Protocol):
    """Names, and the content of small files."""

    @property
    def location(self) -> str:
        """Where the store is (such as its path or URL), for messages."""

    @property
    def capabilities(self) -> Capabilities: ...

    def exists(self, path: str = "") -> bool:
        """Whether the name exists. Raises StorageError if that cannot be determined."""

    def is_link(self, path: str) -> bool:
        """Whether the name is a symbolic link. Flowstone itself creates none."""

    def names(self, path: str = "") -> tuple[str, ...]:
        """The names of a directory's entries, sorted; empty if the directory does not exist."""

    def size(self, path: str) -> int: ...
    def stamp(self, path: str) -> str | None:
        """A text that changes whenever the file is replaced; None if the file does not exist."""

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        """`length` bytes of a file from `offset` on, fewer if the file ends earlier. `length` None: up to the end.

        raises  DamagedError  the file has more than `bytes_max` bytes; raised before any byte is read
        """

    def make_directory(self, path: str = "") -> None:
        """Create a directory that does not exist.

        The root is created with its missing parents, and its path is durable on return.
        """

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory."""


class BulkBytes(Protocol):
    """Reads and writes of segments: many ranges of memory and files in one batch. The native engine, or a replacement,
    carries them out.
    """

    def free_bytes(self) -> int: ...

    def settings(self, direction: Direction) -> Settings:
        """The settings with which this store moves bytes in this direction. An arena for the store has blocks of the
        settings' `request_bytes`.
        """

    def write(
        self, files: Sequence[FilePlan], rows: WriteExtents, arena: Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> WriteHandle:
        """Create the segments with their full size and start writing them; returns without waiting. A segment whose
        size an encoder decides has that size once the receipt exists.

        reserved  True: the segments have their full size on return. False: `WriteHandle.reserve` sets it, and nothing
                  is written before that

        Requests are at most as long as a block of the arena. If a segment exists, StorageError is raised. For rows with
        a `_native.SourceSupply` (in a flush), the bytes arrive later, in order, and the engine waits for them.
        """

    def read_extents(
        self, paths: Sequence[str], rows: ReadExtents, arena: Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> ReadHandle:
        """Start reading and checking ranges of the files at `paths`; returns without waiting.

        wanted_bytes  length of all chunks in `rows`, in bytes: the settings depend on it
        stop_at_bad   start no new requests after a digest mismatch; False: read everything and report all mismatches
        past_cache    bypass the page cache if possible, regardless of the tuning, to check the bytes on the device
        ahead         the memory to fill is not known yet: bytes are read into the arena until it is full, and stay
                      there until `ReadHandle.aim` is called
        """

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        """Whether a load that reads `wanted_bytes` in all, including this file, bypasses the page cache. If so, each
        rank that reads the file reads it from the device again.
        """


def shares_of(store: Store) -> tuple[PathShare, ...]:
    """Which share of a save's bytes each path (disk) of the store gets; empty for a store with one path."""
    return cast("MultiPath", store).shares() if store.capabilities.spreads else ()


def sync_further_paths(store: Store, directory: str) -> None:
    """Sync the names of segments on all paths of a striped store but the first (store.multi_path). Does nothing for
    other stores.
    """
    if store.capabilities.spreads:
        cast("MultiPath", store).sync_segments(directory)


class Commit(Protocol):
    """Calls that make a checkpoint appear, atomically and durably (docs/ORDERING.md)."""

    def put(self, path: str, data: bytes) -> None:
        """Write a new small file, and sync it. Its name is durable once the directory is synced."""

    def rename(self, source: str, target: str) -> None:
        """Move a file to a free name; with `atomic_rename`, also a directory with its content.

        The move is atomic if `atomic_rename` is true. Otherwise a crash may leave the file under both names.
        """

    def link(self, source: str, target: str) -> None:
        """Give a durable file a further name, which must be free. Only called if `Capabilities.links`.

        The name is durable once its directory is synced. A file system may refuse with EPERM, EMLINK, EXDEV or ENOTSUP.
        """

    def sync_directory(self, path: str = "") -> None:
        """Make the directory's entries durable. Only called if `Capabilities.needs_sync`."""


class Lock(Protocol):
    """The right to write into a store, which only one job has: a lock on a file, or a lease."""

    def lock(self, holder: str) -> None:
        """Become the only writer, until `unlock` or the end of the process. Raises LockedError, which names the current
        holder, if there is another writer.
        """

    def check_lock(self) -> None:
        """Raise LockedError if the lock was lost. Called before each operation that only the writer may perform."""

    def unlock(self) -> None: ...


class Store(Names, BulkBytes, Commit, Lock, Protocol):
    """The store of one run's checkpoints."""

    def close(self) -> None: ...


@runtime_checkable
class FlushesRewinds(Protocol):
    """A store in memory whose contents an agent copies to a directory, `flush_to`."""

    def flush_rewind(self) -> None:
        """Set the rewound steps aside in the flush target, too. A failure is logged; the next flush tries again."""


PROTOCOLS: tuple[type, ...] = (Names, BulkBytes, Commit, Lock, Store)


def missing_methods(candidate: object) -> Mapping[str, tuple[str, ...]]:
    """The methods of a store that `candidate` lacks: name of the protocol -> methods. Empty if it is a store."""
    missing = {
        protocol.__name__: tuple(name for name in members(protocol) if not hasattr(candidate, name))
        for protocol in PROTOCOLS
    }
    return {protocol: names for protocol, names in missing.items() if names}


def members(protocol: type) -> tuple[str, ...]:
    """The names of the methods that a protocol itself declares."""
    return tuple(name for name in vars(protocol) if not name.startswith("_"))


def canonical_location(location: str) -> str:
    """The canonical form of a store's location, which is equal for two names of the same store. Links to directories
    are resolved.
    """
    place = location.removeprefix("fsspec+").removeprefix("file://") if location.startswith("fsspec+") else location
    return os.path.realpath(place) if place.startswith("/") else place.rstrip("/")


def sync_names(store: Store, directory: str = "") -> None:
    """Make the names in a directory durable, if the store needs a sync for that."""
    if store.capabilities.needs_sync:
        store.sync_directory(directory)
