"""Scatter: copy stored extents, verified chunk by chunk, into the target memory.

By default through a few arena blocks: a chunk is copied only after it was verified. With `read_in_place`, straight into
targets whose address has the file's phase (modulo 4096): those are verified after they were written
(docs/decisions/003).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone import _native
from flowstone.errors import DamagedError, FlowstoneError, RankError, StorageError, is_damage
from flowstone.format.codec import CAST, CODECS
from flowstone.format.derived import stored_columns
from flowstone.format.index import Index
from flowstone.plan.read import ReadPlan
from flowstone.store.base import Reading, ReadReceipt, Store, finish_reading, stop_reading
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Pieces, Places

_AGAIN = "load again, or an older step, before saving"


class Scattered(msgspec.Struct, frozen=True):
    """The result of a read.

    written       positions of requested pieces whose memory has changed
    bad           damaged chunks: (piece row in the index, chunk of that piece)
    bytes         length of the chunks that were read from the store
    shared_bytes  length of the chunks that came from ring buffers of any rank
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


class Fill(msgspec.Struct, frozen=True, eq=False):
    """What to read, and the memory to fill.

    wanted, places  the requested pieces, which the plan's targets refer to, and their memory: parallel
    devices         by name: those of the places that the plan's targets are on
    """

    index: Index
    plan: ReadPlan
    wanted: Pieces
    places: Places
    devices: Mapping[str, _native.Device] = msgspec.field(default_factory=dict)


class Source(msgspec.Struct, frozen=True, eq=False):
    """A committed checkpoint to read from. `paths`: of its segments in the store, by id; `location`: for messages."""

    store: Store
    index: Index
    paths: Sequence[str]
    location: str


class Runs(msgspec.Struct, frozen=True, eq=False):
    """Runs of chunks [first, last) of stored pieces, as columns.

    file, offset  begin of each piece's extent, if it is in a rank's ring buffer. None: as the chunk table says
    """

    piece: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    file: NDArray[np.int64] | None = None
    offset: NDArray[np.int64] | None = None


class Targets(msgspec.Struct, frozen=True, eq=False):
    """Targets of the runs, as columns.

    address  of the extent's byte 0, or of the first element if there is a layout
    layout   position among the layouts; -1: one run of bytes
    device   position among the devices; -1: host memory
    """

    address: NDArray[np.uint64]
    layout: NDArray[np.int64]
    layouts: Sequence[_native.ScatterLayout] = ()
    device: NDArray[np.int32] | None = None
    devices: Sequence[_native.Device] = ()

    @classmethod
    def dense(cls, address: NDArray[np.uint64]) -> Targets:
        """Targets in host memory, each one run of bytes."""
        return cls(address, np.full(len(address), -1, np.int64))


def scatter(
    store: Store, paths: Sequence[str], fill: Fill, arena: _native.Arena,
    on_progress: Callable[[int], None] | None = None, meanwhile: Callable[[], None] | None = None,
) -> Scattered:
    """Read a plan into memory. Blocks.

    paths        of the segments in the store, by id
    on_progress  called with the bytes done, every POLL_S
    meanwhile    called once, while bytes are read
    Never raises for damaged bytes or a failing store: the result has those. Ctrl-C cancels the read, and is raised once
    no byte moves any more.
    """
    plan = fill.plan

    def read(rows: _native.ReadExtents) -> Reading:
        return store.read_extents(paths, rows, arena, wanted_bytes=plan.bytes)

    return scatter_by(read, fill, Runs(plan.piece, plan.first, plan.last), on_progress, meanwhile)


