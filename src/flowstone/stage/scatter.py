"""Scatter: from stored extents, verified chunk by chunk, into the memory that wants them.

Through a few arena blocks, and then a chunk is copied only after it was verified; with `read_in_place` straight into
the target where its address has the phase of the file, and then it is verified there (docs/decisions/003).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.errors import DamagedError, FlowstoneError, RankError, StorageError, is_damage
from flowstone.format.index import Index
from flowstone.plan.read import ReadPlan
from flowstone.store.base import Reading, ReadReceipt, Store, finish_reading
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Pieces, Places

_AGAIN = "load again, or an older step, before saving"


@dataclass(frozen=True, slots=True)
class Scattered:
    """What a read did.

    written       positions of wanted pieces whose memory has changed
    bad           (piece row in the index, chunk of that piece)
    bytes         of the chunks that were read at the store
    shared_bytes  of those that came out of windows, whoever has read them
    """

    receipt: ReadReceipt
    written: tuple[int, ...]
    bad: tuple[tuple[int, int], ...]
    bytes: int = 0
    shared_bytes: int = 0

    @property
    def failed(self) -> bool:
        """Whether some of it is damaged, or could not be read."""
        return bool(self.bad) or self.receipt.error is not None


def scatter(
    store: Store,
    paths: Sequence[str],
    index: Index,
    plan: ReadPlan,
    wanted: Pieces,
    places: Places,
    arena: _native.Arena,
    on_progress: Callable[[int], None] | None = None,
    devices: Mapping[str, _native.Device] = MappingProxyType({}),
) -> Scattered:
    """Read `plan` into `places` (parallel to `wanted`). Blocks.

    paths        in the store, of the segments, by id
    devices      those that places are on, by name. What lies there is dense, and none of it is in `scattered_targets`
    on_progress  is told the bytes done, every POLL_S
    Never raises for bad bytes or a failing store: that is in the result. Ctrl-C cancels, and is raised once no byte
    moves any more.
    """
    def read(rows: _native.ReadExtents) -> Reading:
        return store.read_extents(paths, rows, arena, wanted_bytes=plan.bytes)

    return scatter_by(read, index, plan, wanted, places, on_progress, devices)


def scatter_by(
    read: Callable[[_native.ReadExtents], Reading], index: Index, plan: ReadPlan, wanted: Pieces, places: Places,
    on_progress: Callable[[int], None] | None, devices: Mapping[str, _native.Device], *,
    file: NDArray[np.int64] | None = None, offset: NDArray[np.int64] | None = None,
) -> Scattered:
    """The same of what `read` reads.

    file, offset  parallel to the plan's rows: where each extent begins, if not where the index says
    """
    address, layout, layouts = _targets(index, plan, wanted, places)
    rows = read_rows(
        index, plan.piece, plan.first, plan.last, address, file=file, offset=offset, layout=layout, layouts=layouts,
        device=_devices(plan, places, list(devices)), devices=list(devices.values()),
    )
    try:
        reading = read(rows)
    except FlowstoneError as error:  # before the first byte
        return Scattered(nothing_read(error), (), ())
    receipt = finish_reading(reading, on_progress)
    written = np.zeros(len(wanted), np.bool_)
    written[plan.target[receipt.touched]] = True
    return Scattered(receipt, tuple(np.flatnonzero(written).tolist()), locate_chunks(index, receipt), plan.bytes)


def nothing_read(error: FlowstoneError | None) -> ReadReceipt:
    """The receipt of a read that moved nothing."""
    return ReadReceipt(error, np.zeros(0, np.uint64), np.zeros(0, np.bool_), 0, 0, 0, 0)


def scattered_targets(index: Index, plan: ReadPlan, places: Places) -> set[int]:
    """Positions of wanted pieces on devices that some stored piece fills otherwise than whole, as one run of bytes."""
    found: set[int] = set()
    far = {at for at, memory in places.apart.items() if memory.device != "cpu"}
    for row, common in plan.common.items() if far else ():
        target = int(plan.target[row])
        if target in far and target not in found and not (
            common == index.box(int(plan.piece[row])) and _dense(common, places.apart[target])
        ):
            found.add(target)
    return found


def read_rows(
    index: Index, piece: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64],
    address: NDArray[np.uint64], *, file: NDArray[np.int64] | None = None, offset: NDArray[np.int64] | None = None,
    layout: NDArray[np.int64] | None = None, layouts: Sequence[_native.ScatterLayout] = (),
    device: NDArray[np.int32] | None = None, devices: Sequence[_native.Device] = (),
) -> _native.ReadExtents:
    """Rows for chunks [first, last) of stored pieces; into one run of bytes each, where no layout says otherwise."""
    return _native.ReadExtents(
        file=index.segment[piece] if file is None else file.astype(np.uint32),
        offset=index.offset[piece] if offset is None else offset.astype(np.uint64), length=index.length[piece],
        address=address, chunk=index.first_chunk[piece].astype(np.uint64), first=first.astype(np.uint64),
        last=last.astype(np.uint64), layout=np.full(len(piece), -1, np.int64) if layout is None else layout,
        layouts=layouts, digests=index.digest, device=device, devices=devices,
    )


def locate_chunks(index: Index, receipt: ReadReceipt) -> tuple[tuple[int, int], ...]:
    """(piece row, chunk within the piece) of each bad chunk of a receipt."""
    pieces = np.searchsorted(index.first_chunk, receipt.bad.astype(np.int64), side="right") - 1
    return tuple((int(p), int(c) - int(index.first_chunk[p])) for p, c in zip(pieces, receipt.bad, strict=True))


def raise_damage(found: Scattered, index: Index, wanted: Pieces, paths: Sequence[str], what: str) -> None:
    """Raise what a receipt says went wrong, naming every tensor that was written; nothing if nothing did."""
    if not found.failed:
        return
    written = tuple(wanted.names[position] for position in found.written)
    changed = f"{len(written)} tensors" + (f": {', '.join(written[:5])}" + " ..." * (len(written) > 5)) * bool(written)
    if found.bad:
        lines = []
        for piece, chunk in found.bad:
            begin = int(index.offset[piece]) + (chunk << 20)
            stop = begin + int(index.stored[int(index.first_chunk[piece]) + chunk])
            name = index.names[int(index.tensor[piece])]
            lines.append(f"{name!r}, chunk {chunk}, bytes {begin}..{stop} of {paths[int(index.segment[piece])]}")
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
    if isinstance(error, StorageError) and not is_damage(error):  # the checkpoint may be as it was written
        facts |= {"reason": error.facts.get("reason", "unknown"), "next": error.facts.get("next", _AGAIN)}
        raise StorageError(f"{what}: reading failed part of the way", errno=error.errno, **facts) from error
    raise DamagedError(f"{what}: reading failed part of the way", written=written, **facts, next=_AGAIN) from error


def _targets(
    index: Index, plan: ReadPlan, wanted: Pieces, places: Places
) -> tuple[NDArray[np.uint64], NDArray[np.int64], list[_native.ScatterLayout]]:
    """Each row's address and layout. Most go whole into one run of bytes; the others are looked at one by one."""
    address, layout = places.address[plan.target], np.full(len(plan.target), -1, np.int64)
    layouts: list[_native.ScatterLayout] = []
    made: dict[tuple[int, int], tuple[int, int]] = {}
    strided = np.flatnonzero(np.isin(plan.target, list(places.apart))).tolist()
    for row in sorted({*plan.common, *strided}):
        piece, target = int(plan.piece[row]), int(plan.target[row])
        if (piece, target) not in made:
            # Bytes land as they are stored; what casts has chosen the place for that.
            one = replace(wanted[target], dtype=index.dtypes[int(index.tensor[piece])])
            common = plan.common.get(row, one.box)
            start, scattered = _part(index.box(piece), common, one.box, places.memory(target, one))
            made[piece, target] = (start, -1 if scattered is None else len(layouts))
            layouts += [] if scattered is None else [scattered]
        address[row], layout[row] = made[piece, target]
    return address, layout, layouts


def _devices(plan: ReadPlan, places: Places, devices: Sequence[str]) -> NDArray[np.int32]:
    """Each row's device; -1 for the host."""
    found = np.full(len(places.address), -1, np.int32)
    if devices:
        for position, memory in places.apart.items():
            if memory.device != "cpu":
                found[position] = devices.index(memory.device)
    return found[plan.target]


def _part(stored: Box, common: Box, wanted: Box, memory: Memory) -> tuple[int, _native.ScatterLayout | None]:
    """Where the region `common` of the stored box begins in the wanted box's memory, and how it lies there."""
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
    """Whether a box of this shape lies in the memory as one run of bytes, row-major."""
    part = Memory(None, 0, box.shape, memory.strides_bytes, memory.item_bytes)
    return part.contiguous
