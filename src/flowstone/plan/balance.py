"""Balance: how many of its shared pieces each rank writes, so that loads are even.

Pieces that are held by the same ranks form a set. The ranks of two sets may overlap, so an assignment for one set
changes the optimum for others. So the sets are levelled in turn, until no bytes move any more: the bytes of one set are
distributed such that the loads of its ranks become level (water-filling). Either ranks are levelled directly, or first
nodes and then the ranks of each node. Levelling is coordinate descent on the sum of squared loads. The loads that
minimise this sum also minimise the largest load (the possible loads are the bases of a polymatroid: Fujishige,
Lexicographically optimal base, 1980). Then full pieces are assigned, the largest first, one set after the other, on top
of the level loads of the other sets.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.table.chunks import distinct

_STEADY = 5e-4  # levelling stops once a round over all sets moves less than this share of the mean load
_LEVELLINGS_MIN, _LEVELLINGS_MAX = 8, 200  # fewest and most rounds of levelling over all sets
_WORK_MAX = 100_000  # most sets that are levelled, over all rounds but the fewest; they take a few seconds
_ROUNDINGS_MAX = 4  # how often full pieces are assigned anew; the best of these results is used
_BETTER = 1e-3  # pieces are assigned anew only if the last assignment reduced the largest load by this share
_ALIKE = 1e-2  # loads of nodes count as equal if they differ by a smaller share

Loads = NDArray[np.float64]


class Replicas(msgspec.Struct, frozen=True, eq=False):
    """The pieces that are held by the same ranks.

    ranks   the numbers of these ranks, ascending
    length  the distinct lengths of the pieces in bytes, descending
    count   for each of these lengths, the number of pieces
    """

    ranks: NDArray[np.int64]
    length: NDArray[np.int64]
    count: NDArray[np.int64]


class Balance(msgspec.Struct, frozen=True, eq=False):
    """How much each rank writes.

    counts  for each set (pieces that are held by the same ranks), how many pieces of each length each rank writes: one
            row for each length, one column for each rank
    level   how many bytes the rank with the largest load would write if pieces could be split at any element
    """

    counts: Sequence[NDArray[np.int64]]
    level: float


def balance(sets: Sequence[Replicas], own: NDArray[np.int64], node: NDArray[np.int64]) -> Balance:
    """Choose how many pieces each rank writes.

    own   bytes that each rank writes in any case
    node  the node of each rank. The largest load of a node is minimised first, then the largest load of a rank
    """
    groupings = [np.zeros_like(node), node] if len(distinct(node)) > 1 else [node]
    balances = [_balance(sets, own, grouping) for grouping in groupings]
    if len(balances) == 1:
        return balances[0]
    nodes, ranks = zip(*(_largest(sets, own, node, candidate.counts) for candidate in balances), strict=True)
    # If ranks alone are levelled, nodes usually become level, too, unless they have different numbers of ranks.
    by_ranks = nodes[0] <= nodes[1] * (1 + _ALIKE) and ranks[0] <= ranks[1]
    return Balance(balances[0 if by_ranks else 1].counts, balances[0].level)


def _largest(
    sets: Sequence[Replicas], own: NDArray[np.int64], node: NDArray[np.int64], counts: Sequence[NDArray[np.int64]]
) -> tuple[float, float]:
    """The largest load of any node, and of any rank, in bytes, if ranks write `counts` pieces."""
    loads = own.copy()
    for replicas, set_counts in zip(sets, counts, strict=True):
        loads[replicas.ranks] += replicas.length @ set_counts
    return float(np.bincount(node, loads).max()), float(loads.max())


def _balance(sets: Sequence[Replicas], own: NDArray[np.int64], node: NDArray[np.int64]) -> Balance:
    """Choose how many pieces each rank writes, so that the loads of nodes, and of the ranks of each node, are even."""
    all_writers = [_ReplicaWriters(replicas, node) for replicas in sets]
    load = _RankLoads(own.astype(np.float64), node)
    parts = _level(all_writers, load)
    level = float(load.ranks.max(initial=0))
    order = sorted(range(len(sets)), key=lambda i: -int(sets[i].length[0]))  # small pieces come last, to even out loads
    best: list[NDArray[np.int64]] = []
    lowest = np.inf
    for _ in range(_ROUNDINGS_MAX):
        counts: list[NDArray[np.int64]] = [np.zeros((0, 0), np.int64)] * len(sets)
        for i in order:
            load.add(all_writers[i], -parts[i])
            counts[i] = _assign_whole(all_writers[i], load)
            parts[i] = (sets[i].length @ counts[i]).astype(np.float64)
        worst = float(load.ranks.max(initial=0))
        if worst < lowest:
            best = counts
        if len(sets) == 1 or worst >= lowest * (1 - _BETTER):
            break
        lowest = worst
    return Balance(best, level)


class _RankLoads:
    """How many bytes each rank writes so far, and each node."""

    def __init__(self, ranks: Loads, node: NDArray[np.int64]) -> None:
        self.ranks = ranks
        self.nodes: Loads = np.bincount(node, ranks).astype(np.float64)

    def add(self, writers: _ReplicaWriters, part: Loads) -> None:
        self.ranks[writers.ranks] += part
        if len(writers.nodes) == 1:
            self.nodes[writers.nodes] += part.sum()
        else:
            self.nodes[writers.nodes] += np.bincount(writers.node, part, len(writers.nodes))


class _ReplicaWriters:
    """The ranks that may write the pieces of a set. `members`: for each node, positions among these ranks."""

    def __init__(self, replicas: Replicas, node: NDArray[np.int64]) -> None:
        self.ranks, self.length, self.count = replicas.ranks, replicas.length, replicas.count
        self.nodes, self.node = np.unique(node[replicas.ranks], return_inverse=True)
        order = np.argsort(self.node, kind="stable")
        cuts = np.searchsorted(self.node[order], np.arange(1, len(self.nodes)))
        self.members = np.split(order, cuts)
        self.one_each = len(self.nodes) == len(self.ranks)

    @property
    def bytes(self) -> float:
        return float(self.length @ self.count)


def _level(all_writers: Sequence[_ReplicaWriters], load: _RankLoads) -> list[Loads]:
    """The bytes that each rank of each set would write if pieces could be split at any element. Adds them to `load`.
    """
    parts = [np.zeros(len(writers.ranks)) for writers in all_writers]
    total = load.ranks.sum() + sum(writers.bytes for writers in all_writers)
    steady = _STEADY * total / max(1, len(load.ranks))
    rounds = min(_LEVELLINGS_MAX, max(_LEVELLINGS_MIN, _WORK_MAX // max(1, len(all_writers))))
    order = list(range(len(all_writers)))
    for _ in range(rounds):
        moved = 0.0
        for i in order:
            writers = all_writers[i]
            load.add(writers, -parts[i])
            part = _water_fill_nodes(writers, load)
            load.add(writers, part)
            moved = max(moved, float(np.abs(part - parts[i]).max()))
            parts[i] = part
        if moved <= steady:
            break
        order.reverse()  # so that in a chain of overlapping sets, load soon moves from one end to the other
    return parts


def _water_fill_nodes(writers: _ReplicaWriters, load: _RankLoads) -> Loads:
    """Spread a set's bytes over its least loaded nodes, and over the least loaded ranks of each."""
    ranks = load.ranks[writers.ranks]
    if len(writers.nodes) == 1:
        return _water_fill(ranks, writers.bytes)
    by_node = _water_fill(load.nodes[writers.nodes], writers.bytes)
    if writers.one_each:
        return by_node[writers.node]
    part = np.zeros(len(ranks))
    for i in np.flatnonzero(by_node).tolist():
        members = writers.members[i]
        part[members] = _water_fill(ranks[members], by_node[i])
    return part


