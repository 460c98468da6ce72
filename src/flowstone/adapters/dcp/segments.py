"""One rank's part of a save: what its plan names is captured, and written as one segment, by the pipeline's own stages.

    SavePlan --held_of--> Held --write--> RankReceipt      on every rank; durable once the receipt is there
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import NoReturn, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from flowstone import _native
from flowstone.adapters.dcp.target import Target
from flowstone.commit.manifests import inside
from flowstone.config import NAME_BYTES_MAX
from flowstone.errors import FlowstoneError, MismatchError
from flowstone.format.manifest import IoRecord, SegmentRow
from flowstone.format.objects import unsupported
from flowstone.plan.write import WritePlan, Writer, plan_writes
from flowstone.stage.capture import Headers, WriteTarget, start_capture, watch_sources
from flowstone.state import describe, tensors
from flowstone.state.names import valid_name
from flowstone.store.base import UNPACED, Store
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Piece, Pieces, Places


class Held(msgspec.Struct, frozen=True, eq=False):
    """What a rank is to write.

    pieces, places  parallel: what there is, and where it lies
    rows            of each item of the plan: its piece; -1 for an object, and for a part without elements
    objects         of each item that is no tensor, by its name: its node, as format/objects.py encodes it
    pickled         names of those that are bytes which a planner of the user's has made
    keep            what owns the memory
    """

    pieces: Pieces
    places: Places
    rows: Sequence[int]
    objects: Mapping[str, object]
    pickled: tuple[str, ...]
    keep: Sequence[object]


class RankReceipt(msgspec.Struct, frozen=True, eq=False):
    """What a rank has written, as the coordinator learns it. Travels as DCP lets results travel.

    names, dtypes, shapes, parts, boxes  the pieces' columns
    segment         of each piece: its position among `segments`
    offsets         of each piece, in bytes in that segment's file
    digests         of all chunks
    """

    rank: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: NDArray[np.int64]
    boxes: NDArray[np.int64]
    segments: tuple[SegmentRow, ...]
    segment: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    digests: NDArray[np.uint64]
    objects: Mapping[str, object]
    pickled: tuple[str, ...]
    io: IoRecord


def held_of(plan: SavePlan, planner: SavePlanner, *, accept_pickled: bool) -> Held:
    """Ask the planner for all that the plan names.

    raises  UnsupportedStateError, by name: a tensor or an object that cannot be stored
    """
    pieces: list[Piece] = []
    memory: list[Memory] = []
    rows: list[int] = []
    values: dict[str, object] = {}
    is_usual = _takes_values_as_they_are(planner)
    value_of = _looked_up if is_usual else _made_into_bytes if accept_pickled else _refused
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            values[item.index.fqn] = value_of(planner, item)
            rows.append(-1)
            continue
        piece, place = _piece_of(item, planner.resolve_data(item))
        is_nothing = 0 in piece.box.shape and 0 not in piece.shape
        rows.append(-1 if is_nothing else len(pieces))
        if not is_nothing:
            pieces.append(piece)
            memory.append(place)
    described = describe(values, anew=True)
    pieces += described.pieces
    memory += [described.places.memory(at, piece) for at, piece in enumerate(described.pieces)]
    _check_names(pieces)
    return Held(
        Pieces.of(pieces), Places.of(memory), rows, described.objects, () if is_usual else tuple(values),
        (values, memory, described),
    )


def _piece_of(item: WriteItem, resolved: object) -> tuple[Piece, Memory]:
    """The piece that a write item is, and where it lies."""
    name, said = item.index.fqn, item.tensor_data
    assert said is not None, "only objects have none"
    if not isinstance(resolved, torch.Tensor):
        raise unsupported(name, resolved, "is no tensor, and its planner said that it is one", "correct the planner")
    tensor = tensors.resolved(resolved.detach())
    dtype = tensors.check_tensor(tensor, name)
    box = Box(tuple(said.chunk.offsets), tuple(said.chunk.sizes))
    if tuple(tensor.shape) != box.shape:
        raise MismatchError(
            f"the planner resolves {name!r} to a tensor of another shape than it has planned", expected=box.shape,
            found=tuple(tensor.shape), next="correct the planner, or flatten the state anew",
        )
    return Piece(name, dtype, tuple(said.size), box), tensors.memory_of(tensor)


def _takes_values_as_they_are(planner: SavePlanner) -> bool:
    """Whether the bytes that a planner makes of objects are DCP's usual ones: then we ask for the objects instead."""
    own = type(planner)
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(own, name) is getattr(DefaultSavePlanner, name) for name in ("resolve_data", "transform_object")
    )


