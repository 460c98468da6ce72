"""Capture: copies live memory into arena blocks, by a plan, while the engine writes them into segments.

**Windows.** The engine divides each segment file into windows of one request. To capture a window, the engine copies
its bytes into a free arena block; if no block is free, the engine waits for one. All threads of the engine and the
arena run at low processor and I/O priority.

**Files.** If another thread allocates the disk space of the segment files, the capture does not wait for it; captured
windows stay in the arena until the space is allocated.

**Early and lazy.** The plan says for each piece whether it is early or lazy. Early pieces are captured first, and
`save` returns when that is done. If the state has an optimizer, its parameters and optimizer state of 64 KiB or more
are lazy: the optimizer's next step waits until they are captured (`fence.py`). With `fence="manual"`, all pieces of
64 KiB or more are lazy.

**The fence** is the point at which the optimizer's step waits for lazy pieces. **The overlap budget** is the expected
time from `save` to the fence: the shortest of the last four such times. While no thread waits, lazy windows use no more
blocks than a full queue of requests needs, and their rate is chosen so that all are captured after
CAPTURE_SHARE_OF_OVERLAP of the overlap budget. Once a thread waits (at the fence, or in `captured`, `committed`,
`wait`, `load`, `close`, or the end of the script), the remaining windows are copied at the rate of memory while the
arena has room, then at the rate of the store. If an optimizer's step had to wait, the event `Fenced` is emitted, and
the arena grows before the next save. `write_bytes_per_s` always limits early and lazy bytes.

**Changes without a fence** are detected by tensors' version counters (`state/counters.py`), and by the engine
(`native/watch/mutation_detector.h`), in one of three ways:

- If the kernel reports written pages, every write is detected.
- Otherwise a few cache lines of every chunk of a lazy piece are compared with copies of them from the start of the
  save. On a device, the current stream gathers these lines.
- For contiguous memory of a device, digests of all its chunks can be compared with digests that the device computed at
  the start of the save.

A window is digested in its arena block, so the bytes in the file and the digest agree even if the tensor changes
meanwhile. If a change is detected, the save fails with `StateChangedError`, which names the tensors, and the previous
checkpoint stays the newest.

**Memory that is freed meanwhile** leads to the same error. A storage may free or move its memory at any time, so the
kernel copies the memory (`native/capture/live_memory.h`), and reports unmapped addresses. Once all is captured, a check
of each storage shows whether it still has the same memory (`moved_storage.py`).
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._native import NO_DIGEST, Arena, GatherLayout, WriteExtents, written_pages_refusal
from flowstone.config import BLOCK_BYTES, DIGESTED_ON_DEVICES, Watch
from flowstone.errors import StorageError, UnsupportedStateError
from flowstone.extensions import extension
from flowstone.format.digest import digest
from flowstone.format.segment import encode_chunks_header, encode_header
from flowstone.plan.write import SegmentPlan, WritePlan, data_offsets
from flowstone.stage.device import DeviceAccess, SideStream, side_stream
from flowstone.stage.encode import BaseChunks, encoder_of
from flowstone.store.base import FilePlan, Pace, Store, WriteHandle
from flowstone.table.pieces import Memory, Places

_Number = TypeVar("_Number", bound=np.generic)


class SegmentHeaders:
    """The headers of a plan's segment files, and their digests. They are encoded again only if offsets have changed."""

    def __init__(self) -> None:
        # One assignment sets all three values, so that after an interrupt all are set, or none.
        self._known: tuple[NDArray[np.uint64], tuple[bytes, ...], tuple[str, ...]] | None = None

    @property
    def is_known(self) -> bool:
        """Whether a save has used this plan already."""
        return self._known is not None

    def of(self, plan: WritePlan, offsets: NDArray[np.uint64]) -> tuple[tuple[bytes, ...], tuple[str, ...]]:
        if self._known is None or not np.array_equal(self._known[0], offsets):
            texts = tuple(_header(plan, segment, offsets) for segment in plan.segments)
            self._known = offsets, texts, tuple(map(digest, texts))
        return self._known[1:]


class WriteTarget(msgspec.Struct, frozen=True, eq=False):
    """Where segment files are written: into a directory of a store, through the blocks of an arena.

    base  the chunks of the earlier checkpoint to which the save may refer; None: it refers to no checkpoint
    """

    store: Store
    directory: str
    arena: Arena
    base: BaseChunks | None = None


