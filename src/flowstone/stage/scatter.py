"""Scatter: read stored chunks, verify each, and copy it into the memory of the state.

By default bytes are read into a few arena blocks, and a chunk is copied after it was verified. With `read_in_place`,
bytes are read directly into the state's memory, if its address and the file offset are equal modulo 4096, and verified
afterwards (docs/decisions/003).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone._native import Arena, Device, ReadExtents, ScatterLayout
from flowstone.errors import DamagedError, FlowstoneError, RankError, StorageError, is_damage
from flowstone.format.codec import CAST, CODECS
from flowstone.format.derived import stored_columns
from flowstone.format.index import Index
from flowstone.plan.read import ReadPlan
from flowstone.store.base import ReadHandle, ReadReceipt, Store, finish_reading, stop_reading
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Pieces, Places

_AGAIN = "load this step again, or an older step, before the next save"


class ReadResult(msgspec.Struct, frozen=True):
    """The result of a read.

    written       positions of requested pieces whose memory has changed
    bad           damaged chunks, each as (row of its piece in the index, number of the chunk in that piece)
    bytes         length of the chunks that were read from the store
    shared_bytes  length of the chunks that were copied from ring buffers, in which ranks of a node share what they read
    """

    receipt: ReadReceipt
    written: tuple[int, ...]
    bad: tuple[tuple[int, int], ...]
    bytes: int = 0
    shared_bytes: int = 0

    @property
    def failed(self) -> bool:
        """Whether some chunk is damaged, or could not be read."""
        return bool(self.bad) or self.receipt.error is not None


class ReadTargets(msgspec.Struct, frozen=True, eq=False):
    """The plan of a read, and the memory to fill.

    pieces, places  the requested pieces, and the memory of each; the plan's column `target` has positions of pieces
    devices         name -> device, for all devices that have some of this memory
    """

    index: Index
    plan: ReadPlan
    pieces: Pieces
    places: Places
    devices: Mapping[str, Device] = msgspec.field(default_factory=dict)


class ReadSource(msgspec.Struct, frozen=True, eq=False):
    """A committed checkpoint to read. `paths`: the paths of its segment files in the store. `location`: where it is,
    for error messages.
    """

    store: Store
    index: Index
    paths: Sequence[str]
    location: str


class StoredChunkRuns(msgspec.Struct, frozen=True, eq=False):
    """Runs of chunks to read: for each run, chunks [first, last) of a stored piece.

    file, offset  if the chunks are in a rank's ring buffer: the buffer's number, and where the piece's range begins in
                  it. None: the chunks are in the checkpoint's files
    """

    piece: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    file: NDArray[np.int64] | None = None
    offset: NDArray[np.int64] | None = None


class TargetRows(msgspec.Struct, frozen=True, eq=False):
    """The memory into which runs of chunks are copied, with one entry for each run.

    address  address to which the piece's first byte goes; if there is a layout, address of the first element to fill
    layout   number of the memory's layout in `layouts`; -1: the memory is contiguous
    device   number of the device; -1: host memory
    """

    address: NDArray[np.uint64]
    layout: NDArray[np.int64]
    layouts: Sequence[ScatterLayout] = ()
    device: NDArray[np.int32] | None = None
    devices: Sequence[Device] = ()

    @classmethod
    def dense(cls, address: NDArray[np.uint64]) -> TargetRows:
        """Targets in host memory, each of them contiguous."""
        return cls(address, np.full(len(address), -1, np.int64))


def scatter(
    store: Store, paths: Sequence[str], fill: ReadTargets, arena: Arena,
    on_progress: Callable[[int], None] | None = None, meanwhile: Callable[[], None] | None = None,
) -> ReadResult:
    """Fill the memory of `fill`, as its plan says. Returns when all is read.

    paths        the paths of the segment files in the store, by their numbers
    on_progress  called with the number of bytes that were read so far, every POLL_S seconds
    meanwhile    called once while bytes are read

    Damaged bytes, or a failing store, are reported in the result, and raise nothing. Ctrl-C cancels the read; then
    KeyboardInterrupt is raised once no byte is written into memory any more.
    """
    plan = fill.plan

    def read(rows: ReadExtents) -> ReadHandle:
        return store.read_extents(paths, rows, arena, wanted_bytes=plan.bytes)

    return scatter_by(read, fill, StoredChunkRuns(plan.piece, plan.first, plan.last), on_progress, meanwhile)


def scatter_by(
    read: Callable[[ReadExtents], ReadHandle], fill: ReadTargets, runs: StoredChunkRuns,
    on_progress: Callable[[int], None] | None, meanwhile: Callable[[], None] | None = None,
) -> ReadResult:
    """Like `scatter`, but the function `read` reads the bytes. `runs`: for each row of the plan, the chunks to read."""
    index, plan = fill.index, fill.plan
    try:
        reading = read(read_rows(index, runs, _targets(fill)))
    except FlowstoneError as error:  # the read was not started, so no memory has changed
        return ReadResult(nothing_read(error), (), ())
    try:
        if meanwhile is not None:
            meanwhile()
    except BaseException:
        stop_reading(reading)
        raise
    receipt = finish_reading(reading, on_progress)
    written = np.zeros(len(fill.pieces), np.bool_)
    written[plan.target[receipt.touched]] = True
    return ReadResult(receipt, tuple(np.flatnonzero(written).tolist()), locate_chunks(index, receipt), plan.bytes)


def nothing_read(error: FlowstoneError | None) -> ReadReceipt:
    """The engine's result for a read that has read nothing, because of `error`."""
    return ReadReceipt(error, np.zeros(0, np.uint64), np.zeros(0, np.bool_), 0, 0, 0, 0)


