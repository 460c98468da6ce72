"""Assign writers: which rank writes which of the pieces that the ranks of a job hold.

Equal boxes of one tensor on several ranks are replicas: one of them is written, chosen so that bytes are spread over
nodes and over their ranks (balanced writers: ByteCheckpoint, arXiv 2407.20143). Each rank may have updated module
buffers from its own batch, so all buffers are taken from the lowest rank that holds them. This module also checks, for
the very plan that is used, that every element is written exactly once. Tensors that have the same boxes on every rank
form a class, and each class is examined once (class_table.py).
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

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)  # odd constants of golden ratio and XXH64
_EVEN = 0.01  # of the smallest possible load of the largest writer: within that, loads count as even
_BLOCK = 1 / 128  # of the same: the length of a block


class WriterAssignment(msgspec.Struct, frozen=True, eq=False):
    """Which rank writes which pieces.

    layouts  the layout of each rank; long replicas are split into blocks, where one writer would have too much
    writes   for each rank, positions of its pieces in its layout, ascending; ranks that write alike share one array
    bytes    for each rank, the length of those pieces
    blocks   for each rank, how its layout was made from its pieces; empty if nothing is split
    split    which replicas are split; None: none
    buffers  number of boxes of module buffers that several ranks hold, written by the lowest of them
    replicas  pieces that several ranks hold, and that must be equal
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
    kept: Mapping[int, NDArray[np.int64]] = MappingProxyType({}), *,
    kept_split: ReplicaSplit | None = None, worth_bytes: int = SPLIT_WORTH_BYTES,
    block_bytes_min: int = SPLIT_BLOCK_BYTES_MIN,
) -> WriterAssignment:
    """Choose a writer for each distinct piece.

    nodes     the node of each rank; None: all on one
    kept      rank -> what it writes in any case: it has begun, by a plan that split `kept_split`
    worth_bytes, block_bytes_min  replicas are split, into blocks of at least that many bytes, if that takes
                                  `worth_bytes` or more off the largest writer
    raises    CollisionError  two ranks give one tensor different dtypes or shapes
              CoverageError   a tensor's boxes overlap without being equal, or leave a hole; or `kept` leaves one
    """
    node = np.zeros(len(layouts), np.int64) if nodes is None else np.asarray(nodes, np.int64)
    if kept_split is not None:
        return replace(_assign_split(layouts, node, kept, kept_split), replicas=_replicas_of(layouts))
    found = _Assigning(layouts, node, kept)
    split = None if kept else found.to_split(worth_bytes, block_bytes_min)
    if split is None:
        return found.assignment
    # The gain may be less than estimated: nodes of few ranks have as much to write as those of many.
    in_blocks = _assign_split(layouts, node, kept, split)
    gained = int(found.assignment.bytes.max()) - int(in_blocks.bytes.max())
    return replace(in_blocks, replicas=found.assignment.replicas) if gained >= worth_bytes else found.assignment


def _assign_split(
    layouts: Sequence[Pieces], node: NDArray[np.int64], kept: Mapping[int, NDArray[np.int64]], split: ReplicaSplit
) -> WriterAssignment:
    split_layouts, blocks = split_replicas(layouts, split)
    return replace(_Assigning(split_layouts, node, kept).assignment, blocks=blocks, split=split)


def _replicas_of(layouts: Sequence[Pieces]) -> ReplicaSets:
    table = ClassTable(layouts, {})
    for number in range(table.count):
        one = table.column(number)
        table.note_replicas(one, _groups(one.box)[0])
    return table.replicas(len(layouts))


