"""The least that the largest writer must write, exactly, by maximum flow from the pieces that each rank holds.

Pieces that the same ranks hold are one source of bytes. An edge leads to each of these ranks, and from a rank to the
sink with the most bytes that it may write. Flow may cut pieces anywhere, so no plan of full pieces is below the bound.
It does not use the product's own tables, since it checks them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from flowstone.table.pieces import Pieces

Ownership = Mapping[tuple[int, ...], int]
"""Ranks, ascending -> bytes of all that these ranks, and no others, hold."""


def ownership(held: Sequence[Pieces]) -> tuple[dict[tuple[int, ...], int], int]:
    """Who holds what, and how many distinct pieces there are."""
    variants: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, table in enumerate(held):
        variants[id(table.tensors), id(table.parts), id(table.kinds)].append(rank)
    groups = list(variants.values())
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)  # name -> (variant, kind) where it occurs
    facts: dict[str, tuple[tuple[int, ...], int]] = {}
    for number, ranks in enumerate(groups):
        table = held[ranks[0]]
        kinds = np.arange(len(table.parts)) if table.kinds is None else table.kinds
        kind_at = dict(zip(table.parts.tolist(), kinds.tolist(), strict=True))
        for index, (name, dtype, shape) in enumerate(
            zip(table.names, table.dtypes, table.shapes, strict=True)
        ):
            seen[name].append((number, kind_at.get(index, -1)))
            facts[name] = shape, dtype.item_bytes
    alike: dict[tuple[object, ...], int] = defaultdict(int)
    for name, where in seen.items():
        alike[facts[name], tuple(where)] += 1
    boxes = [_boxes([held[rank] for rank in ranks]) for ranks in groups]
    sizes: dict[tuple[int, ...], int] = defaultdict(int)
    pieces = 0
    for ((shape, item), where), count in alike.items():  # type: ignore[misc]
        holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for variant, kind in where:
            for rank, of in zip(groups[variant], boxes[variant], strict=True):
                holders[of[kind] if kind >= 0 else (*(0,) * len(shape), *shape)].append(rank)
        for box, ranks in holders.items():
            elements = int(np.prod(box[len(shape) :], dtype=np.int64))
            sizes[tuple(sorted(ranks))] += count * item * elements
        pieces += count * len(holders)
    return dict(sizes), pieces


def _boxes(alike: Sequence[Pieces]) -> list[list[tuple[int, ...]]]:
    """Of each of these ranks, whose columns but the boxes are the same: its boxes, offset before shape."""
    pieces = alike[0]
    kinds = range(len(pieces.parts)) if pieces.kinds is None else pieces.kinds.tolist()
    ndim = {kind: len(pieces.shapes[part]) for part, kind in zip(pieces.parts.tolist(), kinds, strict=True)}
    starts = np.cumsum([0, *(2 * ndim[kind] for kind in range(len(ndim)))]).tolist()
    boxes = []
    for rank in alike:
        numbers = rank.boxes.tolist()
        boxes.append([tuple(numbers[begin:end]) for begin, end in pairwise(starts)])
    return boxes


def least_largest(owned: Ownership, ranks: int, *, within: float = 0.0) -> int:
    """The bytes of the largest writer of the best plan that may cut pieces anywhere; less by `within` of it at most."""
    own = [0] * ranks
    for holders, bytes_ in owned.items():
        if len(holders) == 1:
            own[holders[0]] += bytes_
    shared = [(holders, bytes_) for holders, bytes_ in owned.items() if len(holders) > 1 and bytes_]
    return max([max(own, default=0), *(_least_of(part, own, within) for part in _apart(shared, ranks))])


def _apart(
    shared: Sequence[tuple[tuple[int, ...], int]], ranks: int
) -> list[list[tuple[tuple[int, ...], int]]]:
    """Those that have no rank in common, apart: each a problem of its own."""
    leader = list(range(ranks))

    def find(rank: int) -> int:
        while leader[rank] != rank:
            leader[rank] = leader[leader[rank]]
            rank = leader[rank]
        return rank

    for holders, _ in shared:
        for rank in holders[1:]:
            leader[find(rank)] = find(holders[0])
    groups: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for part in shared:
        groups[find(part[0][0])].append(part)
    return list(groups.values())


def _least_of(part: Sequence[tuple[tuple[int, ...], int]], own: Sequence[int], within: float) -> int:
    ranks = sorted({rank for holders, _ in part for rank in holders})
    total = sum(bytes_ for _, bytes_ in part)
    low = max(-(-(total + sum(own[rank] for rank in ranks)) // len(ranks)), max(own[rank] for rank in ranks))
    if len(part) == 1:
        return _level([own[rank] for rank in ranks], total)
    high = max(own[rank] for rank in ranks) + total
    middle = low  # which is it, most often
    while high - low > within * low:
        if _fits(part, own, ranks, middle):
            high = middle
        else:
            low = middle + 1
        middle = (low + high) // 2
    return low


def _level(own: Sequence[int], total: int) -> int:
    """One set alone: its ranks are filled up to one level."""
    lowest = np.sort(np.array(own, np.int64))
    sums = total + np.cumsum(lowest)
    level = int((-(-sums // np.arange(1, len(own) + 1))).min())
    return max(level, int(lowest[-1]))


def _fits(
    part: Sequence[tuple[tuple[int, ...], int]], own: Sequence[int], ranks: Sequence[int], most: int
) -> bool:
    """Whether no rank need write more than `most`. Maximum flow by Dinic's algorithm."""
    node = {rank: 1 + len(part) + number for number, rank in enumerate(ranks)}
    sink = 1 + len(part) + len(ranks)
    flow = _Flow(sink + 1)
    for index, (holders, bytes_) in enumerate(part, 1):
        flow.edge(0, index, bytes_)
        for rank in holders:
            flow.edge(index, node[rank], bytes_)
    for rank in ranks:
        flow.edge(node[rank], sink, most - own[rank])
    return flow.most(0, sink) == sum(bytes_ for _, bytes_ in part)


