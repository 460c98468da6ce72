"""The native core: bytes between memory and files, and their digests.

It sees addresses, lengths and file descriptors; it knows no tensors but as DLPack shows
them to TensorReader, links no torch, and sets no policy. Every call is a batch, and every
call that can block releases the interpreter lock. Failures come back as values (`Fault`), never as exceptions; wrong
arguments (our mistake) raise ValueError.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

BLOCK_ALIGNMENT_BYTES: int  # 4096: windows, slots and arena blocks are multiples of it
CHUNK_BYTES: int  # 1 MiB: the longest run that one digest covers
NO_DIGEST: int  # 2**64 - 1 in WriteExtents.chunk: this row is written without digests
PHASES: list[str]  # of jobs, as their spans number them: capture, encode, write, read, deliver
VERIFY_ONLY: int  # 0 in ReadExtents.address: read and check, keep nothing

def has_io_uring() -> bool:
    """Whether this build has the io_uring backend and the running kernel lets it start (a real ring is made)."""

def written_pages_refusal() -> str:
    """Why the system cannot tell which pages of memory were written; empty where it can. Tried once in each process."""

def guarded_copy_refusal() -> str:
    """Why GuardedCopy can guard nothing here; empty where it can."""

def is_byte_addressable(fd: int) -> bool:
    """Whether a file's pages are the storage itself: of a file system in memory, or with direct access (DAX)."""

def probe_direct(directory: str) -> int:
    """The alignment in bytes that O_DIRECT needs in `directory`, 0 where it is refused.

    Opens, writes and reads back a real temporary file with real aligned buffers
    (the answer of statx(STATX_DIOALIGN) alone is not believed), then removes it.
    Raises OSError if the directory cannot be written.
    """

def run_requests(
    *, backend: Literal["io_uring", "posix", "sync"], direction: Literal["read", "write"], queue_depth: int,
    files: Sequence[File], file: NDArray[np.uint32], offset: NDArray[np.uint64], address: NDArray[np.uint64],
    length: NDArray[np.uint64], register: bool = False,
) -> Fault | None:
    """Move plain requests in the given order, at most `queue_depth` in flight; blocks until all are done.

    For studies of a device: no plan, no digests, no arena. One row is one request; on an O_DIRECT file
    every offset, address and length is a multiple of its alignment.

    backend   "sync" is a plain loop, one call after the other
    register  pin the requests' memory with the ring first (io_uring only); OSError when the limit on
              locked memory forbids it
    Raises OSError also when the backend cannot start. The first failure stops the others and is returned.
    """

class TensorReader:
    """Reads tensors of one framework through DLPack's exchange functions (version 1), which run no Python.

    exchange  `__dlpack_c_exchange_api__` of the tensors' type; ValueError if it is of another version
    """

    def __init__(self, exchange: object) -> None: ...
    def name_type(self, tensor: object, type: object | None) -> bool:
        """Let tensors of the same type as `tensor` be of `type`; of None, if DLPack has another named type alike.

        Returns whether the framework describes it.
        """

    def read(self, tensors: list[Any]) -> Any:
        """None if one of them cannot be described; else a tuple of columns and lists.

        The address of the first element, uint64; the type, as named; the shape; the positions of those of type None,
        and of those that are not one run of memory in row-major order; whether one is complex; the number of each
        one's device, int32, -1 for the host; the position of each device's first tensor.
        """

def xxh3_64(data: bytes | bytearray | memoryview | NDArray[np.uint8], /) -> int:
    """XXH3-64 with seed 0 of a contiguous buffer."""

