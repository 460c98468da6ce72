"""The interface of a store: four protocols, and capabilities that say what a store guarantees.

`Names`, `BulkBytes`, `Commit` and `Lock`; a `Store` is all of them. Functions take the smallest one that they need: a
listing takes `Names`. No code asks for the type of a store: differences between stores are in `Capabilities`. Every
store passes one suite, tests/store/contract.py; docs/ARCHITECTURE.md says how to add one.

Paths are names relative to the store's root, separated by "/". Failures raise StorageError with operation, errno and
path; FullError if no space is left.

Calls that create, write, rename, sync, remove or lock follow no link in the store; calls that read follow a link to a
directory, never one to a file.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import msgspec

from flowstone.config import INTERRUPTS_MAX, POLL_S, Direction, Share
from flowstone.errors import FlowstoneError
from flowstone.format.manifest import IoRecord
from flowstone.store.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flowstone import _native
    from flowstone.store.spreads import Spreads


class FilePlan(msgspec.Struct, frozen=True):
    """A segment to be created: its path in the store and its full size in bytes.

    begins  how many bytes it begins with that no chunk has, and their digest; None: that is not known yet
    header  if an encoder decides the size, which is `bytes` at most: what the file begins with, by its size. Its length
            is a multiple of 4096; the rows of this file leave room for it
    """

    path: str
    bytes: int
    header: Callable[[int], builtins.bytes] | None = None
    begins: tuple[int, str] | None = None


class Encoded(msgspec.Struct, frozen=True, eq=False):
    """How an encoder other than identity has stored chunks, as columns with one entry per chunk.

    offset, length  in bytes, in its segment
    codec           see format/codec.py
    same            no byte is stored: the base's chunk has the same bytes
    captured        digest of what the encoder got, of chunks in segments of chunks
    derived         no byte is stored: it follows from other chunks of the same save
    file_bytes      of each segment
    """

    offset: NDArray[np.uint64]
    length: NDArray[np.uint32]
    codec: NDArray[np.uint8]
    same: NDArray[np.bool_]
    captured: NDArray[np.uint64]
    derived: NDArray[np.bool_]
    file_bytes: Sequence[int]


class Receipt(msgspec.Struct, frozen=True):
    """A writer's report: digests of all chunks, or the error that ended it. Without an error, everything is durable.

    digests  of the chunks' stored bytes
    encoded  how they are stored; None: unencoded, where the plan has put them
    spans    recorded by the engine's threads
    synced   begin and end of the sync, in seconds of the monotonic clock; None: none was needed
    """

    error: FlowstoneError | None
    digests: NDArray[np.uint64]
    io: IoRecord
    encoded: Encoded | None = None
    spans: Sequence[_native.SpanColumns] = ()
    synced: tuple[float, float] | None = None

    @property
    def has_copies(self) -> bool:
        """Whether chunks were left out that are equal to others of the same save."""
        return self.encoded is not None and bool((self.encoded.derived & (self.encoded.codec == 0)).any())


class ReadReceipt(msgspec.Struct, frozen=True):
    """A reader's report.

    error    why it ended early, if it did; DamagedError if a file ends before its extents do
    bad      positions, in the rows' digests, of chunks that differ from what was written
    touched  for each row: whether any byte of its target has changed
    spans    recorded by the engine's threads
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
    """Limits of lazy capture until a thread waits for it, and of a save in any case.

    blocks       of the arena, in use at once; None: all
    bytes_per_s  None: as fast as the device
    cap          limit in bytes per second for all bytes, also while a thread waits; None: no limit
    """

    blocks: int | None = None
    bytes_per_s: int | None = None
    cap: int | None = None


UNPACED = Pace()


class Watched(msgspec.Struct, frozen=True):
    """How lazy rows are watched until they are captured: all of their bytes, or some, which are compared.

    huge_bytes  of exact_bytes: in huge pages
    insisted  the caller does not accept samples
    row       the first sampled row, and the reason
    """

    exact_bytes: int
    sampled_bytes: int
    huge_bytes: int
    insisted: bool = False
    row: int | None = None
    reason: str | None = None