def merge_results(parts: Sequence[ReadResult]) -> ReadResult:
    """The combined result of several reads. Its receipt has only totals, and does not list chunks and rows."""
    receipts = [part.receipt for part in parts]
    receipt = replace(
        nothing_read(next((receipt.error for receipt in receipts if receipt.error is not None), None)),
        requested_bytes=sum(receipt.requested_bytes for receipt in receipts),
        requests=sum(receipt.requests for receipt in receipts),
        copied_bytes=sum(receipt.copied_bytes for receipt in receipts),
        direct_bytes=sum(receipt.direct_bytes for receipt in receipts),
        spans=[columns for receipt in receipts for columns in receipt.spans],
    )
    return ReadResult(
        receipt, tuple(sorted({position for part in parts for position in part.written})),
        tuple(bad for part in parts for bad in part.bad), sum(part.bytes for part in parts),
        sum(part.shared_bytes for part in parts),
    )


def read_rows(index: Index, runs: StoredChunkRuns, targets: TargetRows) -> ReadExtents:
    """The table of byte ranges, and of the memory for each, that the engine needs to read these runs.

    raises  UnsupportedFormatError  a chunk has a codec that this version does not know
    """
    chunks, piece = index.chunks, runs.piece
    chunks.check_codecs(piece, runs.first, runs.last, index.tensors.names, index.pieces.tensor[piece], CODECS)
    assert chunks.stored is None or runs.offset is None, "a ring has extents in their stored form"
    rows = ReadExtents(
        file=chunks.segment[piece] if runs.file is None else runs.file.astype(np.uint32),
        offset=chunks.offset[piece] if runs.offset is None else runs.offset.astype(np.uint64),
        length=chunks.length[piece], chunk=chunks.first[piece].astype(np.uint64),
        first=runs.first.astype(np.uint64), last=runs.last.astype(np.uint64), digests=chunks.digest,
    )
    rows.aim(targets.address, targets.layout, targets.layouts)
    if targets.device is not None:
        rows.place_on_devices(targets.device, targets.devices)
    rows.locate_chunks(stored_columns(chunks, index.pieces), chunks.bases_of(np.arange(int(chunks.first[-1]))))
    return rows


def locate_chunks(index: Index, receipt: ReadReceipt) -> tuple[tuple[int, int], ...]:
    """For each damaged chunk in the engine's result: the index row of its piece, and its number in that piece."""
    pieces, chunks = index.chunks.locate(receipt.bad.astype(np.int64))
    return tuple(zip(pieces.tolist(), chunks.tolist(), strict=True))