def digest_memory(address: NDArray[np.uint64], length: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """XXH3-64 with seed 0 of each of some runs of memory, which the caller keeps alive. `length`: in bytes.

    Releases the interpreter lock once, for all of them. Raises ValueError for columns of another type, or that differ
    in length. Memory that is gone ends the process, as any read of it does.
    """

class Fault:
    """Why a job failed: one system call on one range of one file."""

    # "write", "read", "end of file" (a read that met the file's end too early), "capture" (a lazy source
    # had changed; offset and length say where in the file it belongs)
    operation: str
    errno: int  # 0 for "end of file" and "capture"
    path: str
    offset: int  # bytes
    length: int  # bytes

class Arena:
    """A bounded pool of aligned memory blocks, mapped once, touched once, reused until closed.

    Blocks are taken and given back by jobs only. Memory is mapped at construction
    (address space only); pages are touched by a background thread as `grow` asks,
    with huge pages where the system gives them, and are not inherited by fork.
    """

    def __init__(self, *, budget_bytes: int, block_bytes: int, background: bool = False) -> None:
        """`block_bytes` is a multiple of 4096, from 2 MiB (a huge page) to 1 GiB.

        The engine needs blocks of at least its request_bytes. `background`: see Engine.
        """
    @property
    def budget_bytes(self) -> int: ...  # rounded down to whole blocks, at least two blocks
    @property
    def block_bytes(self) -> int: ...
    @property
    def touched_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...  # touched and in no job's hands
    def grow(self, total_bytes: int, *, when_idle: bool = False) -> None:
        """Ask for `total_bytes` touched in all (never above the budget). Returns at once.

        when_idle  only while no job uses the arena: touching takes time from it
        """
    def grow_at_once(self, total_bytes: int, *, threads: int) -> None:
        """As `grow`, for a caller that waits: touched by up to `threads` threads. Returns at once."""
    def wait_grown(self, timeout_s: float) -> bool:
        """Wait until all that was asked for is touched, and pinned as far as it can be. Whether it is."""
    def use(self, device: Device) -> None:
        """Pin blocks for `device` before they are handed out, in slabs of up to 1 GiB; those touched already before
        this returns. Only the first device counts: what it pins is pinned for all of its kind.
        """
    def place(self, node: int) -> int:
        """Have pages that are touched from now on lie on that NUMA node, where it has room. Returns 0 or an errno."""
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def refusal(self) -> str: ...  # why some are not pinned; "": none was refused
    def close(self) -> None:
        """Stop the toucher, unmap. ValueError while a job runs."""

class GuardedCopy:
    """A copy of memory that other threads may write as soon as it is made: a write to what is not copied yet waits.

    source, length, target  of each row: addresses, and bytes. They stay allocated, and `target` unread, until `wait`
                            is true
    guard                   False: copy all before it returns

    What cannot be guarded is copied before it returns: memory that other processes or a file have too, rows that
    overlap, short ones; everything where the system refuses (`guarded_copy_refusal`).
    """

    def __init__(
        self, *, source: NDArray[np.uint64], length: NDArray[np.uint64], target: NDArray[np.uint64], guard: bool = True
    ) -> None: ...
    def wait(self, timeout_s: float) -> bool:
        """Until all is copied; whether it is."""
    @property
    def gone(self) -> int | None: ...  # after wait: the first row whose memory was unmapped meanwhile
    @property
    def guarded_bytes(self) -> int: ...

class Mapping:
    """The first `bytes` bytes of a file in this process's memory, until the object, and all Files of it, are gone.

    Forked children do not have them. The file must not become shorter meanwhile: that would end the process. Raises
    ValueError for no bytes, OSError.
    """

    def __init__(self, *, fd: int, bytes: int, writable: bool) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class File:
    """An open file as the engine sees it; the descriptor stays the caller's."""

    def __init__(
        self, *, fd: int, path: str, alignment: int, mapped: int = 0, mapping: Mapping | None = None, of_path: int = 0,
        may_move: bool = False,
    ) -> None:
        """alignment  > 1: the descriptor was opened with O_DIRECT and needs it; 1: buffered
        mapped     where its first byte would lie, if all that is read of it is in this process's memory: then it is
                   taken from there; keep it mapped meanwhile
        mapping    the same, and it is kept. A file that is written is captured there, without a request, once it is
                   ready; what no row covers of it becomes zero
        of_path    of an engine with several paths, the number of the one that moves its bytes
        may_move   by such an engine: writes into it that fail wait for `Engine.move` or `Engine.refuse`
        """
    @property
    def fd(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def alignment(self) -> int: ...

class GatherLayout:
    """How a row's bytes lie in strided memory: row-major order of `shape`, strides in bytes."""

    def __init__(self, *, item_bytes: int, shape: Sequence[int], strides_bytes: Sequence[int]) -> None: ...
    @property
    def is_shallow(self) -> bool:
        """Whether devices digest it where it lies: few dimensions are apart in memory, as in all but made-up arrays."""

class ScatterLayout:
    """Which elements of a stored row-major extent go where in strided memory.

    extent_shape   the stored extent, row-major, items of `item_bytes`
    offset, shape  the box of it that is wanted, in elements, inside extent_shape
    strides_bytes  of the target; the row's address is that of the box's first element
    """

    def __init__(
        self, *, item_bytes: int, extent_shape: Sequence[int], offset: Sequence[int],
        shape: Sequence[int], strides_bytes: Sequence[int],
    ) -> None: ...

class Device:
    """A queue of copies between an accelerator's memory and the host's, made in order by the accelerator.

    A stream of the caller's is given by its handle. Errors of the device are OSError with EIO and the device's words.
    """

    def synchronize(self) -> None:
        """Wait until everything that is queued now has been made. Raises OSError if that failed."""
    def follow(self, stream: int) -> None:
        """Copies queued from now on wait for what `stream` holds now. Raises OSError, also if it records a graph."""
    def lead(self, stream: int, *, early: bool = False) -> None:
        """What `stream` gets from now on waits for the copies that are queued now; `early`: for those of rows that are
        not lazy. Raises OSError, as `follow`.
        """
    def gather(
        self, stream: int, *, address: NDArray[np.uint64], begin: NDArray[np.uint64], length: NDArray[np.uint32],
        layout: NDArray[np.int64], layouts: Sequence[GatherLayout],
    ) -> NDArray[np.uint8]:
        """Have `stream` gather bytes from `begin` on of rows of the device's memory into host memory, each run at the
        next multiple of GATHERED_ALIGNMENT_BYTES: there once a copy is over that is queued after a later `follow`.
        `layout[i]`: into `layouts`, or -1 for a row in one run. The device takes the memory back with the array. Takes
        no memory of the device's. Raises OSError, as `follow`.
        """
    @property
    def packs(self) -> bool:
        """Whether strided memory is copied by a kernel, and not run by run: whether the driver has taken it."""
    def digest(
        self, stream: int, address: NDArray[np.uint64], length: NDArray[np.uint64],
        layout: NDArray[np.int64] | None = None, layouts: Sequence[GatherLayout] = (),
    ) -> Digested | None:
        """Have `stream` digest the chunks of rows of the device's memory; the digests are there when those of a
        `gather` would be. None if the device cannot: its driver has refused the kernels, or pinned memory. Raises
        OSError, as `follow`.

        layout  of each row: into `layouts`, which are shallow, or -1 for a row in one run; None: all are
        """
    def reserve_launches(
        self, *, runs: int, strided: int, bytes: int, chunks: int, strided_chunks: int, short_chunks: int, times: int
    ) -> None:
        """Have host memory ready for a gather of so many runs (some of strided memory), and bytes, and at the same time
        for digests of so many chunks, some of strided memory, some of DIGESTED_BY_HOST_MAX bytes or less; all of that
        `times` over.
        If some are strided, for the tables of windows, too.
        """
    @property
    def pci_address(self) -> str: ...  # as below /sys/bus/pci/devices; "" if unknown
    def is_recording(self, stream: int) -> bool:
        """Whether work that `stream` gets becomes part of a graph instead of being executed."""

class Digested:
    """Digests that a device has made of the chunks of rows, one row after the other."""

    def digests(self) -> NDArray[np.uint64]: ...

def cuda_device(*, ordinal: int, name: str) -> Device:
    """Copies on a CUDA stream of their own, of the GPU of that number. Raises OSError where there is no driver."""

GATHERED_ALIGNMENT_BYTES: int
DIGESTED_BY_HOST_MAX: int
"""Bytes of a chunk that is gathered, because the kernel does not know XXH3's rule for it."""
GATHER_PTX: str
PACK_PTX: str
DIGEST_PTX: str
STRIDED_DIGEST_PTX: str
"""The kernels' texts."""

def pack_table(layout: GatherLayout, *, address: int, begin: int, bytes: int, target: int) -> bytes:
    """The table of the kernel PACK_PTX for packed bytes of a layout at `address`, to `target` behind its output."""

def digest_table(layout: GatherLayout, *, address: int, begin: int, bytes: int, target: int) -> bytes:
    """The table's row of the kernel STRIDED_DIGEST_PTX for packed bytes of a shallow layout at `address`, whose digest
    goes to `target` behind its output.
    """

LINE_BYTES: int
"""A sample of a lazy row."""
LINES_PER_CHUNK: int

def line_begins(row_bytes: NDArray[np.uint64], seed: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Where the samples of rows begin, one row after the other: LINES_PER_CHUNK of each chunk of it.

    Each is LINE_BYTES long, and lies somewhere in its part of its chunk, by the row's seed; a row that is shorter has
    samples that begin and end with it.
    """

class Encoder:
    """What becomes of chunks between their capture and the file (native/encoder.h)."""

def identity_encoder() -> Encoder:
    """Chunks are stored as they are, where they are planned."""

def delta_encoder(
    digests: NDArray[np.uint64], known: NDArray[np.bool_], codecs: NDArray[np.uint8] | None = None
) -> Encoder:
    """Chunks are stored as they are, but for those of which the base has one with the same bytes.

    digests, known  by a chunk's number in the job: the digest of the base's, and whether there is one
    codecs          with which it is stored, if the digest is of its stored bytes; 0: it is of the captured ones. None:
                    all are
    """

def planes_encoder(
    widths: NDArray[np.uint8], digests: NDArray[np.uint64], known: NDArray[np.bool_],
    codecs: NDArray[np.uint8] | None = None,
    near: tuple[KeptChunks, NDArray[np.uint64], NDArray[np.bool_]] | None = None,
) -> Encoder:
    """The same, and chunks are coded where that pays (docs/FORMAT.md, Codecs).

    widths  length of a chunk's elements in bytes: 1, 2, 4, 8; 0: it is stored as it is
    near    what was kept of the chunks; which of these bytes may be a base, by their digest, and whether there is one.
            Chunks that are stored by themselves are kept from then on
    """

class KeptChunks:
    """What chunks were: their bytes, by the chunk's number, in at most `budget_bytes` of host memory. Any thread."""

    def __init__(self, chunks: int, *, budget_bytes: int) -> None: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def let_go(self) -> None:
        """Free the bytes, and keep nothing from now on: the budget is another one's."""
    @property
    def digests(self) -> NDArray[np.uint64]:
        """Of the kept bytes of each chunk; 0: there are none."""

def encode_planes(chunk: bytes | bytearray | memoryview | NDArray[np.uint8], width: int) -> bytes | None:
    """A chunk with elements of `width` bytes as codec `planes` stores it; None: it would be stored raw."""

def quantizing_encoder(
    elements: NDArray[np.uint8], blocks: NDArray[np.uint16], widths: NDArray[np.uint8],
    digests: NDArray[np.uint64], known: NDArray[np.bool_], codecs: NDArray[np.uint8] | None = None,
    near: tuple[KeptChunks, NDArray[np.uint64], NDArray[np.bool_]] | None = None,
) -> Encoder:
    """The same, and chunks are quantized where the bound holds; those lose precision.

    elements  0: float32, 1: bfloat16, 2: float16
    blocks    elements that share a scale, 16 to 4096; 0: the chunk is not quantized
    """

def decode_chunk(
    codec: int, stored: bytes | bytearray | memoryview | NDArray[np.uint8], data_bytes: int
) -> bytes | None:
    """The `data_bytes` of a chunk that an encoder has stored; None: no encoder has written this."""

def cast_numbers(
    singles: bytes | bytearray | memoryview | NDArray[np.uint8], element: int, plain: bool = False
) -> bytes | None:
    """float32 numbers rounded to bfloat16 (`element` 2) or float16 (3), ties to even; None: one of them is NaN.

    plain  without vectors, as on any processor
    """

class Feed:
    """Says which rows of a write have their bytes already, and which are captured: these may share memory. Any thread.

    length  of each row
    """

    def __init__(self, length: NDArray[np.uint64]) -> None: ...
    def offer(self, rows: int) -> None:
        """Rows before that number have their bytes; never fewer than before. Returns at once."""
    def await_captured(self, rows: int, timeout_s: float) -> int:
        """Wait until more than so many of the first rows are captured, at most for that time. Returns how many are."""
    @property
    def ended(self) -> bool:
        """Whether the write has ended early: its receipt says why."""

class WriteExtents:
    """Columns of equal length n; row i puts `length[i]` bytes at `offset[i]` of file `file[i]`.

    Rows are sorted by file and offset, and disjoint. Every byte of the range
    [0, size) of a file that no row covers is left as it is if it lies in a 4 KiB block that
    no row touches (but see `gap_bytes` of Engine.write), and is written as zero otherwise.
    `size` is the file's planned size, a multiple of 4096.
    layout[i] is an index into `layouts`, or -1 when the source is contiguous.
    chunk[i] is the index in the job's digests of the row's first chunk; the row fills
    ceil(length / CHUNK_BYTES) of them. A row of length 0 has no chunk.
    lazy[i]: the row may be captured after the caller has gone on (None: no row may). Such a row is watched for changes
    until it is captured: from `watch` on, or else from the start of the job.
    device[i]: index into `devices`, whose memory `address[i]` is in, or -1 for the host's (None: all are).
    seed[i]: by it the lines of a lazy row lie where they do (None: 0).
    samples: for each device, LINE_BYTES at each of the `line_begins` of its lazy rows, in the order of the rows;
    there before the device's first copy is made, and kept by the caller until all is captured.
    digested: for each device, those of its lazy rows' chunks, in that order, in the place of samples; or None: there
    are samples. Kept as samples are. Empty: None for each.
    derived: how each of an encoder's rows may follow from another one (0: it does not, 1: it has the same bytes, 2
    and 3: it is what the other one's float32 numbers are rounded to as bfloat16 and float16), and the first chunk of
    that one, which is as long, or twice as long, and captured no later. None: no row does.
    gathered[i]: the device puts the row's bytes at `address[i]` in host memory (Device.gather), before its first copy
    is over; such a row is not lazy. None: none does.
    feed: rows have their bytes once it says so; such rows are on the host, not lazy, and for no encoder. None: at once.
    """

    def __init__(
        self, *, file: NDArray[np.uint32], offset: NDArray[np.uint64], length: NDArray[np.uint64],
        address: NDArray[np.uint64], chunk: NDArray[np.uint64], layout: NDArray[np.int64],
        layouts: Sequence[GatherLayout], chunks: int, lazy: NDArray[np.bool_] | None = None,
        device: NDArray[np.int32] | None = None, devices: Sequence[Device] = (),
        samples: Sequence[NDArray[np.uint8]] = (), seed: NDArray[np.uint64] | None = None,
        derived: tuple[NDArray[np.uint8], NDArray[np.uint64]] | None = None, feed: Feed | None = None,
        gathered: NDArray[np.bool_] | None = None, digested: Sequence[Digested | None] = (),
    ) -> None: ...
    def encode(self, encoder: Encoder, encoded_from: int) -> None:
        """Have chunks of files from number `encoded_from` on encoded by jobs that are started later; else they are
        stored as they are. Unless the encoder is the identity, chunks lie where WriteJob.stored says, and a row of
        NO_DIGEST must fill the first blocks of its file.
        """
    def watch(self, how: Literal["auto", "digests", "exact", "samples"]) -> None:
        """Watch lazy rows from now on, as `how` says (see Engine.write), until the next job that writes these rows has
        captured them, or the rows are let go. Blocks while a few lines of every chunk are read that is not watched
        exactly.
        """
    def changed_rows(self) -> list[int]:
        """Of the rows that are watched exactly, those that were written since `watch`, or are gone; ascending. They
        stay watched. Any thread. ValueError if no row is watched, or a job has begun that watches them.
        """
    def unwatch(self) -> None:
        """Watch them no more, unless a job has begun that does."""
    def sample_digests(self) -> NDArray[np.uint64]:
        """For each row a digest of a few lines of it, as they are now (of a device's: as `samples` has them).

        Rows of equal bytes and seeds have equal digests, wherever they lie. All rows are to be lazy.
        """
    def copy(self, row: int, begin: int, end: int, target: int) -> int:
        """Copy bytes [begin, end) of a row on the host to the address `target`. 0, or errno: EFAULT: it is gone."""

class ReadExtents:
    """Columns of equal length n; row i wants chunks first[i]..last[i] (half open) of one stored extent.

    offset, length  the whole extent in file `file[i]`
    chunk           index in `digests` of the extent's chunk 0
    address         where the extent's byte 0 belongs (layout -1: contiguous memory),
                    or the box's first element (layout >= 0), or VERIFY_ONLY
    device          index into `devices`, whose memory the address is in; such rows have layout -1
    stored          file, offset, length and codec of each chunk that `digests` has; None: every chunk lies as it is, at
                    its logical place in its extent. Of codec 4 the offset is the index of the first chunk that it
                    is rounded from, and the length 2 or 3: to bfloat16, float16
    bases           what chunks with codec 2 are decoded with: their index in `digests`, ascending, the digest of the
                    data that results; file, offset, length, codec and digest of the stored bytes of the base
    Rows may be in any order; the engine sorts and merges them.
    """

    def __init__(
        self, *, file: NDArray[np.uint32], offset: NDArray[np.uint64], length: NDArray[np.uint64],
        address: NDArray[np.uint64], chunk: NDArray[np.uint64], first: NDArray[np.uint64],
        last: NDArray[np.uint64], layout: NDArray[np.int64], layouts: Sequence[ScatterLayout],
        digests: NDArray[np.uint64], device: NDArray[np.int32] | None = None, devices: Sequence[Device] = (),
        stored: tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]] | None = None,
        bases: tuple[
            NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint32],
            NDArray[np.uint8], NDArray[np.uint64],
        ] | None = None,
    ) -> None: ...
    @property
    def file_groups(self) -> list[list[int]]:
        """The numbers of the files that rows are in; together those that one chunk is computed from. Both ascend."""