def scatter_by(
    read: Callable[[_native.ReadExtents], Reading], fill: Fill, runs: Runs,
    on_progress: Callable[[int], None] | None, meanwhile: Callable[[], None] | None = None,
) -> Scattered:
    """As `scatter`, for bytes that `read` reads. `runs`: those of the plan, in its order."""
    index, plan = fill.index, fill.plan
    try:
        reading = read(read_rows(index, runs, _targets(fill)))
    except FlowstoneError as error:  # before the first byte moved
        return Scattered(nothing_read(error), (), ())
    try:
        if meanwhile is not None:
            meanwhile()
    except BaseException:
        stop_reading(reading)
        raise
    receipt = finish_reading(reading, on_progress)
    written = np.zeros(len(fill.wanted), np.bool_)
    written[plan.target[receipt.touched]] = True
    return Scattered(receipt, tuple(np.flatnonzero(written).tolist()), locate_chunks(index, receipt), plan.bytes)


def nothing_read(error: FlowstoneError | None) -> ReadReceipt:
    """The receipt of a read that moved nothing."""
    return ReadReceipt(error, np.zeros(0, np.uint64), np.zeros(0, np.bool_), 0, 0, 0, 0)


def joined(parts: Sequence[Scattered]) -> Scattered:
    """The results of several reads, as one. Its receipt says nothing of single chunks and rows."""
    receipts = [part.receipt for part in parts]
    receipt = replace(
        nothing_read(next((one.error for one in receipts if one.error is not None), None)),
        requested_bytes=sum(one.requested_bytes for one in receipts), requests=sum(one.requests for one in receipts),
        copied_bytes=sum(one.copied_bytes for one in receipts), direct_bytes=sum(one.direct_bytes for one in receipts),
        spans=[columns for one in receipts for columns in one.spans],
    )
    return Scattered(
        receipt, tuple(sorted({at for part in parts for at in part.written})),
        tuple(bad for part in parts for bad in part.bad), sum(part.bytes for part in parts),
        sum(part.shared_bytes for part in parts),
    )


def read_rows(index: Index, runs: Runs, targets: Targets) -> _native.ReadExtents:
    """The extents of these runs, for the engine.

    raises  UnsupportedFormatError  a chunk has a codec that this version does not know
    """
    chunks, piece = index.chunks, runs.piece
    chunks.check_codecs(piece, runs.first, runs.last, index.tensors.names, index.pieces.tensor[piece], CODECS)
    assert chunks.stored is None or runs.offset is None, "a ring holds extents as they are"
    return _native.ReadExtents(
        file=chunks.segment[piece] if runs.file is None else runs.file.astype(np.uint32),
        offset=chunks.offset[piece] if runs.offset is None else runs.offset.astype(np.uint64),
        length=chunks.length[piece], address=targets.address, chunk=chunks.first[piece].astype(np.uint64),
        first=runs.first.astype(np.uint64), last=runs.last.astype(np.uint64), layout=targets.layout,
        layouts=targets.layouts, digests=chunks.digest, device=targets.device, devices=targets.devices,
        stored=stored_columns(chunks, index.pieces), bases=chunks.bases_of(np.arange(int(chunks.first[-1]))),
    )


def locate_chunks(index: Index, receipt: ReadReceipt) -> tuple[tuple[int, int], ...]:
    """(piece row, chunk within the piece) of each bad chunk of a receipt."""
    pieces, chunks = index.chunks.locate(receipt.bad.astype(np.int64))
    return tuple(zip(pieces.tolist(), chunks.tolist(), strict=True))


