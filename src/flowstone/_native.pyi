"""The native core: bytes between memory and files, and their digests.

It gets addresses, lengths and file descriptors. Only TensorReader sees tensors, through DLPack. The core does not link
torch, and sets no policy. Every call is a batch, and every call that can block releases the interpreter lock. Failures
are returned as values (`Fault`), never raised; wrong arguments raise ValueError.
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
    """Why the system cannot report which pages of memory were written; "" if it can. Tried once in each process."""

def guarded_copy_refusal() -> str:
    """Why GuardedCopy cannot protect memory here; "" if it can."""

def is_byte_addressable(fd: int) -> bool:
    """Whether a file's pages are the storage itself: on a file system in memory, or with direct access (DAX)."""

def probe_direct(directory: str) -> int:
    """The alignment in bytes that O_DIRECT needs in `directory`; 0: it is refused.

    Opens, writes and reads back a real temporary file with real aligned buffers
    (the answer of statx(STATX_DIOALIGN) alone is not believed), then removes it.
    Raises OSError if the directory cannot be written.
    """

def run_requests(
    *, backend: Literal["io_uring", "posix", "sync"], direction: Literal["read", "write"], queue_depth: int,
    files: Sequence[File],
    columns: tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]],
    register: bool = False,
) -> Fault | None:
    """Move plain requests in the given order, at most `queue_depth` in flight; blocks until all are done.

    For studies of a device: no plan, no digests, no arena. One row is one request; on an O_DIRECT file
    every offset, address and length is a multiple of its alignment.

    columns   for each request: position of the file in `files`, offset in the file, address and length in bytes
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
        """Name the type of tensors like `tensor`; `type` None: DLPack does not distinguish it from another type.

        Returns whether the framework describes the tensor.
        """

    def read(self, tensors: list[Any]) -> Any:
        """Read the tensors; None if one of them cannot be described; otherwise a tuple of columns and lists.

        Addresses of the first elements, uint64; types, as named; shapes; positions of tensors of type None, and of
        tensors that are not contiguous; whether one is complex; the index of each tensor's device, int32, -1 for the
        host; the position of each device's first tensor.
        """

def xxh3_64(data: bytes | bytearray | memoryview | NDArray[np.uint8], /) -> int:
    """XXH3-64 with seed 0 of a contiguous buffer."""

def digest_memory(address: NDArray[np.uint64], length: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """XXH3-64 with seed 0 of each run of memory, which the caller keeps alive. `length`: in bytes.

    Releases the interpreter lock once for all runs. Raises ValueError for columns of another type, or of different
    lengths. Memory that was unmapped ends the process.
    """

class Fault:
    """Why a job failed: one system call on one range of one file."""

    # "write", "read", "end of file" (a file is shorter than its extents), "capture" (a lazy source had changed; offset
    # and length: its place in the file)
    operation: str
    errno: int  # 0 for "end of file" and "capture"
    path: str
    offset: int  # bytes
    length: int  # bytes

class Arena:
    """A bounded pool of aligned memory blocks, mapped once, touched once, and reused until it is closed.

    Only jobs use blocks. Memory is mapped at construction (address space only). A background thread touches as many
    pages as `grow` asks for, in huge pages if the system allows that; forked children do not inherit them.
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
    def free_bytes(self) -> int: ...  # touched, and not in use by a job
    def grow(self, total_bytes: int, *, when_idle: bool = False) -> None:
        """Grow the touched memory to `total_bytes` (never above the budget), in the background. Returns at once.

        when_idle  touch only while no job uses the arena, as touching slows a job down
        """
    def grow_at_once(self, total_bytes: int, *, threads: int) -> None:
        """Like `grow`, but touch with up to `threads` threads, as a caller waits. Returns at once."""
    def wait_grown(self, timeout_s: float) -> bool:
        """Wait until all requested memory is touched, and pinned if possible. Returns whether it is."""
    def use(self, device: Device) -> None:
        """Pin blocks for `device` before jobs use them, in slabs of up to 1 GiB; blocks that are touched already are
        pinned before this returns. Only the first device counts: its pinned memory is pinned for all devices of its
        kind.
        """
    def place(self, node: int) -> int:
        """Place pages that are touched from now on on NUMA node `node`, if it has room. Returns 0 or an errno."""
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def refusal(self) -> str: ...  # why some blocks are not pinned; "": pinning was not refused
    def close(self) -> None:
        """Stop the touching thread, and unmap the memory. ValueError while a job runs."""