def check_replicas(layouts: Sequence[Pieces], digests: Sequence[NDArray[np.uint64] | None]) -> None:
    """Raise CollisionError for boxes that several ranks hold and whose digests differ.

    digests  for each rank that has any: for each piece one of its bytes, or of the same few of them; 0 if it is unknown
    """
    table = ClassTable(layouts, {})
    found: dict[str, tuple[int, list[int]]] = {}
    for number in range(table.count):
        one = table.column(number)
        if one.tensor not in table.tensors.buffers:
            table.compare_replicas(number, _groups(one.box)[0], digests, found)
    if found:
        name = min(found, key=table.tensors.names.index)
        first, others = found[name]
        more = f"; nor are {len(found) - 1} other tensors" if len(found) > 1 else ""
        raise CollisionError(
            f"{name!r} is not the same on {_in_words(others)} as on rank {first}{more}",
            next="if these are not replicas, give each a name of its own (stages and experts: global names); else "
            "make them equal before the save, or keep each rank's own with fs.PerRank",
        )


def _in_words(ranks: Sequence[int]) -> str:
    """"rank 3", "ranks 3, 7"; at most eight of them."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


class _Assigning:
    """An assignment of writers, and whether blocks would improve it."""

    def __init__(
        self, layouts: Sequence[Pieces], node: NDArray[np.int64], kept: Mapping[int, NDArray[np.int64]]
    ) -> None:
        self._table = table = ClassTable(layouts, kept)
        loads = np.zeros(len(layouts), np.int64)
        sets: dict[bytes, _ReplicaSet] = {}
        buffers = 0
        for number in range(table.count):
            one = table.column(number)
            group, first = _groups(one.box)
            _check_covered(table.tensors, one, first)
            table.note_replicas(one, group)
            length = _lengths(table.tensors, one, first)
            order, count = _choices(table.tensors, one, group, len(first))
            starts = np.cumsum(count) - count
            if one.tensor in table.tensors.buffers:
                buffers += one.size * int((np.bincount(group) > 1).sum())
                order, count, starts = order[starts], np.ones_like(count), np.arange(len(count))
            alone = order[starts[count == 1]]
            table.stop[one.row[alone]] = one.size
            np.add.at(loads, one.rank[alone], one.size * length[count == 1])
            for at in np.flatnonzero(count > 1).tolist():
                rows = order[starts[at] : starts[at] + count[at]]
                ranks = one.rank[rows]
                known = sets.setdefault(ranks.tobytes(), _ReplicaSet(ranks))
                known.batches.append(_ReplicaBatch(int(length[at]), one.size, one.row[rows], number))
        self._sets = list(sets.values())
        self._level = _balance(self._sets, loads, node, table)
        self.assignment = WriterAssignment(
            layouts, table.writes(len(layouts)), loads, buffers=buffers, replicas=table.replicas(len(layouts))
        )

    def to_split(self, worth_bytes: int, block_bytes_min: int) -> ReplicaSplit | None:
        """Which replicas to split; None if that gains too little."""
        largest = int(self.assignment.bytes.max(initial=0))
        if largest - self._level < max(worth_bytes, _EVEN * self._level):
            return None
        block_bytes = max(block_bytes_min, int(self._level * _BLOCK))
        shares = np.zeros(self._table.count)
        for one in self._sets:
            part = sum(batch.length * batch.size for batch in one.batches) / len(one.ranks)
            for batch in one.batches:
                if batch.length > 2 * block_bytes:
                    # Whole pieces leave gaps of half their length on average: split that much to fill them.
                    shares[batch.number] = max(shares[batch.number], min(1.0, batch.length / part))
        names = self._table.some_of(shares)
        return ReplicaSplit(names, 2 * block_bytes, block_bytes) if names else None


class _ReplicaBatch(msgspec.Struct, frozen=True, eq=False):
    """Equal boxes of all tensors of a class, held by the same ranks.

    length  of each, in bytes
    size    number of tensors
    row     for each of the ranks, its row of the table, which says which tensors it writes
    number  of the class
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
    """For each row its group of equal boxes, and the first row of each group."""
    columns = boxes.astype(np.uint64)
    key = np.zeros(len(columns), np.uint64)
    for column in columns.T:
        key = (key ^ column) * _MIX[0]
        key ^= key >> np.uint64(29)
        key *= _MIX[1]
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    if not (columns == columns[first][group]).all():  # a collision: different boxes have equal keys
        _, first, group = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    return group.reshape(-1), first