def raise_damage(found: Scattered, index: Index, wanted: Pieces, paths: Sequence[str], what: str) -> None:
    """Raise the failure of a read, naming every tensor that was written; return if there is none."""
    if not found.failed:
        return
    written = tuple(dict.fromkeys(wanted.names[position] for position in found.written))
    changed = f"{len(written)} tensors" + (f": {', '.join(written[:5])}" + " ..." * (len(written) > 5)) * bool(written)
    if found.bad:
        lines = []
        rows, numbers = np.array(found.bad, np.int64).T
        segments, begins = index.chunks.stored_at(rows, numbers)
        stops = begins + index.chunks.stored_bytes(rows, numbers, numbers + 1)
        columns = index.pieces.tensor[rows], numbers, begins, stops, segments
        codecs = index.chunks.codecs()[index.chunks.first[rows] + numbers].tolist()
        for tensor, chunk, begin, stop, segment, codec in zip(
            *(column.tolist() for column in columns), codecs, strict=True
        ):
            place = "which is rounded" if codec == CAST.id else f"bytes {begin}..{stop} of {paths[segment]}"
            lines.append(f"{index.tensors.names[tensor]!r}, chunk {chunk}, {place}")
        raise DamagedError(
            f"{what}: stored bytes are not what was written", written=written, damaged="\n".join(lines),
            changed=changed, next="load an older step, or use load(..., fallback=True)",
        )
    error: FlowstoneError | None = found.receipt.error
    assert error is not None, "there is something else that is wrong"
    if not written or isinstance(error, RankError):
        raise error
    facts: dict[str, object] = {
        "cause": error.message, "range": error.facts.get("range", "unknown"), "changed": changed,
    }
    if isinstance(error, StorageError) and not is_damage(error):  # the checkpoint itself may be undamaged
        facts |= {"reason": error.facts.get("reason", "unknown"), "next": error.facts.get("next", _AGAIN)}
        raise StorageError(f"{what}: reading failed part of the way", errno=error.errno, **facts) from error
    raise DamagedError(f"{what}: reading failed part of the way", written=written, **facts, next=_AGAIN) from error


def _targets(fill: Fill) -> Targets:
    """The target of each row of the plan. Most are whole and one run of bytes; the others are computed one by one."""
    index, plan, wanted, places = fill.index, fill.plan, fill.wanted, fill.places
    address, layout = places.address[plan.target], np.full(len(plan.target), -1, np.int64)
    layouts: list[_native.ScatterLayout] = []
    made: dict[tuple[int, int], tuple[int, int]] = {}
    strided = np.flatnonzero(np.isin(plan.target, list(places.apart))).tolist()
    for row in sorted({*plan.common, *strided}):
        piece, target = int(plan.piece[row]), int(plan.target[row])
        if (piece, target) not in made:
            # Bytes are written as stored; for a cast, the place is a bounce buffer of the stored type.
            one = replace(wanted[target], dtype=index.tensors.dtypes[int(index.pieces.tensor[piece])])
            common = plan.common.get(row, one.box)
            start, scattered = _part(index.pieces.box(piece), common, one.box, places.memory(target, one))
            made[piece, target] = (start, -1 if scattered is None else len(layouts))
            layouts += [] if scattered is None else [scattered]
        address[row], layout[row] = made[piece, target]
    devices = fill.devices
    return Targets(address, layout, layouts, _devices(plan, places, list(devices)), list(devices.values()))


def _devices(plan: ReadPlan, places: Places, devices: Sequence[str]) -> NDArray[np.int32]:
    """Each row's device number; -1 for the host."""
    if not (devices and places.devices):
        return np.full(len(plan.target), -1, np.int32)
    numbers = [devices.index(name) if name in devices else -1 for name in places.devices]
    return np.array([*numbers, -1], np.int32)[places.device[plan.target]]


def _part(stored: Box, common: Box, wanted: Box, memory: Memory) -> tuple[int, _native.ScatterLayout | None]:
    """Where the region `common` of the stored box begins in the requested box's memory, and its layout there."""
    inside = common.within(wanted)
    address = memory.address + sum(o * s for o, s in zip(inside.offset, memory.strides_bytes, strict=True))
    if common == stored and _dense(common, memory):
        return address, None
    part = common.within(stored)
    return address, _native.ScatterLayout(
        item_bytes=memory.item_bytes, extent_shape=stored.shape, offset=part.offset, shape=part.shape,
        strides_bytes=memory.strides_bytes,
    )


def _dense(box: Box, memory: Memory) -> bool:
    """Whether a box of this shape is one run of bytes in the memory, row-major."""
    part = Memory(None, 0, box.shape, memory.strides_bytes, memory.item_bytes)
    return part.contiguous