class GuardedCopy:
    """A copy of memory that other threads may write at once: a write to a page that is not copied yet waits for its
    copy.

    source, length, target  for each row: source address, bytes, target address. Keep both allocated, and do not read
                            `target`, until `wait` returns True
    guard                   False: copy everything in the constructor

    The constructor itself copies rows that cannot be protected: memory shared with other processes or a file,
    overlapping rows, short rows; all rows if the system refuses (`guarded_copy_refusal`).
    """

    def __init__(
        self, *, source: NDArray[np.uint64], length: NDArray[np.uint64], target: NDArray[np.uint64], guard: bool = True
    ) -> None: ...
    def wait(self, timeout_s: float) -> bool:
        """Wait until all is copied. Returns whether it is."""
    @property
    def gone(self) -> int | None: ...  # after wait: the first row whose memory was unmapped meanwhile
    @property
    def guarded_bytes(self) -> int: ...

class Mapping:
    """The first `bytes` bytes of a file, mapped into this process until this object, and all Files that use it, are
    dropped.

    Forked children do not inherit it. The file must not become shorter meanwhile: that would end the process. Raises
    ValueError for 0 bytes, OSError.
    """

    def __init__(self, *, fd: int, bytes: int, writable: bool) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class File:
    """An open file for the engine. The caller owns the descriptor."""

    def __init__(
        self, *, fd: int, path: str, alignment: int, mapped: int = 0, mapping: Mapping | None = None, of_path: int = 0,
        may_move: bool = False,
    ) -> None:
        """alignment  > 1: the descriptor was opened with O_DIRECT and needs it; 1: buffered
        mapped     address of its first byte, if the caller has mapped all bytes that are read: then they are copied
                   from there. Keep it mapped meanwhile
        mapping    a Mapping for the same purpose, kept alive. If the file is written, its bytes are captured in the
                   mapping, without requests; bytes that no row covers become zero
        of_path    number of the path that moves its bytes, for an engine with several paths
        may_move   for such an engine: failed writes into it wait for `Engine.move` or `Engine.refuse`
        """
    @property
    def fd(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def alignment(self) -> int: ...

class GatherLayout:
    """The layout of a row's bytes in strided memory: in row-major order of `shape`, with strides in bytes."""

    def __init__(self, *, item_bytes: int, shape: Sequence[int], strides_bytes: Sequence[int]) -> None: ...
    @property
    def is_shallow(self) -> bool:
        """Whether devices can digest it in place: few dimensions are not adjacent in memory, as in nearly all real
        arrays.
        """

class ScatterLayout:
    """Which elements of a stored row-major extent go to which places in strided memory.

    extent_shape   the stored extent, row-major, items of `item_bytes`
    offset, shape  the requested box, in elements, inside extent_shape
    strides_bytes  strides of the target; the row's address is the address of the box's first element
    """

    def __init__(
        self, *, item_bytes: int, extent_shape: Sequence[int], offset: Sequence[int],
        shape: Sequence[int], strides_bytes: Sequence[int],
    ) -> None: ...

class Device:
    """A queue of copies between an accelerator's memory and the host's. The accelerator makes them in order.

    Streams of the caller are passed as handles. Errors of the device are OSError with EIO and the device's text.
    """

    def synchronize(self) -> None:
        """Wait until all copies that are queued now are done. Raises OSError if one failed."""
    def follow(self, stream: int) -> None:
        """Let copies queued from now on wait for the work that is in `stream` now. Raises OSError, also if it records a
        graph.
        """
    def lead(self, stream: int, *, early: bool = False) -> None:
        """Let work put into `stream` from now on wait for the copies that are queued now; `early`: only for copies of
        rows that are not lazy. Raises OSError like `follow`.
        """
    def gather(
        self, stream: int, *, address: NDArray[np.uint64], begin: NDArray[np.uint64], length: NDArray[np.uint32],
        layout: NDArray[np.int64], layouts: Sequence[GatherLayout],
    ) -> NDArray[np.uint8]:
        """Queue a gather in `stream`: copy bytes of rows of the device's memory, from `begin` on, into host memory,
        each run at the next multiple of GATHERED_ALIGNMENT_BYTES. They are there once a copy is done that was queued
        after a later `follow`. `layout[i]`: an index into `layouts`; -1: the row is one run. The host memory returns to
        the device's pool when the array is dropped. Takes no device memory. Raises OSError like `follow`.
        """
    @property
    def packs(self) -> bool:
        """Whether a kernel copies strided memory, instead of one copy per run: whether the driver accepted the kernel.
        """
    def digest(
        self, stream: int, address: NDArray[np.uint64], length: NDArray[np.uint64],
        layout: NDArray[np.int64] | None = None, layouts: Sequence[GatherLayout] = (),
    ) -> DeviceDigests | None:
        """Queue digests of the chunks of rows of the device's memory in `stream`; they are there when the bytes of a
        `gather` would be. None if the device cannot digest: its driver has refused the kernels, or pinned memory.
        Raises OSError like `follow`.

        layout  for each row an index into `layouts`, which are shallow; -1: the row is one run; None: all are
        """
    def reserve_launches(
        self, *, runs: int, strided: int, bytes: int, chunks: int, strided_chunks: int, short_chunks: int, times: int
    ) -> None:
        """Allocate host memory for `times` concurrent launches: of a gather of this many runs (`strided` of strided
        memory) and bytes, and of digests of this many chunks, some of strided memory, some of DIGESTED_BY_HOST_MAX
        bytes or less. If some runs are strided, also for the tables of windows.
        """
    @property
    def pci_address(self) -> str: ...  # its name in /sys/bus/pci/devices; "" if unknown
    def is_recording(self, stream: int) -> bool:
        """Whether `stream` records a graph: work put into it becomes part of the graph instead of being executed."""

class DeviceDigests:
    """Digests that a device computes of the chunks of rows, one row after the other."""

    def digests(self) -> NDArray[np.uint64]: ...

def cuda_device(*, ordinal: int, name: str) -> Device:
    """A queue of copies on a separate CUDA stream of GPU number `ordinal`. Raises OSError if there is no driver."""

GATHERED_ALIGNMENT_BYTES: int
DIGESTED_BY_HOST_MAX: int
"""Chunks up to this length are gathered and digested by the host: XXH3 has another rule for them."""
GATHER_PTX: str
PACK_PTX: str
DIGEST_PTX: str
STRIDED_DIGEST_PTX: str
"""The kernels, in PTX."""

def pack_table(layout: GatherLayout, *, address: int, begin: int, bytes: int, target: int) -> bytes:
    """The table with which the kernel PACK_PTX writes packed bytes of a layout at `address` to offset `target` of its
    output.
    """

def digest_table(layout: GatherLayout, *, address: int, begin: int, bytes: int, target: int) -> bytes:
    """The table row with which the kernel STRIDED_DIGEST_PTX digests packed bytes of a shallow layout at `address`; the
    digest goes to offset `target` of its output.
    """

LINE_BYTES: int
"""Length of a line: a sample of a lazy row."""
LINES_PER_CHUNK: int

def line_begins(row_bytes: NDArray[np.uint64], seed: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Where the samples of rows begin, one row after the other: LINES_PER_CHUNK for each chunk of a row.

    Each is LINE_BYTES long; the row's seed determines its place in its part of the chunk. Samples of a shorter row
    cover the full row.
    """

class Encoder:
    """How chunks are encoded between their capture and the file (native/codec/encoder.h)."""

def identity_encoder() -> Encoder:
    """The encoder that stores chunks unchanged, in their planned places."""

def delta_encoder(
    digests: NDArray[np.uint64], known: NDArray[np.bool_], codecs: NDArray[np.uint8] | None = None
) -> Encoder:
    """The encoder that leaves out chunks that equal the base's, and stores other chunks unchanged.

    digests, known  by a chunk's number in the job: the digest of the base's chunk, and whether there is one
    codecs          codec of the base's chunk if the digest is that of its stored bytes; 0: the digest is that of its
                    data. None: all are 0
    """

def planes_encoder(
    widths: NDArray[np.uint8], digests: NDArray[np.uint64], known: NDArray[np.bool_],
    codecs: NDArray[np.uint8] | None = None,
    near: tuple[BaseCache, NDArray[np.uint64], NDArray[np.bool_]] | None = None,
) -> Encoder:
    """Like delta_encoder, but chunks are also encoded by byte planes if that makes them shorter (docs/FORMAT.md,
    Codecs).

    widths  length of a chunk's elements in bytes: 1, 2, 4, 8; 0: the chunk is stored unchanged
    near    the cache of earlier contents of chunks; for each chunk the digest of the base that it may have, and whether
            it may have one. Chunks stored without a base are added to the cache
    """

class BaseCache:
    """Earlier contents of chunks, by the chunk's number, in at most `budget_bytes` of host memory. Can be used on any
    thread.
    """

    def __init__(self, chunks: int, *, budget_bytes: int) -> None: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def release(self) -> None:
        """Free the memory, and cache nothing from now on, as another cache uses the budget."""
    @property
    def digests(self) -> NDArray[np.uint64]:
        """For each chunk the digest of its cached bytes; 0: none are cached."""

def encode_planes(chunk: bytes | bytearray | memoryview | NDArray[np.uint8], width: int) -> bytes | None:
    """A chunk with elements of `width` bytes as codec `planes` stores it; None: it would be stored raw."""

def quantizing_encoder(
    elements: NDArray[np.uint8], blocks: NDArray[np.uint16], widths: NDArray[np.uint8],
    digests: NDArray[np.uint64], known: NDArray[np.bool_], codecs: NDArray[np.uint8] | None = None,
    near: tuple[BaseCache, NDArray[np.uint64], NDArray[np.bool_]] | None = None,
) -> Encoder:
    """Like planes_encoder, but chunks are also quantized, with a loss of precision, if the error bound holds.

    elements  0: float32, 1: bfloat16, 2: float16
    blocks    elements that share a scale, 16 to 4096; 0: the chunk is not quantized
    """

def decode_chunk(
    codec: int, stored: bytes | bytearray | memoryview | NDArray[np.uint8], data_bytes: int
) -> bytes | None:
    """Decode a stored chunk of `data_bytes`; None: no encoder writes such bytes."""

def cast_numbers(
    singles: bytes | bytearray | memoryview | NDArray[np.uint8], element: int, plain: bool = False
) -> bytes | None:
    """Round float32 numbers to bfloat16 (`element` 2) or float16 (3), ties to even; None: one of them is NaN.

    plain  use no vector instructions, as on any processor
    """

class SourceSupply:
    """Sources that become available one after the other while a job writes them. Can be used on any thread.

    The caller offers rows in order, and may reuse the memory of a row once it is captured.

    length  length of each row in bytes
    """

    def __init__(self, length: NDArray[np.uint64]) -> None: ...
    def offer(self, rows: int) -> None:
        """The first `rows` rows have their bytes; the number never decreases. Returns at once."""
    def await_captured(self, rows: int, timeout_s: float) -> int:
        """Wait, at most `timeout_s`, until more than `rows` of the first rows are captured. Returns how many are."""
    @property
    def ended(self) -> bool:
        """Whether the write has ended early, for a reason in its receipt."""

class WriteExtents:
    """Columns of equal length n; row i puts `length[i]` bytes at `offset[i]` of file `file[i]`.

    Rows are sorted by file and offset, and disjoint. Every byte of the range
    [0, size) of a file that no row covers is left as it is if it lies in a 4 KiB block that
    no row touches (but see `gap_bytes` of WriteOptions), and is written as zero otherwise.
    `size` is the file's planned size, a multiple of 4096.
    layout[i] is an index into `layouts`, or -1 when the source is contiguous.
    chunk[i] is the index in the job's digests of the row's first chunk; the row fills
    ceil(length / CHUNK_BYTES) of them. A row of length 0 has no chunk.
    chunks is the number of the job's digests.

    Call methods that change the rows before a job gets them. Initially rows are on the host, not lazy, not derived, all
    available and not encoded.
    """

    def __init__(
        self, *, file: NDArray[np.uint32], offset: NDArray[np.uint64], length: NDArray[np.uint64],
        address: NDArray[np.uint64], chunk: NDArray[np.uint64], layout: NDArray[np.int64],
        layouts: Sequence[GatherLayout], chunks: int,
    ) -> None: ...
    def mark_lazy(self, lazy: NDArray[np.bool_], seed: NDArray[np.uint64] | None = None) -> None:
        """If `lazy[i]`, the row may be captured after the caller continues. It is watched for changes until it is
        captured: from `watch` on, or else from the start of the job.

        seed  for each row a number that determines the sampled lines. None: 0
        """
    def place_on_devices(
        self, device: NDArray[np.int32], devices: Sequence[Device], *, gathered: NDArray[np.bool_] | None = None,
        samples: Sequence[NDArray[np.uint8]] = (), digested: Sequence[DeviceDigests | None] = (),
    ) -> None:
        """Set which rows are in the memory of devices.

        device    for each row the index in `devices` of the device in whose memory its address is; -1: host memory
        gathered  for each row whether the device puts its bytes at its address in host memory (Device.gather), before
                  its first copy completes; such a row is not lazy. None: no row
        samples   for each device, LINE_BYTES at each of the `line_begins` of its lazy rows, in the order of the rows;
                  written before the device's first copy, and kept by the caller until everything is captured
        digested  for each device, the digests of its lazy rows' chunks, in the same order, instead of samples; None: it
                  has samples. The caller keeps them like samples. Empty: None for each
        """
    def mark_derived(self, derivation: NDArray[np.uint8], source_chunk: NDArray[np.uint64]) -> None:
        """Set which rows of an encoder may be derived from another row.

        derivation    for each row: 0: not derived, 1: the same bytes as the other row, 2 and 3: the other row's float32
                      numbers, rounded to bfloat16 and float16
        source_chunk  for each row: the first chunk of the other row, which is as long (1) or twice as long (2, 3), and
                      captured no later
        """
    def attach_supply(self, supply: SourceSupply) -> None:
        """Let rows get their bytes once `supply` offers them. They are on the host, not lazy, and not encoded."""
    def encode(self, encoder: Encoder, encoded_from: int) -> None:
        """Let later jobs encode chunks of files from number `encoded_from` on. Unless the encoder is the identity,
        WriteJob.stored has the places of chunks, and a row of NO_DIGEST must fill the first blocks of its file.
        """
    def watch(self, how: Literal["auto", "digests", "exact", "samples"]) -> None:
        """Watch lazy rows from now on (`how`: see WriteOptions), until the next job that writes these rows has captured
        them, or the rows are dropped. Blocks while a few lines of each chunk that is not watched exactly are read.
        """
    def changed_rows(self) -> list[int]:
        """The exactly watched rows that were written since `watch`, or whose memory was freed; ascending. They stay
        watched. Can be called on any thread. ValueError if no row is watched, or a job has taken over the watch.
        """
    def unwatch(self) -> None:
        """End the watch, unless a job has taken it over."""
    def sample_digests(self) -> NDArray[np.uint64]:
        """For each row a digest of a few of its lines, as they are now (on a device: as in `samples`).

        Rows with equal bytes and seeds have equal digests, on any device. All rows must be lazy.
        """
    def copy(self, row: int, begin: int, end: int, target: int) -> int:
        """Copy bytes [begin, end) of a row on the host to address `target`. Returns 0 or an errno; EFAULT: the memory
        was freed.
        """

class ReadExtents:
    """Columns of equal length n; row i requests chunks first[i]..last[i] (half open) of one stored extent.

    offset, length  the full extent in file `file[i]`
    chunk           index in `digests` of the extent's chunk 0
    Rows may be in any order; the engine sorts and merges them. Until `aim`, they are only verified. Methods that change
    the rows are called before a job has them.
    """

    def __init__(
        self, *, file: NDArray[np.uint32], offset: NDArray[np.uint64], length: NDArray[np.uint64],
        chunk: NDArray[np.uint64], first: NDArray[np.uint64], last: NDArray[np.uint64], digests: NDArray[np.uint64],
    ) -> None: ...
    def aim(
        self, address: NDArray[np.uint64], layout: NDArray[np.int64], layouts: Sequence[ScatterLayout]
    ) -> None:
        """Set the targets of the bytes.

        address  for each row: address of the extent's byte 0 (layout -1: contiguous memory), or of the box's first
                 element (layout >= 0), or VERIFY_ONLY
        layout   for each row: index into `layouts`, or -1
        """
    def place_on_devices(self, device: NDArray[np.int32], devices: Sequence[Device]) -> None:
        """`device`: for each row the index in `devices` of the device in whose memory its address is; -1: host memory.
        """
    def locate_chunks(
        self,
        stored: tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]] | None,
        bases: tuple[
            NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint32],
            NDArray[np.uint8], NDArray[np.uint64],
        ] | None,
    ) -> None:
        """Set the places of chunks that are not at their logical offsets.

        stored  file, offset, length and codec of each chunk of `digests`; None: every chunk is raw, at its logical
                offset in its extent. With codec 4 the offset is the index of the first chunk from which it is rounded,
                and the length is 2 (to bfloat16) or 3 (float16)
        bases   the bases of chunks with codec 2: index of the chunk in `digests`, ascending; digest of the decoded
                data; file, offset, length, codec and digest of the base's stored bytes. None: no chunk has a base
        """
    @property
    def file_groups(self) -> list[list[int]]:
        """The numbers of the rows' files, in groups: files with parts of one chunk are in one group. Both ascend."""

SpanColumns: TypeAlias = tuple[
    NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint32]
]
"""Spans of a job's threads, as columns: index into PHASES, begin and end (ns of the monotonic clock), bytes, thread."""

class WriteJob:
    """Bytes on their way to files. Keep every source alive and unchanged until captured.

    Rows that are not lazy are captured first, as fast as possible. Lazy rows follow within the limits of the
    WriteOptions, until a thread waits for them and calls `expedite`. A lazy source that changed before its capture is
    the fault "capture".
    """

    def files_ready(self) -> None:
        """Captured bytes may be written from now on. Returns at once."""

    def wait_early(self, timeout_s: float) -> bool:
        """Wait until no source that is not lazy will be read any more, and copies from devices are queued. Whether that
        is so.
        """
    def wait_queued(self, timeout_s: float) -> bool:
        """Wait until no source on the host will be read any more, and all copies from devices are queued. Whether that
        is so.
        """
    def expedite(self) -> None:
        """Capture as fast as memory and device allow from now on. Returns at once."""
    def wait_captured(self, timeout_s: float) -> bool:
        """Wait until no source will be read any more (also true once the job failed or was cancelled). Whether that is
        so.
        """
    def wait(self, timeout_s: float) -> bool:
        """Wait until every write has completed, or the job failed. Whether that is so. The caller syncs the files."""
    def cancel(self) -> None:
        """Start no new requests; `wait` returns once the requests in flight are done."""
    @property
    def done_bytes(self) -> int: ...  # length of the file ranges written so far
    @property
    def fault(self) -> Fault | None: ...  # after wait: the first failure
    @property
    def cancelled(self) -> bool: ...
    @property
    def digests(self) -> NDArray[np.uint64]: ...  # after wait without fault; of the stored bytes
    @property
    def stored(
        self,
    ) -> tuple[
        NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8], NDArray[np.bool_], NDArray[np.uint64],
        NDArray[np.bool_],
    ] | None:
        """After wait without fault, for each chunk: its offset in its file, its stored length, its codec, whether it is
        the base's, the digest of the encoder's input, and whether it is derived from other chunks. Chunks of the base
        and derived chunks are not stored. None: all chunks are raw, in their planned places.
        """
    @property
    def windows(self) -> list[tuple[int, int, int]]:
        """File, begin and end of each window, in the order in which they begin."""
    @property
    def file_ends(self) -> list[int]: ...  # with `stored`: length of each file; otherwise empty
    @property
    def copied_bytes(self) -> int: ...  # source bytes that went through the arena
    @property
    def requests(self) -> int: ...
    @property
    def spans(self) -> SpanColumns: ...  # after wait
    def first_bad(self, file: int, fd: int) -> int | None:
        """After wait without fault: compare the open file `fd` with the chunks of file number `file`. Returns the
        offset of the first chunk that differs. Blocks.
        """
    @property
    def exact_bytes(self) -> int: ...  # of lazy rows that are watched exactly until they are captured
    @property
    def huge_bytes(self) -> int: ...  # part of exact_bytes in huge pages when the watch began; may be slightly too low
    @property
    def sampled_bytes(self) -> int: ...  # of other lazy rows, which are sampled
    @property
    def sampled_first(self) -> tuple[int, str] | None: ...  # the first sampled row, and why it is sampled

