"""Assign writers: which rank writes which of the pieces that the ranks of a job hold.

A box is a region of a tensor, a piece the box that a rank holds. Equal boxes of one tensor on several ranks are
replicas: one of these ranks writes the box, chosen so that bytes are spread evenly over nodes and over the ranks of
each node (balanced writers: ByteCheckpoint, arXiv 2407.20143). Each rank may have updated module buffers from its own
batch, so each buffer is written by the lowest rank that holds it. This module also checks that the plan writes every
element exactly once. Two tensors are in one class if they have the same dtype and shape and, on each rank, the same box
as each other (that box may differ from rank to rank). Each class is examined once (class_table.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone.config import SPLIT_BLOCK_BYTES_MIN, SPLIT_WORTH_BYTES
from flowstone.errors import CollisionError, CoverageError
from flowstone.plan.balance import Replicas, balance
from flowstone.plan.class_table import ClassTable, TensorClass
from flowstone.plan.coverage import check_tiling, tiles
from flowstone.plan.layout_groups import Tensors
from flowstone.plan.replicas import ReplicaSets
from flowstone.plan.split_replicas import Blocks, ReplicaSplit, split_replicas
from flowstone.table.box import Box
from flowstone.table.pieces import Pieces

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)  # odd constants: the golden ratio's, and XXH64's
_EVEN = 0.01  # ranks have even loads if the largest load is at most this share above `Balance.level`
_BLOCK = 1 / 128  # length of a block, as a share of `Balance.level`


class WriterAssignment(msgspec.Struct, frozen=True, eq=False):
    """Which rank writes which pieces.

    layouts   for each rank its pieces; long replicas are split into blocks if one writer would have too much to write
    writes    for each rank, the positions in its layout of the pieces that it writes, ascending; ranks with equal
              positions share one array
    bytes     for each rank, the total length of these pieces
    blocks    for each rank, how its pieces were split into blocks; empty if nothing is split
    split     the replicas that are split into blocks; None: no replica
    buffers   number of boxes of module buffers that several ranks hold; the lowest of these ranks writes them
    replicas  pieces that several ranks hold and that must be equal
    """

    layouts: Sequence[Pieces]
    writes: tuple[NDArray[np.int64], ...]
    bytes: NDArray[np.int64]
    blocks: Sequence[Blocks] = ()
    split: ReplicaSplit | None = None
    buffers: int = 0
    replicas: ReplicaSets = msgspec.field(default_factory=lambda: ReplicaSets((), ()))


def assign_writers(
    layouts: Sequence[Pieces], nodes: Sequence[int] | None = None,
    begun: Mapping[int, NDArray[np.int64]] = MappingProxyType({}), *,
    begun_split: ReplicaSplit | None = None, worth_bytes: int = SPLIT_WORTH_BYTES,
    block_bytes_min: int = SPLIT_BLOCK_BYTES_MIN,
) -> WriterAssignment:
    """Choose the rank that writes each distinct piece.

    nodes     the node of each rank; None: all ranks are on one node
    begun     rank -> the pieces that it has already begun to write, by a plan in which `begun_split` was split
    worth_bytes, block_bytes_min  replicas are split into blocks of at least `block_bytes_min` if this reduces the bytes
                                  of the largest writer by `worth_bytes` or more
    raises    CollisionError  a tensor has different dtypes or shapes on two ranks
              CoverageError   boxes of a tensor overlap without being equal, or an element is in no box; or, because of
                              `begun`, an element would be written by no rank
    """
    node = np.zeros(len(layouts), np.int64) if nodes is None else np.asarray(nodes, np.int64)
    if begun_split is not None:
        return replace(_assign_split(layouts, node, begun, begun_split), replicas=_replicas_of(layouts))
    unsplit = _WriterChoice(layouts, node, begun)
    split = None if begun else unsplit.plan_split(worth_bytes, block_bytes_min)
    if split is None:
        return unsplit.assignment
    # The gain may be below the estimate, because nodes with few ranks have as much to write as nodes with many ranks.
    in_blocks = _assign_split(layouts, node, begun, split)
    gained = int(unsplit.assignment.bytes.max()) - int(in_blocks.bytes.max())
    return replace(in_blocks, replicas=unsplit.assignment.replicas) if gained >= worth_bytes else unsplit.assignment


def _assign_split(
    layouts: Sequence[Pieces], node: NDArray[np.int64], begun: Mapping[int, NDArray[np.int64]], split: ReplicaSplit
) -> WriterAssignment:
    split_layouts, blocks = split_replicas(layouts, split)
    return replace(_WriterChoice(split_layouts, node, begun).assignment, blocks=blocks, split=split)


def _replicas_of(layouts: Sequence[Pieces]) -> ReplicaSets:
    table = ClassTable(layouts, {})
    for number in range(table.count):
        tensor_class = table.column(number)
        table.record_replicas(tensor_class, _groups(tensor_class.box)[0])
    return table.replicas(len(layouts))


def check_replicas(layouts: Sequence[Pieces], digests: Sequence[NDArray[np.uint64] | None]) -> None:
    """Raise CollisionError for boxes that several ranks hold and whose digests differ.

    digests  for each rank, a digest of each of its pieces, or of samples of it that all ranks choose alike; 0: unknown.
             None for a rank whose digests are unknown
    """
    table = ClassTable(layouts, {})
    differing: dict[str, tuple[int, list[int]]] = {}
    for number in range(table.count):
        tensor_class = table.column(number)
        if tensor_class.tensor not in table.tensors.buffers:
            table.compare_replicas(number, _groups(tensor_class.box)[0], digests, differing)
    if differing:
        name = min(differing, key=table.tensors.names.index)
        first, others = differing[name]
        more = f"; {len(differing) - 1} other tensors differ, too" if len(differing) > 1 else ""
        raise CollisionError(
            f"{name!r} is not the same on {_in_words(others)} as on rank {first}{more}",
            next="if these tensors should be equal, make them equal before the save; if they should differ, give them "
            "different names (in pipeline stages and experts, with the number that the layer or expert has in the "
            "full model), or save one value per rank with fs.PerRank",
        )


def _in_words(ranks: Sequence[int]) -> str:
    """Ranks as text: "rank 3", or "ranks 3, 7". At most eight ranks are named."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