class Writing(Protocol):
    """Segments on their way to the store."""

    @property
    def watched(self) -> Watched: ...

    def reserve(self) -> None:
        """Give the segments their full size, unless that is done, and begin to write captured windows. Any thread.

        Blocks for as long as the file system does. If the system refuses, the write ends and the receipt has the error.
        Without this call, `receipt` does it.
        """

    def wait_early(self) -> None:
        """Block until no early source will be read any more; for sources on a device, until the copy is queued."""

    def wait_queued(self) -> None:
        """Block until no source on the host will be read any more, and all copies from devices are queued."""

    def expedite(self) -> None:
        """Capture the rest as fast as memory and device allow; returns at once."""

    def wait_captured(self) -> None:
        """Block until no source will be read any more."""

    def receipt(self) -> Receipt:
        """Block until everything is durable, or has failed. Frees the write's resources; call once."""

    def cancel(self) -> None:
        """Start no new requests; the receipt then has a CancelledError."""

    @property
    def done_bytes(self) -> int: ...


class Reading(Protocol):
    """Extents on their way into memory."""

    def aim(self, rows: _native.ReadExtents) -> None:
        """Give extents that are read ahead their targets: the same rows, with memory, which changes from now on. Once.
        """

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, after at most `timeout_s`. What is read ahead has its targets by now, or is cancelled.
        """

    def receipt(self) -> ReadReceipt:
        """Block until the end."""

    def cancel(self) -> None: ...

    @property
    def done_bytes(self) -> int: ...


def finish_reading(reading: Reading, on_progress: Callable[[int], None] | None = None) -> ReadReceipt:
    """Wait for the end. `on_progress` is called with the bytes done.

    Any other exception that ends the wait (Ctrl-C, a signal handler's) stops the reading, and is raised once no byte
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
    """Return once no byte moves any more, even if signals interrupt the wait repeatedly."""
    for _ in range(INTERRUPTS_MAX):
        try:
            reading.cancel()
            reading.receipt()
            return
        except BaseException:  # noqa: S112  (the first one is on its way already; memory that still changes is worse)
            continue


class Capabilities(msgspec.Struct, frozen=True):
    """What a store guarantees. It can commit checkpoints if `atomic_rename` or `conditional_put` holds.

    atomic_rename      `rename` moves a directory with its content as a whole: a crash leaves it moved or not moved
    conditional_put    readers see all of a `put` file or nothing; of two puts to one name, one is refused
    directory_sync     names are durable after `sync_directory`
    durable_on_return  names and small files are durable when the call that creates, moves or removes them returns
    range_reads        the cost of a partial `read` depends on the part, not on the file
    appends            an existing file can grow: the store has `append_to_new` (see store.appends)
    direct             bulk bytes can bypass the page cache
    links              `link` gives a file a further name; its bytes are there until the last name is removed
    drafts_max         how many checkpoints may be written at once; None: any number
    checks_room        `write` refuses what does not fit, even if it is not to reserve it
    parts              segments can be read and written by the job of another store: it has `open_segments` and
                       `open_extents` (store/parts.py, Parts)
    spreads            segments of one save are to lie on several paths: it has `shares` (see store.spreads)
    volatile           what it holds ends with this process or this machine: "durable" means that it is whole there
    distant            each call waits for a server: calls that do not depend on each other are made at once
    asks_ahead         files can be read before they are asked for: it has `ahead` (see store.asks_ahead)
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
        """The store's location, for people and messages."""

    @property
    def capabilities(self) -> Capabilities: ...

    def exists(self, path: str = "") -> bool:
        """Whether the name exists. Raises StorageError if that cannot be determined."""

    def is_link(self, path: str) -> bool:
        """Whether the name is a link, which this store did not create."""

    def names(self, path: str = "") -> tuple[str, ...]:
        """Entries of a directory, sorted; empty when it does not exist."""

    def size(self, path: str) -> int: ...
    def stamp(self, path: str) -> str | None:
        """A text that changes whenever the file is replaced; None if there is no file."""

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        """`length` bytes of a file from `offset` on, fewer if the file ends earlier; None: all bytes.

        raises  DamagedError if the file has more than `bytes_max`: before any byte is read
        """

    def make_directory(self, path: str = "") -> None:
        """Create a directory that does not exist.

        The root is created with its missing parents, and its path is durable on return.
        """

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory."""


class BulkBytes(Protocol):
    """Segments: extents between memory and files, in batches, by the native engine or a replacement."""

    def free_bytes(self) -> int: ...

    def settings(self, direction: Direction) -> Settings:
        """How bytes move here. An arena for this store has blocks of that direction's request length."""

    def write(
        self, files: Sequence[FilePlan], rows: _native.WriteExtents, arena: _native.Arena, pace: Pace = UNPACED, *,
        reserved: bool = True,
    ) -> Writing:
        """Create the segments with their full size and start writing them; returns without waiting. Those whose size an
        encoder decides have their size when the receipt is there.

        reserved  False: `Writing.reserve` gives them their size, and nothing is written before that

        Requests are at most as long as a block of the arena. An existing segment is refused. Rows with a feed
        (`_native.Feed`: a flush) have their bytes only later, in order: it is the engine that waits for them.
        """

    def read_extents(
        self, paths: Sequence[str], rows: _native.ReadExtents, arena: _native.Arena, *, wanted_bytes: int,
        stop_at_bad: bool = True, past_cache: bool = False, ahead: bool = False,
    ) -> Reading:
        """Start reading and checking extents of the files at `paths`; returns without waiting.

        wanted_bytes  length of all chunks in `rows`: the settings depend on it
        stop_at_bad   start no new requests once a digest differs; else read on and report all that differ
        past_cache    bypass the page cache if possible, whatever was tuned, to check what the device holds
        ahead         the rows have no targets yet: what the arena holds is read, and waits there for `Reading.aim`
        """

    def reads_past_cache(self, path: str, wanted_bytes: int) -> bool:
        """Whether a read of that many bytes, this file's among them, bypasses the page cache: each rank reads the
        device.
        """


def shares_of(store: Store) -> tuple[Share, ...]:
    """The shares of its paths; none where there is one."""
    return cast("Spreads", store).shares() if store.capabilities.spreads else ()


def sync_further_paths(store: Store, directory: str) -> None:
    """See store.spreads; nothing where there is one path: what commits syncs that."""
    if store.capabilities.spreads:
        cast("Spreads", store).sync_segments(directory)


class Commit(Protocol):
    """Calls that make a checkpoint appear, atomically and durably (docs/ORDERING.md)."""

    def put(self, path: str, data: bytes) -> None:
        """Write a new small file, and sync it. Its name is durable once the directory is synced."""

    def rename(self, source: str, target: str) -> None:
        """Move a file to a free name; with `atomic_rename`, also a directory with its content.

        Atomic if `atomic_rename` holds; else a crash may leave the file under both names.
        """

    def link(self, source: str, target: str) -> None:
        """Give a file that is durable a further, free name. Only called if `Capabilities.links`.

        The name is durable once its directory is synced. A file system may refuse: EPERM, EMLINK, EXDEV, ENOTSUP.
        """

    def sync_directory(self, path: str = "") -> None:
        """Make the directory's entries durable. Only called if `Capabilities.needs_sync`."""


class Lock(Protocol):
    """One writer per store: a lock, or a lease."""

    def lock(self, holder: str) -> None:
        """Become the one writer, until `unlock` or the end of the process; LockedError names the current one."""

    def check_lock(self) -> None:
        """Raise LockedError unless this is still the one writer. Called before what only the writer may do."""

    def unlock(self) -> None: ...


class Store(Names, BulkBytes, Commit, Lock, Protocol):
    """The store of one run's checkpoints."""

    def close(self) -> None: ...


@runtime_checkable
class FlushesRewinds(Protocol):
    """A store in memory whose agent copies its checkpoints to a directory, `flush_to`."""

    def flush_rewind(self) -> None:
        """Set aside in the flush target what was set aside here. A failure is logged; the next flush tries again."""


PROTOCOLS: tuple[type, ...] = (Names, BulkBytes, Commit, Lock, Store)


def lacks(candidate: object) -> Mapping[str, tuple[str, ...]]:
    """The methods of a store that an object lacks, by protocol; empty for a store."""
    found = {one.__name__: tuple(name for name in members(one) if not hasattr(candidate, name)) for one in PROTOCOLS}
    return {protocol: missing for protocol, missing in found.items() if missing}


def members(protocol: type) -> tuple[str, ...]:
    """The names of the methods that a protocol itself declares."""
    return tuple(name for name in vars(protocol) if not name.startswith("_"))


def place_of(location: str) -> str:
    """What the location of a store names: stores at one place are one. Links to directories are followed."""
    place = location.removeprefix("fsspec+").removeprefix("file://") if location.startswith("fsspec+") else location
    return os.path.realpath(place) if place.startswith("/") else place.rstrip("/")