SpanColumns: TypeAlias = tuple[
    NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint32]
]
"""What a job's threads did, by window: position in PHASES, begin and end (ns of the monotonic clock), bytes, thread."""

class WriteJob:
    """Bytes on their way to files. Keep every source alive and unchanged until captured.

    What is not lazy is captured first, at once. The rest follows within the limits of Engine.write,
    until something waits for it and calls `expedite`. A lazy source that changed before it was captured is
    the fault "capture".
    """

    def files_ready(self) -> None:
        """What has been captured may be written. Returns at once."""

    def wait_early(self, timeout_s: float) -> bool:
        """Whether no source that is not lazy will be read any more; those on devices: is queued."""
    def wait_queued(self, timeout_s: float) -> bool:
        """Whether no source on the host will be read any more, and all those on devices are queued."""
    def expedite(self) -> None:
        """From now on capture as fast as memory and device allow. Returns at once."""
    def wait_captured(self, timeout_s: float) -> bool:
        """Whether no source will be read any more (also true once the job failed or was cancelled)."""
    def wait(self, timeout_s: float) -> bool:
        """Whether every write has completed, or the job failed. Not yet durable: the caller syncs."""
    def cancel(self) -> None:
        """Start nothing new; `wait` returns once what is in flight has landed."""
    @property
    def done_bytes(self) -> int: ...  # of file ranges written so far
    @property
    def fault(self) -> Fault | None: ...  # after wait: the first failure
    @property
    def cancelled(self) -> bool: ...
    @property
    def digests(self) -> NDArray[np.uint64]: ...  # after wait without fault; of what is stored
    @property
    def stored(
        self,
    ) -> tuple[
        NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8], NDArray[np.bool_], NDArray[np.uint64],
        NDArray[np.bool_],
    ] | None:
        """After wait without fault, for each chunk: its offset in its file, its length there, its codec, whether
        nothing is stored, as it is the base's, the digest of what an encoder got, and whether nothing is stored, as it
        follows from other chunks. None: all chunks are stored as they are, where they were planned.
        """
    @property
    def windows(self) -> list[tuple[int, int, int]]:
        """File, begin and end of each window, in the order in which they begin."""
    @property
    def file_ends(self) -> list[int]: ...  # with `stored`: how long each file is; else empty
    @property
    def copied_bytes(self) -> int: ...  # source bytes that went through the arena
    @property
    def requests(self) -> int: ...
    @property
    def spans(self) -> SpanColumns: ...  # after wait
    def first_bad(self, file: int, fd: int) -> int | None:
        """After wait without fault: where the first chunk begins that the open file does not have as it was to be in
        file number `file`. Blocks.
        """
    @property
    def exact_bytes(self) -> int: ...  # of lazy rows of which all bytes are watched until they are captured
    @property
    def huge_bytes(self) -> int: ...  # of these, in huge pages when the watch began; or a few less
    @property
    def sampled_bytes(self) -> int: ...  # of the others
    @property
    def sampled_first(self) -> tuple[int, str] | None: ...  # a lazy row that is sampled, and why

