"""Read the data of a load plan directly into the tensors of the state, and verify it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import torch
from msgspec.structs import replace
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from flowstone.errors import MismatchError
from flowstone.reading.checkpoint import Checkpoint, no_tensor
from flowstone.stage.overlap import LoadTargets, find_overlap_groups
from flowstone.stage.read_pieces import read_pieces
from flowstone.stage.shared_memory import refuse_conflicts
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Piece, Pieces, Places
from flowstone.torch import tensors
from flowstone.torch.untie import Keys, ReplaceableEntries, new_memory


class _TensorRead(msgspec.Struct, frozen=True, eq=False):
    """An item of DCP's load plan, and the tensor that it fills.

    replaces  where to put `target` in the planner's state after the read; None: `target` is already there
    """

    item: ReadItem
    target: torch.Tensor
    piece: Piece
    memory: Memory
    row: int
    replaces: tuple[ReplaceableEntries, Keys] | None = None


class NamedCheckpoint(msgspec.Struct, frozen=True, eq=False):
    """The checkpoint to read from. `names`: DCP's name of a tensor -> its name in the index."""

    checkpoint: Checkpoint
    names: Mapping[str, str]


def read_tensors(stored: NamedCheckpoint, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    """Fill the planner's tensors for these items, and call the planner's `commit_tensor` for each. Blocks.

    raises  DamagedError  bytes are damaged; the error names the tensors that were changed
            NoTensorError, MismatchError  raised before any tensor is changed
    """
    reads = [_wanted(stored, item, planner) for item in items]
    unlike = _differing_ties(stored, reads)
    if unlike and isinstance(planner, DefaultLoadPlanner):
        reads = _untie(planner, reads, unlike)
    _fill(stored.checkpoint, [read for read in reads if read.piece.box.elements])
    for read in reads:
        planner.commit_tensor(read.item, read.target)
        if read.replaces is not None:
            read.replaces[0].put(read.replaces[1], read.target)


def _wanted(stored: NamedCheckpoint, item: ReadItem, planner: LoadPlanner) -> _TensorRead:
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
            f"the planner reads {box} of {name!r}, stored with shape {shape}, into a tensor of shape "
            f"{tuple(target.shape)}", next="correct the planner, or the shape of that tensor",
        )
    return _TensorRead(item, target, Piece(name, dtype, shape, box), tensors.memory_of(target), row)


def _differing_ties(stored: NamedCheckpoint, reads: Sequence[_TensorRead]) -> list[int]:
    """The positions of the items that would fill the same memory as an earlier item, but with other stored values."""
    first: dict[object, int] = {}
    unlike: list[int] = []
    for position, read in enumerate(reads):
        memory = read.memory
        identity = memory.address, memory.shape, memory.strides_bytes, memory.device, read.target.dtype
        row = first.setdefault(identity, read.row)
        if row != read.row and read.piece.box.elements and not stored.checkpoint.index.equal(row, read.row):
            unlike.append(position)
    return unlike


def _untie(planner: DefaultLoadPlanner, reads: Sequence[_TensorRead], unlike: Sequence[int]) -> list[_TensorRead]:
    """Change the reads of the items at the positions `unlike` (see `_differing_ties`): each goes into a new tensor, if
    the planner's state can hold one. Returns all reads. `_fill` refuses those that still conflict.
    """
    entries, result = ReplaceableEntries(planner.original_state_dict), list(reads)
    names = [read.item.dest_index.fqn for read in reads]
    keys = [planner.mappings.get(name, (name,)) for name in names]
    replaceable = entries.find_replaceable(zip(keys, [read.target for read in reads], strict=True))
    items = Counter(names)
    for position in unlike:
        read = reads[position]
        if keys[position] in replaceable and items[names[position]] == 1:  # the item is not a part of a tensor
            target = new_memory(read.target)
            replaces = entries, keys[position]
            result[position] = replace(read, target=target, memory=tensors.memory_of(target), replaces=replaces)
    return result


def _fill(checkpoint: Checkpoint, reads: Sequence[_TensorRead]) -> None:
    if not reads:
        return
    pieces, places = Pieces.of([item.piece for item in reads]), Places.of([item.memory for item in reads])
    rows, source = [item.row for item in reads], checkpoint.source

    def read(positions: Sequence[int], fresh: Places) -> None:
        read_pieces(source, pieces.take(positions), fresh, [rows[position] for position in positions], into_state=False)

    targets = LoadTargets(pieces, places, checkpoint.index, rows)
    refuse_conflicts(targets, find_overlap_groups(targets), read)
    read_pieces(source, pieces, places, rows)