def raise_damage(result: ReadResult, index: Index, pieces: Pieces, paths: Sequence[str], refusal: str) -> None:
    """If a read has failed, raise an error that names every tensor whose memory was changed. Otherwise return."""
    if not result.failed:
        return
    written = tuple(dict.fromkeys(pieces.names[position] for position in result.written))
    changed = f"{len(written)} tensors" + (f": {', '.join(written[:5])}" + " ..." * (len(written) > 5)) * bool(written)
    if result.bad:
        lines = []
        rows, numbers = np.array(result.bad, np.int64).T
        segments, begins = index.chunks.stored_locations(rows, numbers)
        stops = begins + index.chunks.stored_bytes(rows, numbers, numbers + 1)
        columns = index.pieces.tensor[rows], numbers, begins, stops, segments
        codecs = index.chunks.codecs()[index.chunks.first[rows] + numbers].tolist()
        for tensor, chunk, begin, stop, segment, codec in zip(
            *(column.tolist() for column in columns), codecs, strict=True
        ):
            place = (
                "computed from the chunks of another tensor" if codec == CAST.id
                else f"bytes {begin}..{stop} of {paths[segment]}"
            )
            lines.append(f"{index.tensors.names[tensor]!r}, chunk {chunk}, {place}")
        raise DamagedError(
            f"{refusal}: stored bytes do not match their digests", written=written, damaged="\n".join(lines),
            changed=changed, next="load an older step, or use load(..., fallback=True)",
        )
    error: FlowstoneError | None = result.receipt.error
    assert error is not None, "the read failed, and no chunk is bad"
    if not written or isinstance(error, RankError):
        raise error
    facts: dict[str, object] = {
        "cause": error.message, "range": error.facts.get("range", "unknown"), "changed": changed,
    }
    if isinstance(error, StorageError) and not is_damage(error):  # the checkpoint itself may be undamaged
        facts |= {"reason": error.facts.get("reason", "unknown"), "next": error.facts.get("next", _AGAIN)}
        raise StorageError(f"{refusal}: reading failed partway", errno=error.errno, **facts) from error
    raise DamagedError(f"{refusal}: reading failed partway", written=written, **facts, next=_AGAIN) from error


def _targets(fill: ReadTargets) -> TargetRows:
    """The target memory of each row of the plan. Most targets are full pieces in contiguous memory; the others are
    computed one by one.
    """
    index, plan, pieces, places = fill.index, fill.plan, fill.pieces, fill.places
    address, layout = places.address[plan.target], np.full(len(plan.target), -1, np.int64)
    layouts: list[ScatterLayout] = []
    made: dict[tuple[int, int], tuple[int, int]] = {}
    strided = np.flatnonzero(np.isin(plan.target, list(places.strided))).tolist()
    for row in sorted({*plan.common, *strided}):
        piece, target = int(plan.piece[row]), int(plan.target[row])
        if (piece, target) not in made:
            # Stored bytes are written unchanged; for a cast, the target is a bounce buffer of the stored type.
            own = replace(pieces[target], dtype=index.tensors.dtypes[int(index.pieces.tensor[piece])])
            common = plan.common.get(row, own.box)
            start, scattered = _part(index.pieces.box(piece), common, own.box, places.memory(target, own))
            made[piece, target] = (start, -1 if scattered is None else len(layouts))
            layouts += [] if scattered is None else [scattered]
        address[row], layout[row] = made[piece, target]
    devices = fill.devices
    return TargetRows(address, layout, layouts, _devices(plan, places, list(devices)), list(devices.values()))


def _devices(plan: ReadPlan, places: Places, devices: Sequence[str]) -> NDArray[np.int32]:
    """For each row of the plan, the number of the device with its target memory; -1: host memory."""
    if not (devices and places.devices):
        return np.full(len(plan.target), -1, np.int32)
    numbers = [devices.index(name) if name in devices else -1 for name in places.devices]
    return np.array([*numbers, -1], np.int32)[places.device[plan.target]]


def _part(stored: Box, common: Box, target: Box, memory: Memory) -> tuple[int, ScatterLayout | None]:
    """The address at which the region `common` of the stored box begins in the memory of the requested box `target`,
    and the layout of the region there (None: contiguous).
    """
    inside = common.within(target)
    address = memory.address + sum(o * s for o, s in zip(inside.offset, memory.strides_bytes, strict=True))
    if common == stored and _dense(common, memory):
        return address, None
    part = common.within(stored)
    return address, ScatterLayout(
        item_bytes=memory.item_bytes, extent_shape=stored.shape, offset=part.offset, shape=part.shape,
        strides_bytes=memory.strides_bytes,
    )


def _dense(box: Box, memory: Memory) -> bool:
    """Whether a box of this shape is contiguous in the memory, in row-major order."""
    part = Memory(None, 0, box.shape, memory.strides_bytes, memory.item_bytes)
    return part.contiguous
