"""Sharing: which rank writes which of the pieces that the ranks of a job hold.

Equal boxes of one tensor on several ranks are replicas: one of them is written, and the choice spreads the bytes over
nodes and over their ranks, heaviest first (balanced writers: ByteCheckpoint, arXiv 2407.20143). That every element is
written exactly once is proved here, for the very plan that is used.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from flowstone.errors import CollisionError, CoverageError
from flowstone.pieces import Box, DType
from flowstone.plan.boxes import check_tiling

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)  # odd constants of golden ratio and XXH64


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """What pieces are but for their boxes. Ranks that hold parts of the same tensors share one.

    shapes  of the global tensors
    """

    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The pieces of one rank, as columns.

    parts  positions among the names of those that are not the whole tensor, ascending
    boxes  for each of them ndim offsets, then ndim lengths, one behind the other
    """

    names: Names
    parts: NDArray[np.int64]
    boxes: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Who writes what.

    writes  for each rank, positions of its pieces, ascending
    bytes   for each rank, of those pieces
    """

    writes: tuple[NDArray[np.int64], ...]
    bytes: NDArray[np.int64]


def share(
    held: Sequence[Held], nodes: Sequence[int] | None = None,
    kept: Mapping[int, NDArray[np.int64]] = MappingProxyType({}),
    samples: Sequence[NDArray[np.uint32] | None] = (),
) -> Share:
    """Choose a writer for each distinct piece.

    nodes   the node of each rank; None: all on one
    kept    rank -> what it writes, whatever the others do: it has begun
    samples of each rank that has them: for each piece a digest of a few of its bytes
    raises  CollisionError  two ranks give one tensor different dtypes or shapes, or replicas whose samples differ
            CoverageError   a tensor's boxes overlap without being equal, or leave a hole; or what is kept leaves one
    """
    table = _table(held)
    group, first = _replicas(table)
    _prove(table, first)
    _check_replicas(table, group, samples)
    size, ranks = len(first), len(held)
    length = table.length[first]
    count = np.bincount(group, minlength=size)
    by_group = np.argsort(group, kind="stable")  # rows ascend by rank within a group
    starts = np.cumsum(count) - count
    writer_row = by_group[starts]
    if kept:
        by_group, starts, count = _keep(table, kept, by_group, group, writer_row)
    several = np.flatnonzero(count > 1)
    loads = np.bincount(table.rank[writer_row[count == 1]], length[count == 1], ranks).astype(np.int64)
    if len(several):
        node = np.zeros(ranks, np.int64) if nodes is None else np.asarray(nodes, np.int64)
        heaviest = several[np.argsort(-length[several], kind="stable")]
        replicas = [by_group[starts[g] : starts[g] + count[g]] for g in heaviest.tolist()]
        chosen = _spread(replicas, length[heaviest], table.rank, loads, node)
        writer_row[heaviest] = chosen
    order = np.lexsort((table.position[writer_row], table.rank[writer_row]))
    rows = writer_row[order]
    cuts = np.searchsorted(table.rank[rows], np.arange(1, ranks))
    return Share(tuple(np.split(table.position[rows], cuts)), loads)


def _check_replicas(table: _Table, group: NDArray[np.int64], samples: Sequence[NDArray[np.uint32] | None]) -> None:
    """Raise CollisionError where two pieces of one group are not the same, as far as their samples tell."""
    sampled = np.array([of is not None for of in samples], np.bool_)
    rows = np.flatnonzero(sampled[table.rank]) if sampled.any() else np.zeros(0, np.int64)
    if not len(rows):
        return
    found = np.concatenate([of for of in samples if of is not None])
    _, first, of = np.unique(group[rows], return_index=True, return_inverse=True)
    wrong = np.flatnonzero(found != found[first[of.reshape(-1)]])
    if len(wrong):
        row, other = rows[wrong[0]], rows[first[of.reshape(-1)[wrong[0]]]]
        raise CollisionError(
            f"{table.names[int(table.tensor[row])]!r} is not the same on rank {table.rank[row]} as on rank "
            f"{table.rank[other]}, and {len(np.unique(table.tensor[rows[wrong]])) - 1} other tensors",
            next="give what is not a replica a name of its own (stages and experts: their global names), make replicas "
            "equal, or let each rank keep its own: fs.PerRank",
        )


def _keep(
    table: _Table, kept: Mapping[int, NDArray[np.int64]], by_group: NDArray[np.int64], group: NDArray[np.int64],
    writer_row: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The rows that may still be chosen, where those of each group begin, and how many there are.

    One for a group that a rank has begun to write; of the others those of ranks that have not begun.
    """
    begun = np.zeros(len(group), np.bool_)
    first_row = np.searchsorted(table.rank, np.arange(int(table.rank.max(initial=0)) + 1))
    for rank, positions in kept.items():
        if len(positions):
            begun[first_row[rank] + positions] = True
    twice = np.bincount(group[begun], minlength=len(writer_row)) > 1
    if twice.any():
        name = table.names[int(table.tensor[writer_row[np.flatnonzero(twice)[0]]])]
        raise CoverageError(f"two ranks have begun to write {name!r}", next="save again: the next plan is a new one")
    taken = np.zeros(len(writer_row), np.bool_)
    taken[group[begun]] = True
    free = ~np.isin(table.rank, list(kept)) & ~taken[group]
    chosen = by_group[(begun | free)[by_group]]
    count = np.bincount(group[chosen], minlength=len(writer_row))
    if (count == 0).any():
        name = table.names[int(table.tensor[writer_row[np.flatnonzero(count == 0)[0]]])]
        raise CoverageError(
            f"{name!r} is held by ranks alone that have begun to write without it",
            next="save again: the next plan is a new one",
        )
    starts = np.cumsum(count) - count
    writer_row[:] = chosen[starts]
    return chosen, starts, count


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """All pieces of all ranks, one row each, ascending by rank and position. `box` is padded with zeros."""

    names: Sequence[str]
    dtypes: Sequence[DType]
    shapes: Sequence[tuple[int, ...]]
    rank: NDArray[np.int64]
    position: NDArray[np.int64]
    tensor: NDArray[np.int64]
    box: NDArray[np.int64]
    length: NDArray[np.int64]  # in bytes


