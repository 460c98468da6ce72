"""Balancing replicas: no rank writes much more than the least that ownership allows, found by maximum flow."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scaling.bound import least_largest, ownership
from flowstone.plan.assign_writers import assign_writers
from flowstone.plan.balance import Replicas, balance
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Pieces, TensorColumns

BYTES = DTYPES["uint8"]


def owned(ranks: list[list[tuple[str, int]]]) -> list[Pieces]:
    """Ranks that hold whole tensors of so many bytes."""
    none = np.zeros(0, np.int64)
    return [
        Pieces(TensorColumns(tuple(n for n, _ in of), (BYTES,) * len(of), tuple((b,) for _, b in of)), none, none, none)
        for of in ranks
    ]


def at_random(chance: random.Random, ranks: int, tensors: int) -> list[Pieces]:
    """Sets of ranks of any size and overlap, each with many tensors of its own."""
    rows: list[list[tuple[str, int]]] = [[] for _ in range(ranks)]
    sets = [chance.sample(range(ranks), chance.randint(1, ranks)) for _ in range(chance.randint(1, 12))]
    for number in range(tensors):
        bytes_ = chance.choice([chance.randint(1, 1000), 4, 500])
        for rank in chance.choice(sets):
            rows[rank].append((f"t{number}", bytes_))
    return owned(rows)


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(20, 200))])
def test_the_largest_writer_is_within_a_fiftieth_of_what_ownership_allows(seed: int) -> None:
    chance = random.Random(seed)
    held = at_random(chance, chance.randint(2, 24), 3000)
    assigned = assign_writers(held)
    bound = least_largest(ownership(held)[0], len(held))
    assert bound <= assigned.bytes.max() <= 1.02 * bound


def test_a_chain_of_overlapping_pairs_is_levelled_from_end_to_end() -> None:
    """All that is heavy lies at one end: only by moving every pair's pieces along can the other end take its part."""
    ranks = 16
    rows: list[list[tuple[str, int]]] = [[] for _ in range(ranks)]
    rows[0] += [(f"own{i}", 100) for i in range(400)]
    for index in range(ranks - 1):
        for i in range(400):
            for rank in (index, index + 1):
                rows[rank].append((f"pair{index}.{i}", 100))
    held = owned(rows)
    bound = least_largest(ownership(held)[0], ranks)
    assert assign_writers(held).bytes.max() <= 1.02 * bound


def test_nodes_are_levelled_before_their_ranks() -> None:
    chance = random.Random(5)
    held = at_random(chance, 16, 4000)
    nodes = [rank // 4 for rank in range(16)]
    by_node = np.bincount(nodes, assign_writers(held, nodes).bytes)
    merged = [tuple(sorted({nodes[r] for r in ranks})) for ranks in ownership(held)[0]]
    sums: dict[tuple[int, ...], int] = {}
    for key, bytes_ in zip(merged, ownership(held)[0].values(), strict=True):
        sums[key] = sums.get(key, 0) + bytes_
    assert by_node.max() <= 1.02 * least_largest(sums, 4)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=4),
       st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 3))
def test_loads_are_those_of_assigning_piece_after_piece_to_the_rank_with_the_least(
    pieces: list[tuple[int, int]], own: list[int], nodes: int
) -> None:
    pieces = sorted(dict(pieces).items(), reverse=True)
    node = np.arange(len(own)) % nodes
    replicas = Replicas(np.arange(len(own)), np.array([b for b, _ in pieces]), np.array([n for _, n in pieces]))
    (counts,) = balance([replicas], np.array(own), node).counts
    assert counts.sum(axis=1).tolist() == [n for _, n in pieces]
    loads = list(own)
    for bytes_, count in pieces:
        for _ in range(count):
            by_node = np.bincount(node, loads)
            best = min(range(len(own)), key=lambda r: (by_node[node[r]], loads[r]))
            loads[best] += bytes_
    actual = np.array(own) + replicas.length @ counts
    assert np.bincount(node, actual).max() <= 1.01 * np.bincount(node, loads).max()
    # Equal pieces are assigned together, to nodes first: a rank may have a part of a piece more, never a whole one.
    assert actual.max() < max(loads) + pieces[0][0] or actual.max() <= max(loads)
    if nodes == 1:
        assert sorted(actual) == sorted(loads)


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_bound_is_that_of_linear_search(chance: random.Random) -> None:
    """By Hall's condition: whatever a set of ranks alone holds, they write."""
    ranks = chance.randint(1, 5)
    sets = [key for n in range(1, ranks + 1) for key in combinations(range(ranks), n)]
    held = {key: chance.randint(0, 40) for key in chance.sample(sets, chance.randint(1, min(6, len(sets))))}
    least = 0
    for among in sets:
        inside = sum(bytes_ for key, bytes_ in held.items() if set(key) <= set(among))
        least = max(least, -(-inside // len(among)))
    assert least_largest(held, ranks) == least