class ReadJob:
    """Bytes on their way into memory. Keep every target alive until `wait` returns True."""

    def aim(self, rows: ReadExtents) -> None:
        """Set the targets of a job that reads ahead: the same rows, with addresses and layouts. Targets change from now
        on.
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
    def bad_chunks(self) -> NDArray[np.uint64]: ...  # indexes into ReadExtents' digests of bad chunks so far, ascending
    @property
    def touched(self) -> NDArray[np.bool_]: ...  # per row: whether a byte of the target was written
    @property
    def copied_bytes(self) -> int: ...
    @property
    def direct_bytes(self) -> int: ...
    @property
    def requested_bytes(self) -> int: ...  # length of all requests, alignment included
    @property
    def requests(self) -> int: ...
    @property
    def spans(self) -> SpanColumns: ...  # after wait

class WriteOptions:
    """How Engine.write writes.

    gap_bytes  runs of untouched 4 KiB blocks between two rows, up to this length, are written as zero, so that one
               request covers both rows; 0: such blocks are not written, at the cost of one request per touched run.
               Blocks before a file's first row and after its last are never written. Only for a file whose rows are all
               in this job, or that no other job writes in between.
    blocks     how many arena blocks lazy rows may hold at once before `expedite`, at least one; None: any number
    bytes_per_s  limit of the rate at which lazy rows begin before `expedite`; 0: no limit
    cap_bytes_per_s  limit of the rate at which any window begins, in any case; 0: no limit
    watch      which lazy rows on the host are watched exactly: all that the system can watch ("auto" and "digests";
               "exact" also retries refused ones), or none ("samples"). Of other rows a few lines of every chunk are
               read, and compared with the captured bytes. Ignored for rows that are watched already
    files_ready  False: nothing is written before the job's `files_ready`; captured bytes stay in the arena until then.
                 Without that call, the job only ends by `cancel`
    """

    def __init__(
        self, *, gap_bytes: int = 0, blocks: int | None = None, bytes_per_s: int = 0, cap_bytes_per_s: int = 0,
        watch: Literal["auto", "digests", "exact", "samples"] = "samples", files_ready: bool = True,
    ) -> None: ...

class ReadOptions:
    """How Engine.read reads.

    stop_at_bad    a digest mismatch stops the job; False: it continues and reports all bad chunks
    in_place       read directly into targets with the file's alignment; False: all bytes pass through the arena
    request_bytes  the longest window, which an arena block must hold; 0: the engine's
    ahead          the targets are not known yet: bytes are read until the arena is full, and wait for `aim`
    lent           for backend "caller": requests have no memory (address 0) if possible; the caller passes the bytes to
                   `complete`, which verifies and stores them before it returns
    """

    def __init__(
        self, *, stop_at_bad: bool = True, in_place: bool = True, request_bytes: int = 0, ahead: bool = False,
        lent: bool = False,
    ) -> None: ...

class Engine:
    """One queue to the device and a few worker threads for copies and digests.

    backend        io_uring or POSIX threads, with the same contract and the same bytes. "caller": requests wait until a
                   thread of the caller takes them; the `fd` of a File is any number of the caller. "paths": see `paths`
    queue_depth    requests in flight, at most
    request_bytes  the window: the longest run of a file moved by one request (a multiple of 4096)
    workers        threads that copy and digest
    background     lower the priority of all its threads: nice value 5 higher, lowest best-effort I/O priority
    paths          for backend "paths": an engine for each path, whose queue moves the bytes of that path's files
    """

    def __init__(
        self, *, backend: Literal["io_uring", "posix", "caller", "paths"], queue_depth: int, request_bytes: int,
        workers: int, background: bool = False, paths: Sequence[Engine] = (),
    ) -> None:
        """Raises OSError when the backend cannot start."""
    @property
    def backend(self) -> str: ...
    def write(
        self, arena: Arena, files: Sequence[tuple[File, int]], rows: WriteExtents,
        options: WriteOptions | None = None,
    ) -> WriteJob:
        """Start writing; `files` are (file, size in bytes). Returns at once.

        Files are divided into windows of `request_bytes`. A window waits for a free arena block, and is captured by
        copying it there.
        """
    def read(
        self, arena: Arena, files: Sequence[File | None], rows: ReadExtents, options: ReadOptions | None = None
    ) -> ReadJob:
        """Start reading and verifying. Returns at once. Rows of files that are None are left out. It is a fault if a
        chunk of an open file needs a base in a file that is None.
        """
    def take(
        self, direction: Literal["read", "write"], files: tuple[int, int], count: int, timeout_s: float,
        since: int | None = None,
    ) -> list[tuple[int, int, int, int, int, int]]:
        """For backend "caller": take at most `count` requests of files with numbers in the half-open range `files`, in
        order of submission, which the caller then carries out: number, file, offset, address, length, and how many of
        the first bytes are needed. Blocks, at most `timeout_s`, until there is one, or `wakes` differs from `since`.
        Requests of a job that stops are dropped.

        Call `complete` for each. Until then its memory is reserved for it.
        """
    @property
    def wakes(self) -> int:
        """For backend "caller": how often one of its jobs has stopped or finished. Read it before checking whether a
        job has ended, and pass it to `take` afterwards, so that no end is missed in between.
        """
    def complete(self, number: int, moved_bytes: int, error: int = 0, lent: int = 0) -> None:
        """Report the end of a taken request: an errno, or how many bytes were moved. Can be called on any thread.

        lent  for a request without memory: the address of the bytes, which must stay there until this returns
        """
    def traffic(self, direction: Literal["read", "write"]) -> list[tuple[int, float]]:
        """For backend "paths", like all methods below: for each path the bytes moved, and the seconds in which it had
        requests in flight.
        """
    def failed(self, file: File) -> Fault | None:
        """The fault of the first failed write into a file that may move, if writes into it wait for `move` or `refuse`.
        """
    def move(self, file: File, target: File) -> None:
        """Send waiting writes, and every later write into `file`, into `target`."""
    def refuse(self, file: File) -> None:
        """Let waiting writes fail, and later writes no longer wait. Does nothing once the file has been moved."""
    def forget(self, file: File) -> list[tuple[int, int]]:
        """The ranges, begin and end, that were written into the target. Call it for each file that may move, once its
        job has ended.
        """
    def close(self) -> None:
        """Wait for running jobs, and stop the threads."""

def reserve_memory(fd: int, begin: int, end: int) -> None:
    """Allocate all pages of [begin, end) of a file in memory, in huge pages if the system allows that; a shorter file
    is extended to `end`. Its content stays. Raises OSError (ENOMEM, ENOSPC if memory is short).
    """

def collapse_refusal() -> str:
    """Why `Collapse` cannot work here; "" if it can."""

class Collapse:
    """Collapses memory of this process into huge pages, on a separate thread of low priority (native/watch/collapse.h).
    The memory may change, be watched and be freed meanwhile.
    """
    def __init__(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], *, share: float) -> None:
        """Begin. `share`: the part of one processor that it may use; above 0, at most 1. Dropping the object stops the
        pass without a wait.
        """
    def stop(self) -> None:
        """Stop the pass. Returns at once."""
    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the pass. Returns whether it has ended. The numbers below are only valid then."""
    @property
    def wanted_bytes(self) -> int: ...  # length of the memory; repeated parts count once
    @property
    def huge_bytes(self) -> int: ...  # in huge pages now. Other bytes are not, for one of four reasons:
    @property
    def edge_bytes(self) -> int: ...  # they share 2 MiB with too much other memory
    @property
    def scattered_bytes(self) -> int: ...  # some pages are not in memory, or shared with other processes
    @property
    def refused_bytes(self) -> int: ...  # the system refuses; `error` is the first reason
    @property
    def left_bytes(self) -> int: ...  # the pass ended before it reached them: by `stop`, or after many refusals
    @property
    def collapsed_bytes(self) -> int: ...  # length of the huge pages made by this pass
    @property
    def error(self) -> int: ...
    @property
    def processor_s(self) -> float: ...

def has_huge_pages_by_advice() -> bool:
    """Whether files in memory get huge pages only in mappings that ask for them."""

def reserve_file(fd: int, size_bytes: int) -> None:
    """Set the size of a file, with blocks reserved if the file system can do that (fallocate), otherwise sparse.

    Raises OSError (ENOSPC if space is short). Never writes data to emulate a reservation.
    """
