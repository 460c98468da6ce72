"""What a load plan names, read straight into the tensors of the state: the ranges that are wanted, and verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from flowstone.checkpoint import Checkpoint, no_tensor
from flowstone.errors import MismatchError
from flowstone.stage.overlap import LoadTargets, candidates
from flowstone.stage.read_pieces import read_pieces
from flowstone.stage.shared_memory import refuse_conflicts
from flowstone.state import tensors
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Piece, Pieces, Places


class _Wanted(msgspec.Struct, frozen=True, eq=False):
    """One read item, and the tensor that it fills."""

    item: ReadItem
    target: torch.Tensor
    piece: Piece
    memory: Memory
    row: int


class Stored(msgspec.Struct, frozen=True, eq=False):
    """What is read from. `names`: of tensors, in DCP and in the index."""

    checkpoint: Checkpoint
    names: Mapping[str, str]


def read_tensors(stored: Stored, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    """Fill what the planner resolves the items to, and commit each. Blocks.

    raises  DamagedError, which names what has changed; NoTensorError, MismatchError before anything has
    """
    wanted = [_wanted(stored, item, planner) for item in items]
    _fill(stored.checkpoint, [one for one in wanted if one.piece.box.elements])
    for one in wanted:
        planner.commit_tensor(one.item, one.target)


def _wanted(stored: Stored, item: ReadItem, planner: LoadPlanner) -> _Wanted:
    name, index = item.storage_index.fqn, stored.checkpoint.index
    if name not in stored.names:
        raise no_tensor(name, stored.names)
    row = index.rows()[stored.names[name]]
    target = planner.resolve_tensor(item).detach()
    dtype = tensors.check_tensor(target, name)
    begin = item.storage_index.offset or (0,) * len(item.lengths)
    offset = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
    box, shape = Box(offset, tuple(item.lengths)), index.tensors.shapes[row]
    if tuple(target.shape) != box.shape or not box.inside(shape):
        raise MismatchError(
            f"{name!r} is stored with shape {shape}, and {box} of it is to go into a tensor of shape "
            f"{tuple(target.shape)}", next="correct the planner, or the shape of that tensor",
        )
    return _Wanted(item, target, Piece(name, dtype, shape, box), tensors.memory_of(target), row)


def _fill(checkpoint: Checkpoint, wanted: Sequence[_Wanted]) -> None:
    if not wanted:
        return
    pieces, places = Pieces.of([one.piece for one in wanted]), Places.of([one.memory for one in wanted])
    rows, source = [one.row for one in wanted], checkpoint.source

    def read(positions: Sequence[int], fresh: Places) -> None:
        read_pieces(source, pieces.take(positions), fresh, [rows[at] for at in positions], into_state=False)

    targets = LoadTargets(pieces, places, checkpoint.index, rows)
    refuse_conflicts(targets, candidates(targets), read)
    read_pieces(source, pieces, places, rows)
