"""Capture: from live memory and a plan to segments on their way to the store.

**Windows.** The engine divides each segment into windows of one request. A window is captured by copying it into a
free arena block; if none is free, the engine waits for one. All threads of the engine and the arena run at low
processor and I/O priority.

**Files.** Capture needs no files: if another thread reserves the segments, capture begins before they have their size,
and captured windows stay in the arena until then.

**Early and lazy.** Each piece is one or the other, a column of the plan. Early pieces come first, and `save` returns
when they are captured. Lazy are, from 64 KiB on, the parameters of modules and the state of optimizers, if the state
has an optimizer, whose step then waits (`fence.py`); with `fence="manual"` every piece from 64 KiB on.

**The overlap budget.** While no thread waits, lazy windows use no more blocks than a full queue needs, and start at a
rate that has them all captured after CAPTURE_SHARE_OF_OVERLAP of the shortest of the last four times from `save` to
fence. Any wait (fence, `captured`, `committed`, `wait`, `load`, `close`, the end of the script) ends that: the rest is
copied at the speed of memory while the arena has room, then at the device's. A fence that had to wait emits the event
`Fenced`, and the arena grows for the next one while no save uses it. `write_bytes_per_s` limits early and lazy bytes
alike, in any case.

**Changes that escape the fence** are detected by tensors' version counters (`state/counters.py`), and by the engine
(`native/mutation_detector.h`): by written pages, where the kernel reports them; else by comparing a few lines of every
chunk of a lazy piece with copies from the start of the save (on a device, the current stream gathers them), or the
digests of all its chunks with those that a device made then, of what is one run of its memory. A window is digested in
its block, so file and digest agree whatever happens to the source. A difference is a fault of that job, an error in its
receipt: the save fails with `StateChangedError`, which names the tensors, and the previous checkpoint stays the newest.

**Memory that goes away** in the meantime is one more such fault. A storage may free or move its memory at any time, so
the kernel copies it (`native/live_memory.h`), and reports unmapped addresses; once all is captured, each storage is
checked for whether it still has the memory (`moved.py`).
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import BLOCK_BYTES, COPIED_PART_BYTES, DIGESTED_ON_DEVICES, Watch
from flowstone.errors import StorageError, UnsupportedStateError
from flowstone.format.digest import digest
from flowstone.format.segment import encode_chunks_header, encode_header
from flowstone.plan.write import SegmentPlan, WritePlan, data_offsets
from flowstone.stage.device import Reach, SideStream, side_stream
from flowstone.stage.encode import BaseChunks, encoder_of
from flowstone.store.base import FilePlan, Pace, Store, Writing
from flowstone.table.pieces import Memory, Places

_Number = TypeVar("_Number", bound=np.generic)


class Headers:
    """The headers of a plan's segments, and their digests; encoded again only if offsets have changed."""

    def __init__(self) -> None:
        # In one: an interrupt leaves all of them, or none.
        self._known: tuple[NDArray[np.uint64], tuple[bytes, ...], tuple[str, ...]] | None = None

    @property
    def are_known(self) -> bool:
        """Whether a save has used this plan already."""
        return self._known is not None

    def of(self, plan: WritePlan, offsets: NDArray[np.uint64]) -> tuple[tuple[bytes, ...], tuple[str, ...]]:
        if self._known is None or not np.array_equal(self._known[0], offsets):
            texts = tuple(_header(plan, segment, offsets) for segment in plan.segments)
            self._known = offsets, texts, tuple(map(digest, texts))
        return self._known[1:]


class WriteTarget(msgspec.Struct, frozen=True, eq=False):
    """Where segments are written to: a directory of a store, through the blocks of an arena.

    base  what the base has; given if the plan has a segment of chunks
    """

    store: Store
    directory: str
    arena: _native.Arena
    base: BaseChunks | None = None


class Sources(msgspec.Struct, frozen=True, eq=False):
    """The memory that a capture reads, watched for changes.

    rows     what each byte of it is for, in the order of the plan
    offsets  file offset of each piece's bytes, in plan order
    headers  the digest of each segment's header; of a segment of chunks, whose size is not known yet, of no use
    places   the memory of the pieces
    memory   further memory that the writers read: keep both alive until captured
    streams  of the devices that hold some pieces; that memory is read when the streams reach the copies
    planned  an earlier save has used this plan
    """

    plan: WritePlan
    rows: _native.WriteExtents
    offsets: NDArray[np.uint64]
    headers: tuple[str, ...]
    places: Places | None
    memory: tuple[object, ...]
    streams: tuple[SideStream, ...]
    planned: bool