def _looked_up(planner: SavePlanner, item: WriteItem) -> object:
    return cast("DefaultSavePlanner", planner).lookup_object(item.index)


def _made_into_bytes(planner: SavePlanner, item: WriteItem) -> object:
    made = planner.resolve_data(item)
    if not isinstance(made, io.BytesIO):
        raise unsupported(item.index.fqn, made, "is no io.BytesIO, as DCP wants it", "correct the planner")
    return made.getvalue()


def _refused(planner: SavePlanner, item: WriteItem) -> NoReturn:
    raise unsupported(
        item.index.fqn, planner, "is made into bytes by a planner of its own, so that it could be any code",
        "leave resolve_data and transform_object to DefaultSavePlanner for what is no tensor; or pass "
        "accept_pickled=True to FlowstoneWriter and FlowstoneReader, to keep the bytes as they are",
    )


def _check_names(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        if not piece.name or not valid_name(piece.name) or len(piece.name.encode()) > NAME_BYTES_MAX:
            raise unsupported(
                f"{piece.name:.100}", piece.name, "cannot be the name of a tensor",
                f"rename it: text of 1 to {NAME_BYTES_MAX} bytes without NUL",
            )


class SegmentWriter:
    """Writes one rank's segments, save after save: of the same pieces by the same plan."""

    def __init__(self) -> None:
        self._plan: WritePlan | None = None
        self._headers = Headers()
        self._rank = -1

    def write(
        self, store: Store, target: Target, held: Held, arena: _native.Arena, *, rank: int
    ) -> RankReceipt:
        """Blocks until the rank's segments are durable.

        raises  StorageError, FullError, ...: nothing of it is left then
        """
        plan = self._plan_of(held.pieces, rank=rank)
        sources = watch_sources(plan, held.places, self._headers, watch="auto", seed=target.step)
        writing = start_capture(WriteTarget(store, target.draft_directory, arena), sources, UNPACED, reserved=True)
        rows = [
            SegmentRow(at, None, file.name, file.bytes, file.header_bytes, header)
            for at, (file, header) in enumerate(zip(plan.segments, sources.headers, strict=True))
        ]
        receipt = writing.receipt()
        if receipt.error is not None:
            _remove(store, target.draft_directory, [row.name for row in rows])
            raise receipt.error
        pieces = plan.pieces
        assert isinstance(pieces, Pieces)
        numbers, _ = pieces.part_numbers()
        return RankReceipt(
            rank, pieces.names, tuple(dtype.name for dtype in pieces.dtypes), tuple(map(tuple, pieces.shapes)),
            pieces.parts, numbers, tuple(rows), plan.segment, sources.offsets, receipt.digests, held.objects,
            held.pickled, receipt.io,
        )

    def _plan_of(self, pieces: Pieces, *, rank: int) -> WritePlan:
        known = self._plan
        if known is None or self._rank != rank or known.pieces != pieces:
            # Whether all ranks together write each element once is found out before the commit.
            self._plan = known = plan_writes(pieces, writer=Writer(rank), alone=False)
            self._headers, self._rank = Headers(), rank
        return known


def _remove(store: Store, directory: str, names: Sequence[str]) -> None:
    for name in names:
        try:
            store.remove(inside(directory, name))
        except FlowstoneError:
            continue  # safe: a draft is never read, and the next save to the same target empties it


def held_nothing() -> Held:
    """What is written of a state in which there is nothing."""
    return Held(Pieces.of([]), Places.of([]), (), {}, (), ())