class _Flow:
    def __init__(self, nodes: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(nodes)]
        self._to: list[int] = []
        self._room: list[int] = []

    def edge(self, source: int, target: int, capacity: int) -> None:
        for a, b, r in ((source, target, capacity), (target, source, 0)):
            self._out[a].append(len(self._to))
            self._to.append(b)
            self._room.append(r)

    def most(self, source: int, sink: int) -> int:
        total = 0
        while True:
            depth = self._depths(source, sink)
            if depth[sink] < 0:
                return total
            used = [0] * len(self._out)
            while pushed := self._push(source, sink, depth, used):
                total += pushed

    def _depths(self, source: int, sink: int) -> list[int]:
        depth = [-1] * len(self._out)
        depth[source] = 0
        waiting = deque([source])
        while waiting and depth[sink] < 0:
            here = waiting.popleft()
            for edge in self._out[here]:
                there = self._to[edge]
                if self._room[edge] and depth[there] < 0:
                    depth[there] = depth[here] + 1
                    waiting.append(there)
        return depth

    def _push(self, source: int, sink: int, depth: Sequence[int], used: list[int]) -> int:
        """Along one path of the levels, as much as goes; 0 when there is none. Without recursion: paths are long."""
        path: list[int] = []
        here = source
        while here != sink:
            while used[here] < len(self._out[here]):
                edge = self._out[here][used[here]]
                if self._room[edge] and depth[self._to[edge]] == depth[here] + 1:
                    break
                used[here] += 1
            else:
                if not path:
                    return 0
                here = self._to[path.pop() ^ 1]
                used[here] += 1
                continue
            path.append(edge)
            here = self._to[edge]
        pushed = min(self._room[edge] for edge in path)
        for edge in path:
            self._room[edge] -= pushed
            self._room[edge ^ 1] += pushed
        return pushed
