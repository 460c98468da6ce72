"""Which rank reads data that several ranks need: once, in equal parts, into free memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from flowstone.config import MIB
from flowstone.node_reads.assign_readers import ReaderAssignment, assign_readers
from flowstone.table.chunks import Chunks

HALF = 16 * MIB


def chunks_of(lengths: list[int]) -> Chunks:
    """Of pieces of these lengths, one behind the other in two segments."""
    half = len(lengths) // 2
    offsets = [np.cumsum([0, *part])[:-1] for part in (lengths[:half], lengths[half:])]
    segment = np.array([0] * half + [1] * (len(lengths) - half), np.uint32)
    chunks = Chunks.unwritten(segment, np.array(lengths, np.uint64))
    return Chunks(segment, np.concatenate(offsets).astype(np.uint64), chunks.length, chunks.digest)


def rows(*of: tuple[int, int, int]) -> np.ndarray:
    return np.array(of, np.int64).reshape(-1, 3)


def expanded(array: np.ndarray, plan: ReaderAssignment) -> list[tuple[int, int]]:
    """The (piece, chunk) that a rank gets, from others and by itself."""
    row, run = plan.needed
    taken = [(row, int(plan.piece[r]), c) for row, r in zip(row.tolist(), run.tolist(), strict=True)
             for c in range(int(plan.first[r]), int(plan.last[r]))]
    assert all(piece == array[row, 0] for row, piece, _ in taken)
    alone = [(row, int(array[row, 0]), c) for row in plan.unshared.tolist() for c in range(*array[row, 1:].tolist())]
    return sorted((row, chunk) for row, _, chunk in [*taken, *alone])


@pytest.mark.parametrize("seed", range(40))
def test_everybody_gets_what_it_wants_and_what_two_want_is_read_once(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.choice([100, 5000, 70_000, MIB, 3 * MIB + 17, 30 * MIB]) for _ in range(chance.randint(1, 12))]
    table = chunks_of(lengths)
    chunks = table.counts
    pool = [(p, a, b) for p, n in enumerate(chunks.tolist()) for a, b in {(0, n), (n // 2, n)} if a < b]
    ranks = chance.randint(2, 5)
    whole = [rows(*(chance.choice(pool) for _ in range(chance.randint(0, 9)))) for _ in range(ranks)]
    actual = [assign_readers(whole, me, table, half_bytes=HALF) for me in range(ranks)]
    first = actual[0]
    for me, entry in enumerate(actual):
        for name in ("piece", "first", "last", "batch", "reader", "position"):
            assert np.array_equal(getattr(entry, name), getattr(first, name)), "all come to the same"
        assert expanded(whole[me], entry) == sorted(
            (row, c) for row, (_, a, b) in enumerate(whole[me].tolist()) for c in range(a, b)
        )
    runs = list(zip(first.piece.tolist(), first.first.tolist(), first.last.tolist(), strict=True))
    holders = {key: sum(key in map(tuple, part.tolist()) for part in whole) for raw in whole for key in map(tuple, raw)}
    shared = sorted((p, c) for (p, a, b), n in holders.items() if n > 1 for c in range(a, b))
    assert sorted((p, c) for p, a, b in runs for c in range(a, b)) == shared
    check_seats(first, table, ranks)


def check_seats(assignment: ReaderAssignment, table: Chunks, ranks: int) -> None:
    """No two runs of a batch share room in a ring; readers have much the same to do."""
    length = table.stored_bytes(assignment.piece, assignment.first, assignment.last)
    assert (assignment.position + length <= HALF).all()
    assert assignment.bytes == length.sum()
    for batch in range(assignment.batches):
        loads = []
        for reader in range(ranks):
            index = np.flatnonzero((assignment.batch == batch) & (assignment.reader == reader))
            begin, stop = assignment.position[index], assignment.position[index] + length[index]
            assert (stop[:-1] <= begin[1:]).all()
            loads.append(int(length[index].sum()))
        assert max(loads) - min(loads) <= HALF
        assert max(loads) <= sum(loads) / ranks + 8 * MIB, "within a run of equal parts"


def test_ranks_that_want_nothing_are_dealt_nothing() -> None:
    table = chunks_of([MIB])
    none = assign_readers([rows(), rows()], 0, table, half_bytes=HALF)
    assert (none.batches, none.bytes, len(none.unshared)) == (0, 0, 0)
    alone = assign_readers([rows((0, 0, 1)), rows()], 0, table, half_bytes=HALF)
    assert (alone.batches, alone.unshared.tolist()) == (0, [0])