class _WriterChoice:
    """Chooses the writers of all pieces, and reports whether, if replicas were split into blocks, the ranks would write
    more equal numbers of bytes.
    """

    def __init__(
        self, layouts: Sequence[Pieces], node: NDArray[np.int64], begun: Mapping[int, NDArray[np.int64]]
    ) -> None:
        self._table = table = ClassTable(layouts, begun)
        loads = np.zeros(len(layouts), np.int64)
        sets: dict[bytes, _ReplicaSet] = {}
        buffers = 0
        for number in range(table.count):
            tensor_class = table.column(number)
            group, first = _groups(tensor_class.box)
            _check_covered(table.tensors, tensor_class, first)
            table.record_replicas(tensor_class, group)
            length = _lengths(table.tensors, tensor_class, first)
            order, count = _choices(table.tensors, tensor_class, group, len(first))
            starts = np.cumsum(count) - count
            if tensor_class.tensor in table.tensors.buffers:
                buffers += tensor_class.size * int((np.bincount(group) > 1).sum())
                order, count, starts = order[starts], np.ones_like(count), np.arange(len(count))
            alone = order[starts[count == 1]]
            table.stop[tensor_class.row[alone]] = tensor_class.size
            np.add.at(loads, tensor_class.rank[alone], tensor_class.size * length[count == 1])
            for i in np.flatnonzero(count > 1).tolist():
                rows = order[starts[i] : starts[i] + count[i]]
                ranks = tensor_class.rank[rows]
                replica_set = sets.setdefault(ranks.tobytes(), _ReplicaSet(ranks))
                batch = _ReplicaBatch(int(length[i]), tensor_class.size, tensor_class.row[rows], number)
                replica_set.batches.append(batch)
        self._sets = list(sets.values())
        self._level = _balance(self._sets, loads, node, table)
        self.assignment = WriterAssignment(
            layouts, table.writes(len(layouts)), loads, buffers=buffers, replicas=table.replicas(len(layouts))
        )

    def plan_split(self, worth_bytes: int, block_bytes_min: int) -> ReplicaSplit | None:
        """Which replicas to split into blocks; None if splitting gains too little."""
        largest = int(self.assignment.bytes.max(initial=0))
        if largest - self._level < max(worth_bytes, _EVEN * self._level):
            return None
        block_bytes = max(block_bytes_min, int(self._level * _BLOCK))
        shares = np.zeros(self._table.count)
        for replica_set in self._sets:
            part = sum(batch.length * batch.size for batch in replica_set.batches) / len(replica_set.ranks)
            for batch in replica_set.batches:
                if batch.length > 2 * block_bytes:
                    # Full pieces make loads uneven by half a piece on average. To even them out, about one piece for
                    # each rank is split into blocks.
                    shares[batch.number] = max(shares[batch.number], min(1.0, batch.length / part))
        names = self._table.choose_share(shares)
        return ReplicaSplit(names, 2 * block_bytes, block_bytes) if names else None


class _ReplicaBatch(msgspec.Struct, frozen=True, eq=False):
    """The same box in each tensor of one class. The same ranks hold a replica of it. (See ClassTable for classes.)

    length  length of the box, in bytes
    size    number of tensors in the class
    row     for each of these ranks, the number of the row in the ClassTable that says which of the tensors it writes
    number  number of the class
    """

    length: int
    size: int
    row: NDArray[np.int64]
    number: int


class _ReplicaSet(msgspec.Struct, frozen=True, eq=False):
    """Ranks that hold the same replicas."""

    ranks: NDArray[np.int64]
    batches: list[_ReplicaBatch] = msgspec.field(default_factory=list)