def _table(held: Sequence[Held]) -> _Table:
    rows: dict[str, int] = {}
    dtypes: list[DType] = []
    shapes: list[tuple[int, ...]] = []
    seen: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}  # of one Names: tensors, and whole boxes
    width = max((len(shape) for one in held for shape in one.names.shapes), default=0)
    for rank, one in enumerate(held):
        if id(one.names) not in seen:
            seen[id(one.names)] = (_tensors(one.names, rank, rows, dtypes, shapes), _whole(one.names, width))
    tensor = np.concatenate([np.zeros(0, np.int64), *(seen[id(one.names)][0] for one in held)])
    box = np.concatenate([np.zeros((0, 2 * width), np.int64), *(_boxed(one, seen[id(one.names)][1]) for one in held)])
    counts = [len(one.names.names) for one in held]
    item = np.array([dtype.item_bytes for dtype in dtypes], np.int64)
    ndim = np.array([len(shape) for shape in shapes], np.int64)[tensor] if len(tensor) else np.zeros(0, np.int64)
    sides = np.where(np.arange(width) < ndim[:, None], box[:, width:], 1)
    return _Table(
        list(rows), dtypes, shapes, np.repeat(np.arange(len(held)), counts),
        np.concatenate([np.zeros(0, np.int64), *map(np.arange, counts)]), tensor, box,
        sides.prod(axis=1) * (item[tensor] if len(tensor) else 0),
    )


def _tensors(
    names: Names, rank: int, rows: dict[str, int], dtypes: list[DType], shapes: list[tuple[int, ...]]
) -> NDArray[np.int64]:
    """The rows of a rank's tensors, new ones entered."""
    found = np.empty(len(names.names), np.int64)
    for at, (name, dtype, shape) in enumerate(zip(names.names, names.dtypes, names.shapes, strict=True)):
        row = found[at] = rows.setdefault(name, len(rows))
        if row == len(dtypes):
            dtypes.append(dtype)
            shapes.append(shape)
        elif (dtypes[row], shapes[row]) != (dtype, shape):
            raise CollisionError(
                f"ranks describe {name!r} differently", expected=f"{dtypes[row].name} {shapes[row]}",
                found=f"{dtype.name} {shape} on rank {rank}",
                next="give it the same dtype and global shape on every rank, or names of its own",
            )
    return found


def _whole(names: Names, width: int) -> NDArray[np.int64]:
    whole = np.zeros((len(names.names), 2 * width), np.int64)
    for at, shape in enumerate(names.shapes):
        whole[at, width : width + len(shape)] = shape
    return whole


def _boxed(one: Held, whole: NDArray[np.int64]) -> NDArray[np.int64]:
    """The boxes of a rank's pieces."""
    if not len(one.parts):
        return whole
    boxes, width = whole.copy(), whole.shape[1] // 2
    ndim = np.array([len(one.names.shapes[at]) for at in one.parts.tolist()], np.int64)
    begin = 2 * (np.cumsum(ndim) - ndim)
    for n in np.unique(ndim).tolist():
        of = ndim == n
        at = begin[of][:, None] + np.arange(2 * n)
        boxes[one.parts[of], :n] = one.boxes[at[:, :n]]
        boxes[one.parts[of], width : width + n] = one.boxes[at[:, n:]]
    return boxes


