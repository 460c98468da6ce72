"""What a load plan names, read straight into the tensors of the state: the ranges that are wanted, and verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import torch
from msgspec.structs import replace
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from flowstone.checkpoint import Checkpoint, no_tensor
from flowstone.errors import MismatchError
from flowstone.stage.overlap import LoadTargets, candidates
from flowstone.stage.read_pieces import read_pieces
from flowstone.stage.shared_memory import refuse_conflicts
from flowstone.state import tensors
from flowstone.state.untie import Keys, ReplaceableEntries, new_memory
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Piece, Pieces, Places


class _Wanted(msgspec.Struct, frozen=True, eq=False):
    """One read item, and the tensor that it fills.

    replaces  the entry of the planner's state that `target` is put into after the read; None: it is there already
    """

    item: ReadItem
    target: torch.Tensor
    piece: Piece
    memory: Memory
    row: int
    replaces: tuple[ReplaceableEntries, Keys] | None = None


class Stored(msgspec.Struct, frozen=True, eq=False):
    """What is read from. `names`: of tensors, in DCP and in the index."""

    checkpoint: Checkpoint
    names: Mapping[str, str]


def read_tensors(stored: Stored, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    """Fill what the planner resolves the items to, and commit each. Blocks.

    raises  DamagedError, which names what has changed; NoTensorError, MismatchError before anything has
    """
    wanted = [_wanted(stored, item, planner) for item in items]
    unlike = _tied_unlike(stored, wanted)
    if unlike and isinstance(planner, DefaultLoadPlanner):
        wanted = _untie(planner, wanted, unlike)
    _fill(stored.checkpoint, [one for one in wanted if one.piece.box.elements])
    for one in wanted:
        planner.commit_tensor(one.item, one.target)
        if one.replaces is not None:
            one.replaces[0].put(one.replaces[1], one.target)


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


def _tied_unlike(stored: Stored, wanted: Sequence[_Wanted]) -> list[int]:
    """Positions of the items that fill the same memory as an earlier one, with other stored values."""
    first: dict[object, int] = {}
    unlike: list[int] = []
    for at, one in enumerate(wanted):
        memory = one.memory
        identity = memory.address, memory.shape, memory.strides_bytes, memory.device, one.target.dtype
        row = first.setdefault(identity, one.row)
        if row != one.row and one.piece.box.elements and not stored.checkpoint.index.equal(row, one.row):
            unlike.append(at)
    return unlike


def _untie(planner: DefaultLoadPlanner, wanted: Sequence[_Wanted], unlike: Sequence[int]) -> list[_Wanted]:
    """The same, with memory of their own for those that can be replaced in the planner's state."""
    entries, found = ReplaceableEntries(planner.original_state_dict), list(wanted)
    names = [one.item.dest_index.fqn for one in wanted]
    keys = [planner.mappings.get(name, (name,)) for name in names]
    replaceable = entries.among(zip(keys, [one.target for one in wanted], strict=True))
    items = Counter(names)
    for at in unlike:
        one = wanted[at]
        if keys[at] in replaceable and items[names[at]] == 1:  # no part of a tensor
            target = new_memory(one.target)
            found[at] = replace(one, target=target, memory=tensors.memory_of(target), replaces=(entries, keys[at]))
    return found


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