def _groups(boxes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group equal boxes. Returns for each row of `boxes` the number of its group, and for each group its first row."""
    columns = boxes.astype(np.uint64)
    key = np.zeros(len(columns), np.uint64)
    for column in columns.T:
        key = (key ^ column) * _MIX[0]
        key ^= key >> np.uint64(29)
        key *= _MIX[1]
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    if not (columns == columns[first][group]).all():  # different boxes have equal keys, by chance
        _, first, group = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    return group.reshape(-1), first


def _lengths(tensors: Tensors, tensor_class: TensorClass, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The lengths, in bytes, of the boxes in these rows of the class."""
    width, ndim = tensor_class.box.shape[1] // 2, len(tensors.shapes[tensor_class.tensor])
    elements: NDArray[np.int64] = tensor_class.box[rows, width : width + ndim].prod(axis=1)
    return elements * tensors.dtypes[tensor_class.tensor].item_bytes


def _choices(
    tensors: Tensors, tensor_class: TensorClass, group: NDArray[np.int64], groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each group of equal boxes, the rows of the ranks that may write it, ordered by group and rank; and how many
    rows each group has.

    If a rank has begun to write a group, only that rank may write it. Otherwise, every rank that holds its box, and has
    not begun to write, may write it.
    """
    order = np.lexsort((tensor_class.rank, group))
    if tensor_class.has_begun is None or tensor_class.is_written is None:
        return order, np.bincount(group, minlength=groups)
    name = tensors.names[tensor_class.tensor]
    taken = np.bincount(group[tensor_class.is_written], minlength=groups)
    if (taken > 1).any():
        raise CoverageError(
            f"two ranks are writing the same elements of {name!r}", next="save again: the next save makes a new plan"
        )
    usable = tensor_class.is_written | ~(tensor_class.has_begun | (taken > 0)[group])
    count = np.bincount(group[usable], minlength=groups)
    if (count == 0).any():
        raise CoverageError(
            f"no rank writes {name!r}: all ranks that hold it began to write with a plan that lacks it",
            next="save again: the next save makes a new plan",
        )
    return order[usable[order]], count


def _check_covered(tensors: Tensors, tensor_class: TensorClass, first: NDArray[np.int64]) -> None:
    """Raise CoverageError unless the distinct boxes of a class cover each element of its tensors exactly once."""
    shape = tensors.shapes[tensor_class.tensor]
    width = tensor_class.box.shape[1] // 2
    offset, sides = tensor_class.box[first, : len(shape)], tensor_class.box[first, width : width + len(shape)]
    if not tiles(offset, sides, shape):
        # The boxes are not aligned, which is rare: check them one by one, which is slow. Raises if something is wrong.
        boxes = [Box(tuple(o), tuple(n)) for o, n in zip(offset.tolist(), sides.tolist(), strict=True)]
        check_tiling(tensors.names[tensor_class.tensor], shape, [box for box in boxes if box.elements])


def _balance(
    sets: Sequence[_ReplicaSet], loads: NDArray[np.int64], node: NDArray[np.int64], table: ClassTable
) -> float:
    """Choose the writers of the replicas. Adds their bytes to `loads`, and enters the choice into the table.

    Returns how many bytes the rank with the largest load would write if replicas could be split at any element.
    """
    all_replicas = []
    for replica_set in sets:
        replica_set.batches.sort(key=lambda batch: -batch.length)
        length, first = np.unique([-batch.length for batch in replica_set.batches], return_index=True)
        size = np.add.reduceat(np.array([batch.size for batch in replica_set.batches], np.int64), first)
        all_replicas.append(Replicas(replica_set.ranks, -length, size))
    if not all_replicas:
        return float(loads.max(initial=0))
    chosen = balance(all_replicas, loads, node)
    for replica_set, replicas, counts in zip(sets, all_replicas, chosen.counts, strict=True):
        loads[replica_set.ranks] += replicas.length @ counts
        _assign_counts(replica_set.batches, replicas, counts, table)
    return chosen.level


def _assign_counts(
    batches: Sequence[_ReplicaBatch], replicas: Replicas, counts: NDArray[np.int64], table: ClassTable
) -> None:
    """Assign pieces of one length to ranks. `counts`: how many each rank gets. A rank gets consecutive pieces, in the
    order of the batches.
    """
    stops = dict(zip(replicas.length.tolist(), np.cumsum(counts, axis=1), strict=True))
    starts = {length: stops[length] - row for length, row in zip(replicas.length.tolist(), counts, strict=True)}
    done = dict.fromkeys(stops, 0)
    for batch in batches:
        before = done[batch.length]
        table.start[batch.row] = np.clip(starts[batch.length] - before, 0, batch.size)
        table.stop[batch.row] = np.clip(stops[batch.length] - before, 0, batch.size)
        done[batch.length] += batch.size