def _replicas(table: _Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The group of equal pieces that each row is in, and the first row of each group."""
    columns = np.column_stack([table.tensor, table.box]).astype(np.uint64)
    key = np.zeros(len(columns), np.uint64)
    for column in columns.T:
        key = (key ^ column) * _MIX[0]
        key ^= key >> np.uint64(29)
        key *= _MIX[1]
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    if not (columns == columns[first][group]).all():  # two keys are equal by chance
        _, first, group = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    return group.reshape(-1), first


def _spread(
    groups: Sequence[NDArray[np.int64]], length: NDArray[np.int64], rank: NDArray[np.int64], loads: NDArray[np.int64],
    node: NDArray[np.int64],
) -> NDArray[np.int64]:
    """A row of each group of replicas: on the least loaded node, there on the least loaded rank. Fills `loads`.

    Groups come heaviest first. Of those on the same ranks, one heap knows who is next; it is looked through again
    where another set of ranks has loaded one of them meanwhile.
    """
    node_loads = np.bincount(node, loads, int(node.max()) + 1).astype(np.int64).tolist()
    own, nodes = loads.tolist(), node.tolist()
    heaps: dict[bytes, list[tuple[int, int, int, int]]] = {}  # (load of its node, load, rank, place in the group)
    chosen = np.empty(len(groups), np.int64)
    for at, (rows, bytes_) in enumerate(zip(groups, length.tolist(), strict=True)):
        ranks = rank[rows]
        heap = heaps.get(key := ranks.tobytes())
        if heap is None:
            heap = [(node_loads[nodes[r]], own[r], r, i) for i, r in enumerate(ranks.tolist())]
            heapq.heapify(heap)
            heaps[key] = heap
        while True:
            node_load, load, r, i = heap[0]
            if (node_load, load) == (node_loads[nodes[r]], own[r]):
                break
            heapq.heapreplace(heap, (node_loads[nodes[r]], own[r], r, i))
        own[r] += bytes_
        node_loads[nodes[r]] += bytes_
        chosen[at] = rows[i]
        heapq.heapreplace(heap, (node_loads[nodes[r]], own[r], r, i))
    loads[:] = own
    return chosen


def _prove(table: _Table, first: NDArray[np.int64]) -> None:
    """Raise CoverageError unless the distinct boxes of every tensor hold each of its elements exactly once."""
    order = first[np.argsort(table.tensor[first], kind="stable")]
    tensor = table.tensor[order]
    width = table.box.shape[1] // 2
    cuts = np.flatnonzero(np.diff(tensor)) + 1
    for rows in np.split(order, cuts) if len(order) else []:
        row = int(table.tensor[rows[0]])
        shape = table.shapes[row]
        offset, sides = table.box[rows, : len(shape)], table.box[rows, width : width + len(shape)]
        if not _tiles(offset, sides, shape):
            # Seldom, and slow: boxes that do not line up. It says what is wrong, if anything is.
            boxes = [Box(tuple(o), tuple(n)) for o, n in zip(offset.tolist(), sides.tolist(), strict=True)]
            check_tiling(table.names[row], shape, [box for box in boxes if box.elements])
    missing = set(range(len(table.shapes))) - set(tensor.tolist())
    for row in missing:
        if math.prod(table.shapes[row]):
            raise CoverageError(f"no rank holds any of {table.names[row]!r}", next="hand it over on some rank")


def _tiles(offset: NDArray[np.int64], sides: NDArray[np.int64], shape: tuple[int, ...]) -> bool:
    """Whether boxes that line up (in some dimension all begin and end together) fill the shape, each element once.

    False also for boxes that fill it without lining up.
    """
    some = sides.all(axis=1)
    offset, sides = offset[some], sides[some]
    if len(offset) == 0:
        return math.prod(shape) == 0
    if len(offset) == 1:
        return not offset.any() and tuple(sides[0]) == shape
    for dim in range(len(shape)):
        begin = offset[:, dim]
        order = np.argsort(begin, kind="stable")
        edges, starts = np.unique(begin[order], return_index=True)
        stops = (begin + sides[:, dim])[order]
        ends = stops[starts]
        together = (stops == np.repeat(ends, np.diff([*starts, len(order)]))).all()
        if not together or edges[0] != 0 or ends[-1] != shape[dim] or (edges[1:] != ends[:-1]).any():
            continue
        if len(edges) == 1:
            continue  # all span this dimension
        inner = (*shape[:dim], *shape[dim + 1 :])
        less_offset, less_sides = np.delete(offset, dim, axis=1), np.delete(sides, dim, axis=1)
        return all(_tiles(less_offset[part], less_sides[part], inner) for part in np.split(order, starts[1:]))
    return False