def _water_fill(load: Loads, amount: float) -> Loads:
    """Water-filling: spread `amount` over the lowest of `load`, up to one common level."""
    lowest = np.sort(load)
    level = ((amount + np.cumsum(lowest)) / np.arange(1, len(load) + 1)).min()
    filled: Loads = np.maximum(level - load, 0.0)
    return filled


def _assign_whole(writers: _ReplicaWriters, load: _RankLoads) -> NDArray[np.int64]:
    """Assign full pieces, the largest first, each to the least loaded rank of the least loaded node, and add their
    bytes to `load`. Returns how many pieces of each length each rank gets.
    """
    counts = np.zeros((len(writers.length), len(writers.ranks)), np.int64)
    for row, (length, count) in enumerate(zip(writers.length.tolist(), writers.count.tolist(), strict=True)):
        ranks = load.ranks[writers.ranks]
        if len(writers.nodes) == 1:
            counts[row] = _whole_counts(ranks, length, count)
        elif writers.one_each:
            counts[row] = _whole_counts(load.nodes[writers.nodes], length, count)[writers.node]
        else:
            by_node = _whole_counts(load.nodes[writers.nodes], length, count)
            for i in np.flatnonzero(by_node).tolist():
                members = writers.members[i]
                counts[row, members] = _whole_counts(ranks[members], length, int(by_node[i]))
        load.add(writers, counts[row] * float(length))
    return counts


def _whole_counts(load: Loads, length: int, count: int) -> NDArray[np.int64]:
    """How many of `count` equal pieces each rank gets, if each piece goes to the rank with the smallest load so far."""
    if length == 0:
        counts = np.zeros(len(load), np.int64)
        counts[np.argmin(load)] = count
        return counts
    counts = (_water_fill(load, float(length) * count) / length).astype(np.int64)
    rest = count - int(counts.sum())
    while rest:  # runs once, or a few times because of rounding
        after = np.argsort(load + counts * float(length), kind="stable")
        if rest < 0:
            counts[after[counts[after] > 0][-1]] -= 1
            rest += 1
        else:
            counts[after[:rest]] += 1
            rest -= min(rest, len(after))
    return counts