class CaptureSources(msgspec.Struct, frozen=True, eq=False):
    """The memory that a capture reads, watched for changes.

    rows     table for the engine, in the order of the plan: ranges of memory, and where they are in the segment files
    offsets  file offset of each piece's bytes, in the order of the plan
    headers  the digest of each segment's header; unused for a segment whose chunks may be encoded or left out, as its
             size is not known yet
    places   the memory of the pieces
    memory   further memory that the engine reads. Keep `places` and `memory` alive until captured
    streams  side streams of the devices that hold pieces; each reads its device's memory later
    planned  whether an earlier save has used this plan
    """

    plan: WritePlan
    rows: WriteExtents
    offsets: NDArray[np.uint64]
    headers: tuple[str, ...]
    places: Places | None
    memory: tuple[object, ...]
    streams: tuple[SideStream, ...]
    planned: bool


def watch_sources(
    plan: WritePlan, places: Places, headers_known: SegmentHeaders, *, watch: Watch, seed: int
) -> CaptureSources:
    """Detect changes of the memory `places` of the plan's pieces from now on, for a capture that starts later.

    headers_known  headers of this plan that an earlier save has encoded
    watch          how changes before the capture are detected: see EngineOptions
    seed           a different number for each save, so that saves sample different lines

    The memory must not change from now on, see `start_capture`. Device memory is captured as it will be after the work
    that is in the current stream now. If no capture is started, the watch ends when the result is dropped.
    """
    seeds = _seeds(len(plan.length), seed)
    reach, lazy = _gathered(watch, plan, resolve_device_memory(places, plan.length), seeds)
    offsets = data_offsets(plan, np.where((reach.layout < 0) & (reach.device < 0), reach.address % BLOCK_BYTES, 0))
    planned, (headers, digests) = headers_known.is_known, headers_known.of(plan, offsets)
    count = len(headers)

    def column(first: object, rest: NDArray[Any], kind: type[_Number]) -> NDArray[_Number]:
        return np.concatenate([np.asarray(first, kind), rest.astype(kind, copy=False)])[plan.order]

    rows = WriteExtents(
        file=column(np.arange(count), plan.segment, np.uint32),
        offset=column(np.zeros(count), offsets, np.uint64),
        length=column([len(header) for header in headers], plan.length, np.uint64),
        address=column(
            [np.frombuffer(header, np.uint8).ctypes.data for header in headers], reach.address, np.uint64
        ),
        chunk=column(np.full(count, NO_DIGEST, np.uint64), plan.chunk, np.uint64),
        layout=column(np.full(count, -1), reach.layout, np.int64),
        layouts=reach.layouts, chunks=plan.chunks,
    )
    # Headers do not change. They are marked as lazy, as only a thread that waits for all captures must wait for them.
    rows.mark_lazy(
        column(np.full(count, lazy.any()), lazy, np.bool_), column(np.zeros(count), seeds, np.uint64)
    )
    rows.place_on_devices(
        column(np.full(count, -1), reach.device, np.int32), [stream.native for stream in reach.streams],
        gathered=None if reach.whole is None else column(np.zeros(count), reach.whole, np.bool_),
        samples=reach.samples, digested=reach.digested,
    )
    if plan.derivation.any():
        rows.mark_derived(
            column(np.zeros(count), plan.derivation, np.uint8),
            column(np.zeros(count), plan.chunk[plan.follows], np.uint64),
        )
    for stream in reach.streams:
        stream.wait_current()
    rows.watch(watch)
    return CaptureSources(plan, rows, offsets, digests, places, (reach, headers), reach.streams, planned)


def start_capture(target: WriteTarget, sources: CaptureSources, pace: Pace, *, reserved: bool) -> WriteHandle:
    """Start capturing `sources` into segments of `target`.

    reserved  True: the files have their full size on return. False: no byte is written before `writing.reserve()`

    Returns without waiting. The memory must stay alive and unchanged until `writing.wait_captured()` returns; early
    pieces may change once `writing.wait_early()` returns. On a device, work may change the memory if it is queued into
    the current stream after `writing.wait_queued()` (for early pieces: `wait_early`) and the side stream's
    `block_current`. Raises StorageError if the segments cannot be created.
    """
    plan, directory = sources.plan, target.directory
    files = [
        FilePlan(f"{directory}/{segment.name}", segment.bytes, encode_chunks_header) if segment.chunks
        else FilePlan(f"{directory}/{segment.name}", segment.bytes, begins=(segment.header_bytes, header))
        for segment, header in zip(plan.segments, sources.headers, strict=True)
    ]
    sources.rows.encode(encoder_of(target.base, plan), sum(not segment.chunks for segment in plan.segments))
    writing = target.store.write(files, sources.rows, target.arena, pace, reserved=reserved)
    _check_watched(writing, plan)
    return writing