def watch_sources(plan: WritePlan, places: Places, known: Headers, *, watch: Watch, seed: int) -> Sources:
    """Watch the memory `places` (parallel to the plan's pieces) from now on, for a capture that starts later.

    known  of this very plan, with what an earlier save has encoded
    watch  how changes before the capture are detected: see EngineOptions
    seed   different for each save, so that each samples other lines

    The memory must not change from now on, as `start_capture` says. Device memory is captured as the work leaves it
    that is in its current stream now. What is watched is let go with the result, if no capture starts.
    """
    seeds = _seeds(len(plan.length), seed)
    reach, lazy = _gathered(watch, plan, within_reach(places, plan.length), seeds)
    offsets = data_offsets(plan, np.where((reach.layout < 0) & (reach.device < 0), reach.address % BLOCK_BYTES, 0))
    planned, (headers, digests) = known.are_known, known.of(plan, offsets)
    count = len(headers)

    def column(first: object, rest: NDArray[Any], kind: type[_Number]) -> NDArray[_Number]:
        return np.concatenate([np.asarray(first, kind), rest.astype(kind, copy=False)])[plan.order]

    rows = _native.WriteExtents(
        file=column(np.arange(count), plan.segment, np.uint32),
        offset=column(np.zeros(count), offsets, np.uint64),
        length=column([len(header) for header in headers], plan.length, np.uint64),
        address=column(
            [np.frombuffer(header, np.uint8).ctypes.data for header in headers], reach.address, np.uint64
        ),
        chunk=column(np.full(count, _native.NO_DIGEST, np.uint64), plan.chunk, np.uint64),
        layout=column(np.full(count, -1), reach.layout, np.int64),
        layouts=reach.layouts, chunks=plan.chunks,
        # Headers are ours and do not change, but a thread that waits for everything waits for them too.
        lazy=column(np.full(count, lazy.any()), lazy, np.bool_),
        device=column(np.full(count, -1), reach.device, np.int32), devices=[one.native for one in reach.streams],
        gathered=None if reach.whole is None else column(np.zeros(count), reach.whole, np.bool_),
        samples=reach.samples, digested=reach.digested, seed=column(np.zeros(count), seeds, np.uint64),
        derived=None if not plan.derivation.any() else (
            column(np.zeros(count), plan.derivation, np.uint8),
            column(np.zeros(count), plan.chunk[plan.follows], np.uint64),
        ),
    )
    for stream in reach.streams:
        stream.wait_current()
    rows.watch(watch)
    return Sources(plan, rows, offsets, digests, places, (reach, headers), reach.streams, planned)


def start_capture(target: WriteTarget, sources: Sources, pace: Pace, *, reserved: bool) -> Writing:
    """Start capturing `sources` into segments of `target`.

    reserved  False: nothing is written before `writing.reserve()`

    Returns without waiting. The memory must stay alive until `writing.wait_captured()` returns, and unchanged too,
    except that early pieces may change once `writing.wait_early()` returns. Work that is put into a device's current
    stream after `writing.wait_queued()` (for early pieces: `wait_early`) and the side stream's `block_current` may
    change its memory.
    Raises StorageError if the segments cannot be created.
    """
    plan, directory = sources.plan, target.directory
    files = [
        FilePlan(f"{directory}/{segment.name}", segment.bytes, encode_chunks_header) if segment.chunks
        else FilePlan(f"{directory}/{segment.name}", segment.bytes, begins=(segment.header_bytes, found))
        for segment, found in zip(plan.segments, sources.headers, strict=True)
    ]
    sources.rows.encode(encoder_of(target.base, plan), sum(not segment.chunks for segment in plan.segments))
    writing = target.store.write(files, sources.rows, target.arena, pace, reserved=reserved)
    _check_watched(writing, plan)
    return writing


def _gathered(
    watch: Watch, plan: WritePlan, reach: Reach, seeds: NDArray[np.uint64]
) -> tuple[Reach, NDArray[np.bool_]]:
    """How pieces are read once devices have gathered, and which are captured after `save` has returned."""
    if not reach.streams:
        return reach, plan.lazy
    from flowstone.stage.gather import gather_for  # imported here: most processes have no GPU

    # Where each byte is to be watched, memory of a device that it cannot digest does not wait.
    lazy = plan.lazy & ((reach.device < 0) | reach.are_digested()) if watch == "exact" else plan.lazy
    return gather_for(plan, reach, lazy, seeds, digests=watch in DIGESTED_ON_DEVICES), lazy


def _check_watched(writing: Writing, plan: WritePlan) -> None:
    """Raise if all bytes were to be watched, and cannot be; then nothing is captured."""
    watched = writing.watched
    if not (watched.insisted and watched.sampled_bytes):
        return
    writing.cancel()
    writing.receipt()
    remedy = 'use EngineOptions(watch="auto"), which samples memory that cannot be watched'
    if refusal := _native.written_pages_refusal():
        raise StorageError(
            'watch="exact" does not work here: memory cannot be watched for writes', reason=refusal, next=remedy
        )
    assert watched.row is not None, "of what is sampled, one is the first"
    name = plan.pieces.names[plan.order[watched.row] - len(plan.segments)]
    raise UnsupportedStateError(
        f'{name} cannot be watched for every write, as watch="exact" requires', found=watched.reason,
        expected="contiguous host memory that is private to this process and not mapped from a file, or memory of a GPU"
        " whose driver takes our kernel", next=remedy,
    )