def _lengths(tensors: Tensors, one: TensorClass, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The length of the boxes of these rows, in bytes."""
    width, ndim = one.box.shape[1] // 2, len(tensors.shapes[one.tensor])
    elements: NDArray[np.int64] = one.box[rows, width : width + ndim].prod(axis=1)
    return elements * tensors.dtypes[one.tensor].item_bytes


def _choices(
    tensors: Tensors, one: TensorClass, group: NDArray[np.int64], groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The candidate rows, by group and rank, and their number for each group.

    A group that a rank has begun to write has that one candidate; other groups those of ranks that have not begun.
    """
    order = np.lexsort((one.rank, group))
    if one.begun is None or one.wrote is None:
        return order, np.bincount(group, minlength=groups)
    name = tensors.names[one.tensor]
    taken = np.bincount(group[one.wrote], minlength=groups)
    if (taken > 1).any():
        raise CoverageError(f"two ranks are writing {name!r}", next="save again: the next save makes a new plan")
    usable = one.wrote | ~(one.begun | (taken > 0)[group])
    count = np.bincount(group[usable], minlength=groups)
    if (count == 0).any():
        raise CoverageError(
            f"{name!r} is held only by ranks that have begun to write without it",
            next="save again: the next save makes a new plan",
        )
    return order[usable[order]], count


def _check_covered(tensors: Tensors, one: TensorClass, first: NDArray[np.int64]) -> None:
    """Raise CoverageError unless the distinct boxes of a class cover each element of its tensors exactly once."""
    shape = tensors.shapes[one.tensor]
    width = one.box.shape[1] // 2
    offset, sides = one.box[first, : len(shape)], one.box[first, width : width + len(shape)]
    if not tiles(offset, sides, shape):
        # Rare and slow: boxes that do not line up. Raises if something is wrong.
        boxes = [Box(tuple(o), tuple(n)) for o, n in zip(offset.tolist(), sides.tolist(), strict=True)]
        check_tiling(tensors.names[one.tensor], shape, [box for box in boxes if box.elements])


def _balance(
    sets: Sequence[_ReplicaSet], loads: NDArray[np.int64], node: NDArray[np.int64], table: ClassTable
) -> float:
    """Choose the writers of the replicas. Fills `loads` and the table.

    Returns the bytes of the largest writer if replicas could be split at any element.
    """
    found = []
    for one in sets:
        one.batches.sort(key=lambda batch: -batch.length)
        length, first = np.unique([-batch.length for batch in one.batches], return_index=True)
        size = np.add.reduceat(np.array([batch.size for batch in one.batches], np.int64), first)
        found.append(Replicas(one.ranks, -length, size))
    if not found:
        return float(loads.max(initial=0))
    chosen = balance(found, loads, node)
    for one, replicas, counts in zip(sets, found, chosen.counts, strict=True):
        loads[one.ranks] += replicas.length @ counts
        _assign_counts(one.batches, replicas, counts, table)
    return chosen.level


def _assign_counts(
    batches: Sequence[_ReplicaBatch], replicas: Replicas, counts: NDArray[np.int64], table: ClassTable
) -> None:
    """Give each rank its count of pieces of one length, consecutive over all batches of that length."""
    stops = dict(zip(replicas.length.tolist(), np.cumsum(counts, axis=1), strict=True))
    starts = {length: stops[length] - row for length, row in zip(replicas.length.tolist(), counts, strict=True)}
    done = dict.fromkeys(stops, 0)
    for batch in batches:
        before = done[batch.length]
        table.start[batch.row] = np.clip(starts[batch.length] - before, 0, batch.size)
        table.stop[batch.row] = np.clip(stops[batch.length] - before, 0, batch.size)
        done[batch.length] += batch.size

