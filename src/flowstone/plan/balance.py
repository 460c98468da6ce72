"""Balance: how many of the pieces that several ranks hold each of them writes, so that no rank writes much more.

Sets of ranks overlap: an assignment to one set changes the optimum of the next. So the bytes of each set are levelled
in turn, by water-filling over its ranks, or over its nodes and the ranks of each, until nothing moves. This is
coordinate descent on the sum of squared loads; its minimum also has the smallest largest load (the possible loads are
the bases of a polymatroid: Fujishige, Lexicographically optimal base, 1980). Only then are whole pieces assigned, the
largest first, each set on top of the level loads of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.table.chunks import distinct

_STEADY = 5e-4  # of the mean load: levelling stops when less than that moves
_LEVELLINGS_MIN, _LEVELLINGS_MAX = 8, 200  # rounds over all sets
_WORK_MAX = 100_000  # sets levelled in all rounds together, beyond the minimum number of rounds: a few seconds
_ROUNDINGS_MAX = 4  # rounds of assigning whole pieces; the best one is kept
_BETTER = 1e-3
_ALIKE = 1e-2  # loads of nodes that differ by less count as equal

Loads = NDArray[np.float64]


class Replicas(msgspec.Struct, frozen=True, eq=False):
    """The pieces that the same ranks hold.

    ranks   ascending
    length  the distinct lengths of the pieces in bytes, descending
    count   number of pieces of each length
    """

    ranks: NDArray[np.int64]
    length: NDArray[np.int64]
    count: NDArray[np.int64]


class Balance(msgspec.Struct, frozen=True, eq=False):
    """How much each rank writes.

    counts  for each set, the number of pieces of each length that each of its ranks writes: one row per length, one
            column per rank
    level   bytes of the largest writer if pieces could be split at any element
    """

    counts: Sequence[NDArray[np.int64]]
    level: float


def balance(sets: Sequence[Replicas], own: NDArray[np.int64], node: NDArray[np.int64]) -> Balance:
    """Choose how many pieces each rank writes.

    own   bytes that each rank writes in any case
    node  of each rank: the largest load of a node is minimised before that of a rank
    """
    ways = [np.zeros_like(node), node] if len(distinct(node)) > 1 else [node]
    found = [_balance(sets, own, way) for way in ways]
    if len(found) == 1:
        return found[0]
    nodes, ranks = zip(*(_largest(sets, own, node, one.counts) for one in found), strict=True)
    # Levelling by ranks alone mostly levels nodes too, but not if nodes differ in size.
    by_ranks = nodes[0] <= nodes[1] * (1 + _ALIKE) and ranks[0] <= ranks[1]
    return Balance(found[0 if by_ranks else 1].counts, found[0].level)


def _largest(
    sets: Sequence[Replicas], own: NDArray[np.int64], node: NDArray[np.int64], counts: Sequence[NDArray[np.int64]]
) -> tuple[float, float]:
    """The largest load of a node, and of a rank."""
    loads = own.copy()
    for one, of in zip(sets, counts, strict=True):
        loads[one.ranks] += one.length @ of
    return float(np.bincount(node, loads).max()), float(loads.max())


def _balance(sets: Sequence[Replicas], own: NDArray[np.int64], node: NDArray[np.int64]) -> Balance:
    """Level the nodes, and the ranks of each node."""
    all_writers = [_ReplicaWriters(one, node) for one in sets]
    load = _RankLoads(own.astype(np.float64), node)
    parts = _level(all_writers, load)
    level = float(load.ranks.max(initial=0))
    order = sorted(range(len(sets)), key=lambda at: -int(sets[at].length[0]))  # small pieces fill the gaps
    best: list[NDArray[np.int64]] = []
    lowest = np.inf
    for _ in range(_ROUNDINGS_MAX):
        counts: list[NDArray[np.int64]] = [np.zeros((0, 0), np.int64)] * len(sets)
        for at in order:
            load.add(all_writers[at], -parts[at])
            counts[at] = _assign_whole(all_writers[at], load)
            parts[at] = (sets[at].length @ counts[at]).astype(np.float64)
        worst = float(load.ranks.max(initial=0))
        if worst < lowest:
            best = counts
        if len(sets) == 1 or worst >= lowest * (1 - _BETTER):
            break
        lowest = worst
    return Balance(best, level)


class _RankLoads:
    """The loads of the ranks, and of their nodes."""

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

    def __init__(self, one: Replicas, node: NDArray[np.int64]) -> None:
        self.ranks, self.length, self.count = one.ranks, one.length, one.count
        self.nodes, self.node = np.unique(node[one.ranks], return_inverse=True)
        order = np.argsort(self.node, kind="stable")
        cuts = np.searchsorted(self.node[order], np.arange(1, len(self.nodes)))
        self.members = np.split(order, cuts)
        self.one_each = len(self.nodes) == len(self.ranks)

    @property
    def bytes(self) -> float:
        return float(self.length @ self.count)


def _level(all_writers: Sequence[_ReplicaWriters], load: _RankLoads) -> list[Loads]:
    """The bytes that each rank of each set would write if pieces could be split at any element. Added to `load`."""
    parts = [np.zeros(len(writers.ranks)) for writers in all_writers]
    total = load.ranks.sum() + sum(writers.bytes for writers in all_writers)
    steady = _STEADY * total / max(1, len(load.ranks))
    rounds = min(_LEVELLINGS_MAX, max(_LEVELLINGS_MIN, _WORK_MAX // max(1, len(all_writers))))
    order = list(range(len(all_writers)))
    for _ in range(rounds):
        moved = 0.0
        for at in order:
            writers = all_writers[at]
            load.add(writers, -parts[at])
            part = _water_fill_nodes(writers, load)
            load.add(writers, part)
            moved = max(moved, float(np.abs(part - parts[at]).max()))
            parts[at] = part
        if moved <= steady:
            break
        order.reverse()  # so that excess at one end of a chain of sets soon reaches the other end
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
    for at in np.flatnonzero(by_node).tolist():
        members = writers.members[at]
        part[members] = _water_fill(ranks[members], by_node[at])
    return part


def _water_fill(load: Loads, amount: float) -> Loads:
    """Water-filling: spread `amount` over the lowest of `load`, up to one common level."""
    lowest = np.sort(load)
    level = ((amount + np.cumsum(lowest)) / np.arange(1, len(load) + 1)).min()
    filled: Loads = np.maximum(level - load, 0.0)
    return filled


def _assign_whole(writers: _ReplicaWriters, load: _RankLoads) -> NDArray[np.int64]:
    """Assign whole pieces, the largest first, each to the least loaded rank of the least loaded node; adds to `load`.
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
            for at in np.flatnonzero(by_node).tolist():
                members = writers.members[at]
                counts[row, members] = _whole_counts(ranks[members], length, int(by_node[at]))
        load.add(writers, counts[row] * float(length))
    return counts


def _whole_counts(load: Loads, length: int, count: int) -> NDArray[np.int64]:
    """How many of `count` equal pieces each rank gets, if each piece goes to the rank with the least."""
    if length == 0:
        found = np.zeros(len(load), np.int64)
        found[np.argmin(load)] = count
        return found
    found = (_water_fill(load, float(length) * count) / length).astype(np.int64)
    rest = count - int(found.sum())
    while rest:  # once, except for rounding
        after = np.argsort(load + found * float(length), kind="stable")
        if rest < 0:
            found[after[found[after] > 0][-1]] -= 1
            rest += 1
        else:
            found[after[:rest]] += 1
            rest -= min(rest, len(after))
    return found