def _header(plan: WritePlan, file: SegmentPlan, offsets: NDArray[np.uint64]) -> bytes:
    if file.chunks:
        return encode_chunks_header(file.bytes)  # until the size is known
    moving = file.pieces[: file.slotted]
    rows = ((plan.text[p], int(offsets[p]), int(plan.length[p])) for p in moving)
    return encode_header(rows, header_bytes=file.header_bytes, file_bytes=file.bytes, packed=file.packed)


def within_reach(places: Places, lengths: NDArray[np.uint64]) -> Reach:
    """How the engine reads each piece. `lengths`: of the pieces, in bytes.

    Device memory that no side stream can copy as it is, is copied to the host here: of devices without one, and strided
    memory where the driver refuses the kernel for it.
    """
    address, layout = places.address, np.full(len(places.address), -1, np.int64)
    device = np.full(len(places.address), -1, np.int32)
    layouts: list[_native.GatherLayout] = []
    streams: list[SideStream] = []
    copies: dict[int, Memory] = {}
    for number, name in enumerate(places.devices):
        mine = (places.device == number) & (lengths > 0)  # of no bytes, nothing is read
        if not mine.any():
            continue
        stream = side_stream(name)
        if stream is None or not stream.native.packs:
            strided = [at for at in places.apart if mine[at]]
            copies |= {at: host_copy(places.apart[at]) for at in strided}
            mine[strided] = False
        if stream is None:
            rows = np.flatnonzero(mine).tolist()
            copies |= {at: host_copy(places.run(at, (int(lengths[at]),), 1)) for at in rows}
        elif mine.any():
            device[mine] = len(streams)
            streams.append(stream)
    for position, memory in places.apart.items():
        if memory.device == "cpu" or device[position] >= 0:
            layout[position] = len(layouts)
            layouts.append(
                _native.GatherLayout(
                    item_bytes=memory.item_bytes, shape=memory.shape, strides_bytes=memory.strides_bytes
                )
            )
    if copies:
        address = address.copy()
        address[list(copies)] = [memory.address for memory in copies.values()]
    return Reach(address, layout, layouts, device, tuple(streams), tuple(copies.values()))


def _seeds(pieces: int, seed: int) -> NDArray[np.uint64]:
    """A seed for each piece and save, so that lines not sampled in one save are sampled in another."""
    return np.arange(pieces, dtype=np.uint64) + np.uint64((seed << 32) % (1 << 64))


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A type for each item size: copies between devices move bytes, whatever their meaning."""


def on_device(memory: Memory) -> torch.Tensor:
    """The tensor that `memory`, owned by a tensor or its storage, describes, with a carrier type of its item size."""
    owner = memory.owner.untyped_storage() if isinstance(memory.owner, torch.Tensor) else memory.owner
    assert isinstance(owner, torch.UntypedStorage), "device memory is a tensor's"
    # A tensor without elements has no address.
    start = 0 if 0 in memory.shape else (memory.address - owner.data_ptr()) // memory.item_bytes
    strides = tuple(stride // memory.item_bytes for stride in memory.strides_bytes)
    carrier = torch.empty(0, dtype=_CARRIERS[memory.item_bytes], device=memory.device)
    return carrier.set_(owner, start, memory.shape, strides)


def host_twin(memory: Memory) -> Memory:
    """New, dense host memory of the same shape; its owner is the tensor."""
    host = torch.empty(memory.shape, dtype=_CARRIERS[memory.item_bytes], device="cpu")  # whatever the default is
    strides = tuple(stride * memory.item_bytes for stride in host.stride())
    return Memory(host, host.data_ptr(), memory.shape, strides, memory.item_bytes)


def host_copy(memory: Memory) -> Memory:
    """The elements of device memory, in new host memory."""
    twin = host_twin(memory)
    assert isinstance(twin.owner, torch.Tensor)
    _copy_parts(twin.owner, on_device(memory))
    return twin


def _copy_parts(target: torch.Tensor, source: torch.Tensor) -> None:
    """torch puts strided elements in order first, in new memory of the device: a part of them at a time."""
    if source.is_contiguous() or source.numel() * source.itemsize <= COPIED_PART_BYTES:
        target.copy_(source)
        return
    dim = next(dim for dim, length in enumerate(source.shape) if length > 1)  # so parts of the target are dense, too
    for to, of in zip(target.tensor_split(2, dim), source.tensor_split(2, dim), strict=True):
        _copy_parts(to, of)
