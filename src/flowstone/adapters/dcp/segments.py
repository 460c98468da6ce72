"""One rank's part of a save: take the items of the rank's plan, and write them as one segment (a safetensors file).

    SavePlan --resolve_items--> CapturedItems --write--> RankReceipt      on every rank; durable once the receipt exists
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

from flowstone._native import Arena
from flowstone.adapters.dcp.target import Target
from flowstone.commit.manifests import path_inside
from flowstone.config import NAME_BYTES_MAX
from flowstone.errors import FlowstoneError, MismatchError
from flowstone.format.manifest import IoRecord, SegmentRow
from flowstone.format.objects import unsupported_error
from flowstone.plan.write import WritePlan, Writer, plan_writes
from flowstone.stage.capture import SegmentHeaders, WriteTarget, start_capture, watch_sources
from flowstone.state import describe
from flowstone.state.names import valid_name
from flowstone.store.base import UNPACED, Store
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Piece, Pieces, Places
from flowstone.torch import tensors


class CapturedItems(msgspec.Struct, frozen=True, eq=False):
    """The data that a rank will write.

    pieces          the pieces: this rank's parts of tensors
    places          the memory of each piece
    rows            for each item of the plan: its number in `pieces`; -1 for an object, and for a part without elements
    objects         the other items: name -> value in its stored form (format/objects.py)
    pickled         names of objects that are bytes made by a custom planner
    keep            owners of the memory
    """

    pieces: Pieces
    places: Places
    rows: Sequence[int]
    objects: Mapping[str, object]
    pickled: tuple[str, ...]
    keep: Sequence[object]


class RankReceipt(msgspec.Struct, frozen=True, eq=False):
    """Describes, for the coordinator, what a rank wrote. DCP sends it like any result of a write.

    names, dtypes, shapes  the tensors of which the rank wrote pieces (parts)
    parts           for each piece: the position of its tensor in `names`
    boxes           for each piece: the region of the tensor that it covers
    segment         for each piece: the position of its segment in `segments`
    offsets         for each piece: its offset in bytes in that segment's file
    digests         digests of all chunks
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


def resolve_items(plan: SavePlan, planner: SavePlanner, *, accept_pickled: bool) -> CapturedItems:
    """Ask the planner for the data of all items of the plan.

    raises  UnsupportedStateError  a tensor or an object cannot be stored; the error names it
    """
    pieces: list[Piece] = []
    memory: list[Memory] = []
    rows: list[int] = []
    values: dict[str, object] = {}
    is_usual = _uses_default_bytes(planner)
    value_of = _object_of if is_usual else _bytes_of if accept_pickled else _refuse_bytes
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
    memory += [described.places.memory(number, piece) for number, piece in enumerate(described.pieces)]
    _check_names(pieces)
    return CapturedItems(
        Pieces.of(pieces), Places.of(memory), rows, described.objects, () if is_usual else tuple(values),
        (values, memory, described),
    )


def _piece_of(item: WriteItem, resolved: object) -> tuple[Piece, Memory]:
    """The piece (part of a tensor) that a write item describes, and its memory."""
    name, data = item.index.fqn, item.tensor_data
    assert data is not None, "only objects have none"
    if not isinstance(resolved, torch.Tensor):
        raise unsupported_error(
            name, resolved, "is not a tensor, but the planner says that it is one", "correct the planner"
        )
    tensor = tensors.resolved(resolved.detach())
    dtype = tensors.check_tensor(tensor, name)
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if tuple(tensor.shape) != box.shape:
        raise MismatchError(
            f"the planner resolves {name!r} to a tensor whose shape differs from its plan",
            expected=box.shape, found=tuple(tensor.shape),
            next="correct the save planner, or do not replace or resize tensors between planning and writing",
        )
    return Piece(name, dtype, tuple(data.size), box), tensors.memory_of(tensor)


def _uses_default_bytes(planner: SavePlanner) -> bool:
    """Whether the planner serializes objects as DCP's default planner does. If so, Flowstone stores the objects
    themselves.
    """
    own = type(planner)
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(own, name) is getattr(DefaultSavePlanner, name) for name in ("resolve_data", "transform_object")
    )


def _object_of(planner: SavePlanner, item: WriteItem) -> object:
    return cast("DefaultSavePlanner", planner).lookup_object(item.index)


def _bytes_of(planner: SavePlanner, item: WriteItem) -> object:
    made = planner.resolve_data(item)
    if not isinstance(made, io.BytesIO):
        raise unsupported_error(item.index.fqn, made, "is not the io.BytesIO that DCP expects", "correct the planner")
    return made.getvalue()


def _refuse_bytes(planner: SavePlanner, item: WriteItem) -> NoReturn:
    raise unsupported_error(
        item.index.fqn, planner, "is turned into bytes by a custom planner, and loading such bytes could run any code",
        "do not override resolve_data and transform_object of DefaultSavePlanner for objects; or pass "
        "accept_pickled=True to FlowstoneWriter and FlowstoneReader to store the bytes unchanged",
    )


def _check_names(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        if not piece.name or not valid_name(piece.name) or len(piece.name.encode()) > NAME_BYTES_MAX:
            raise unsupported_error(
                f"{piece.name:.100}", piece.name, "is not a valid name of a tensor",
                f"rename the tensor: a name is text of 1 to {NAME_BYTES_MAX} bytes without NUL",
            )


class SegmentWriter:
    """Writes one rank's segments. Reuses the plan as long as the pieces (parts of tensors) stay the same."""

    def __init__(self) -> None:
        self._plan: WritePlan | None = None
        self._headers = SegmentHeaders()
        self._rank = -1

    def write(
        self, store: Store, target: Target, captured: CapturedItems, arena: Arena, *, rank: int
    ) -> RankReceipt:
        """Write the rank's segments. Returns once they are durable.

        raises  StorageError, FullError, ...; the segments are removed before the error is raised
        """
        plan = self._plan_of(captured.pieces, rank=rank)
        sources = watch_sources(plan, captured.places, self._headers, watch="auto", seed=target.step)
        writing = start_capture(WriteTarget(store, target.draft_directory, arena), sources, UNPACED, reserved=True)
        rows = [
            SegmentRow(number, None, file.name, file.bytes, file.header_bytes, header)
            for number, (file, header) in enumerate(zip(plan.segments, sources.headers, strict=True))
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
            pieces.parts, numbers, tuple(rows), plan.segment, sources.offsets, receipt.digests, captured.objects,
            captured.pickled, receipt.io,
        )

    def _plan_of(self, pieces: Pieces, *, rank: int) -> WritePlan:
        plan = self._plan
        if plan is None or self._rank != rank or plan.pieces != pieces:
            # Not complete: the commit checks that all ranks together write each element once.
            self._plan = plan = plan_writes(pieces, writer=Writer(rank), is_complete=False)
            self._headers, self._rank = SegmentHeaders(), rank
        return plan


def _remove(store: Store, directory: str, names: Sequence[str]) -> None:
    for name in names:
        try:
            store.remove(path_inside(directory, name))
        except FlowstoneError:
            continue  # readers ignore a file that stays, and the next save to the same target removes it


def no_items() -> CapturedItems:
    """What a rank with an empty state writes."""
    return CapturedItems(Pieces.of([]), Places.of([]), (), {}, (), ())