class ReadJob:
    """Bytes on their way into memory. Keep every target alive until `wait` returns True."""

    def aim(self, rows: ReadExtents) -> None:
        """Give a job that reads ahead its targets: the same rows, with addresses and layouts. They change from now on.
        """
    def wait(self, timeout_s: float) -> bool: ...
    def cancel(self) -> None: ...
    @property
    def done_bytes(self) -> int: ...
    @property
    def fault(self) -> Fault | None: ...
    @property
    def cancelled(self) -> bool: ...
    @property
    def bad_chunks(self) -> NDArray[np.uint64]: ...  # positions in ReadExtents' digests, ascending; those found so far
    @property
    def touched(self) -> NDArray[np.bool_]: ...  # per row: some byte of the target has been written
    @property
    def copied_bytes(self) -> int: ...
    @property
    def direct_bytes(self) -> int: ...
    @property
    def requested_bytes(self) -> int: ...  # asked of the files, alignment included
    @property
    def requests(self) -> int: ...
    @property
    def spans(self) -> SpanColumns: ...  # after wait

class Engine:
    """One queue to the device and a few worker threads for copies and digests.

    backend        io_uring, or POSIX threads; both obey one contract and write the same bytes. "caller": requests wait
                   until a thread of the caller takes them; the `fd` of a File is any number that the caller chooses
    queue_depth    requests in flight, at most
    request_bytes  the window: the longest run of a file moved by one request (a multiple of 4096)
    workers        threads that copy and digest
    background     all its threads give way to others: niceness 5 more, lowest best-effort I/O priority
    paths          for backend "paths": engines whose queues move the bytes, each those of the files of one path
    """

    def __init__(
        self, *, backend: Literal["io_uring", "posix", "caller", "paths"], queue_depth: int, request_bytes: int,
        workers: int, background: bool = False, paths: Sequence[Engine] = (),
    ) -> None:
        """Raises OSError when the backend cannot start."""
    @property
    def backend(self) -> str: ...
    def write(
        self, arena: Arena, files: Sequence[tuple[File, int]], rows: WriteExtents, *, gap_bytes: int = 0,
        blocks: int | None = None, bytes_per_s: int = 0, cap_bytes_per_s: int = 0,
        watch: Literal["auto", "digests", "exact", "samples"] = "samples", files_ready: bool = True,
    ) -> WriteJob:
        """Start writing; `files` are (file, size in bytes). Returns at once.

        The file is taken in windows of `request_bytes`. A window whose turn has come is
        copied into an arena block (and so captured), and waits until one is free.

        gap_bytes  runs of untouched 4 KiB blocks between two rows, up to this long, are written
                   as zero, so that one request goes on across them; 0 leaves every such block
                   as it is, at the cost of one request per touched run. Blocks before a file's
                   first row and after its last are never written. Only for a file whose rows
                   are all in this job, or that no other job writes in between.
        blocks     how many arena blocks lazy rows may hold at once before `expedite`, at least one; None: any number
        bytes_per_s  how fast lazy rows may begin before `expedite`; 0: as fast as they can
        cap_bytes_per_s  limit of the rate at which any window begins, in any case; 0: no limit
        watch      which lazy rows on the host are watched exactly: those that the system can watch ("auto" and
                   "digests"; "exact" also tries again what was refused before), or none ("samples"). Of others a few
                   lines of every chunk are read, and compared with what is captured. Without meaning for rows that are
                   watched already
        files_ready  False: nothing is written before the job's `files_ready`, and what is captured meanwhile stays in
                   the arena. A job that is never told so ends by `cancel`
        """
    def read(
        self, arena: Arena, files: Sequence[File | None], rows: ReadExtents, *,
        stop_at_bad: bool = True, in_place: bool = True, request_bytes: int = 0, ahead: bool = False,
        lent: bool = False,
    ) -> ReadJob:
        """Start reading and checking. Returns at once. Rows of files that are None are left out;
        those of a file that is open whose chunks are decoded with bytes of one that is None are a fault.

        stop_at_bad    a chunk whose digest differs stops the job; else it goes on and reports all that do
        in_place       read straight into targets at the phase of the file; else all goes through the arena
        request_bytes  the longest window; 0 for the engine's. An arena block holds one
        ahead          the targets are not known yet: as much as the arena holds is read, and waits for `aim`
        lent           of backend "caller": requests have no memory (address 0) where that is possible; `complete` is
                       given the bytes, which are verified and stored before it returns
        """
    def take(
        self, direction: Literal["read", "write"], files: tuple[int, int], count: int, timeout_s: float,
        since: int | None = None,
    ) -> list[tuple[int, int, int, int, int, int]]:
        """Of backend "caller": at most `count` requests of files with numbers in the half-open range `files`, in order
        of submission, for the caller to carry out: number, file, offset, address, length, and how many of the first
        bytes are needed. Blocks until there is one, or `wakes` is not `since` any more, for `timeout_s` at most.
        Requests of a job that stops are dropped.

        Each has to be completed; until then its memory is not used for anything else.
        """
    @property
    def wakes(self) -> int:
        """Of backend "caller": how often one of its jobs has stopped or finished. Read it before asking whether a job
        has, and give it to `take` afterwards: so no end is missed in between.
        """
    def complete(self, number: int, moved_bytes: int, error: int = 0, lent: int = 0) -> None:
        """How a request that was taken has ended: an errno, or so many bytes are there. Any thread.

        lent  of a request without memory: the address of the bytes, which stay there until this returns
        """
    def traffic(self, direction: Literal["read", "write"]) -> list[tuple[int, float]]:
        """Of backend "paths", as all below: for each path the bytes that it has moved, and for how many seconds any of
        its requests were under way.
        """
    def failed(self, file: File) -> Fault | None:
        """The fault of the first write into a file that may move, if writes into it wait for `move` or `refuse`."""
    def move(self, file: File, target: File) -> None:
        """What waits, and every later write into `file`, goes into `target`."""
    def refuse(self, file: File) -> None:
        """What waits fails, and no later write waits; nothing, once the file has been moved."""
    def forget(self, file: File) -> list[tuple[int, int]]:
        """The ranges, begin and end, that went into its target. Call it for each that may move, once its job has ended.
        """
    def close(self) -> None:
        """Wait for running jobs, stop the threads."""