def _gathered(
    watch: Watch, plan: WritePlan, reach: DeviceAccess, seeds: NDArray[np.uint64]
) -> tuple[DeviceAccess, NDArray[np.bool_]]:
    """Let devices gather small pieces, and samples of lazy pieces, into host memory. Returns how the engine then reads
    each piece, and which pieces are lazy.
    """
    if not reach.streams:
        return reach, plan.lazy
    from flowstone.stage.gather import gather_for  # imported here: most processes have no GPU

    # If every write must be detected, device memory that the device cannot digest is captured early.
    lazy = plan.lazy & ((reach.device < 0) | reach.can_digest()) if watch == "exact" else plan.lazy
    return gather_for(plan, reach, lazy, seeds, digests=watch in DIGESTED_ON_DEVICES), lazy


def _check_watched(writing: WriteHandle, plan: WritePlan) -> None:
    """Raise StorageError or UnsupportedStateError if every write must be detected (watch="exact"), and that is
    impossible. Nothing is captured then.
    """
    watched = writing.watched
    if not (watched.is_exact_required and watched.sampled_bytes):
        return
    writing.cancel()
    writing.receipt()
    remedy = 'use EngineOptions(watch="auto"), which samples memory that cannot be watched'
    if refusal := written_pages_refusal():
        raise StorageError(
            'watch="exact" does not work here: memory cannot be watched for writes', reason=refusal, next=remedy
        )
    assert watched.row is not None, "some row is sampled"
    name = plan.pieces.names[plan.order[watched.row] - len(plan.segments)]
    raise UnsupportedStateError(
        f'{name} cannot be watched for every write, as watch="exact" requires',
        found=watched.reason,
        expected="contiguous host memory that is private to this process and not mapped from a file, or memory of a "
        "GPU that can run Flowstone's kernel", next=remedy,
    )


def _header(plan: WritePlan, file: SegmentPlan, offsets: NDArray[np.uint64]) -> bytes:
    if file.chunks:
        return encode_chunks_header(file.bytes)  # preliminary, until the size is known
    moving = file.pieces[: file.slotted]
    rows = ((plan.text[p], int(offsets[p]), int(plan.length[p])) for p in moving)
    return encode_header(rows, header_bytes=file.header_bytes, file_bytes=file.bytes, packed=file.packed)


def resolve_device_memory(places: Places, lengths: NDArray[np.uint64]) -> DeviceAccess:
    """How the engine reads each piece. `lengths`: lengths of the pieces in bytes.

    Device memory that no side stream can copy is copied to the host here: memory of devices without a side stream, and
    strided memory if the driver refuses the kernel that gathers it.
    """
    address, layout = places.address, np.full(len(places.address), -1, np.int64)
    device = np.full(len(places.address), -1, np.int32)
    layouts: list[GatherLayout] = []
    streams: list[SideStream] = []
    copies: dict[int, Memory] = {}
    for number, name in enumerate(places.devices):
        mine = (places.device == number) & (lengths > 0)  # empty pieces are not read
        if not mine.any():
            continue
        stream = side_stream(name)
        if stream is None or not stream.native.packs:
            host_copy = extension("torch.device_memory").host_copy
            strided = [position for position in places.strided if mine[position]]
            copies |= {position: host_copy(places.strided[position]) for position in strided}
            mine[strided] = False
        if stream is None:
            rows = np.flatnonzero(mine).tolist()
            copies |= {row: host_copy(places.run(row, (int(lengths[row]),), 1)) for row in rows}
        elif mine.any():
            device[mine] = len(streams)
            streams.append(stream)
    for position, memory in places.strided.items():
        if memory.device == "cpu" or device[position] >= 0:
            layout[position] = len(layouts)
            layouts.append(
                GatherLayout(
                    item_bytes=memory.item_bytes, shape=memory.shape, strides_bytes=memory.strides_bytes
                )
            )
    if copies:
        address = address.copy()
        address[list(copies)] = [memory.address for memory in copies.values()]
    return DeviceAccess(address, layout, layouts, device, tuple(streams), tuple(copies.values()))


def _seeds(pieces: int, seed: int) -> NDArray[np.uint64]:
    """One seed for each piece. The seeds differ from save to save, so that cache lines that one save does not sample
    are sampled by another.
    """
    return np.arange(pieces, dtype=np.uint64) + np.uint64((seed << 32) % (1 << 64))