def reserve_memory(fd: int, begin: int, end: int) -> None:
    """Have the system give a file in memory all pages of [begin, end), in huge pages if it allows that; it has at least
    that size then. What the file has stays. Raises OSError (ENOMEM, ENOSPC when memory is not there).
    """

def collapse_refusal() -> str:
    """Why `Collapse` does nothing here; "" if it does."""

class Collapse:
    """Collapses memory of this process into huge pages, on a thread of its own, of low priority: native/collapse.h. The
    memory may change, be watched and be freed meanwhile.
    """
    def __init__(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], *, share: float) -> None:
        """Begins. share: the part of one processor that it may use; above 0, at most 1. Dropping the object stops it,
        and waits for nothing.
        """
    def stop(self) -> None:
        """Go no further. Returns at once."""
    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, after at most so long. Only then are there the numbers below."""
    @property
    def wanted_bytes(self) -> int: ...  # of the memory; what is there twice counts once
    @property
    def huge_bytes(self) -> int: ...  # of these: in huge pages now. The others are not, for one of four reasons:
    @property
    def edge_bytes(self) -> int: ...  # share 2 MiB with too much other memory
    @property
    def scattered_bytes(self) -> int: ...  # with pages that are not in memory, or not only this process's
    @property
    def refused_bytes(self) -> int: ...  # the system refuses; `error` is the first reason
    @property
    def left_bytes(self) -> int: ...  # the pass ended before: by `stop`, or after many refusals
    @property
    def collapsed_bytes(self) -> int: ...  # of the huge pages that it has made
    @property
    def error(self) -> int: ...
    @property
    def processor_s(self) -> float: ...

def has_huge_pages_by_advice() -> bool:
    """Whether files in memory get huge pages where a mapping that asks for them is touched, and nowhere else."""

def reserve_file(fd: int, size_bytes: int) -> None:
    """Give the file its size, with blocks reserved where the file system can (fallocate), else sparse.

    Raises OSError (ENOSPC when the space is not there). Never writes data to emulate a reservation.
    """
