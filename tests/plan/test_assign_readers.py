"""Who reads what several ranks want: once, in equal parts, into room that is free."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from flowstone.config import MIB
from flowstone.plan.assign_readers import ReaderAssignment, assign_readers
from flowstone.table.chunks import Chunks

HALF = 16 * MIB


def chunks_of(lengths: list[int]) -> Chunks:
    """Of pieces of these lengths, one behind the other in two segments."""
    half = len(lengths) // 2
    offsets = [np.cumsum([0, *part])[:-1] for part in (lengths[:half], lengths[half:])]
    segment = np.array([0] * half + [1] * (len(lengths) - half), np.uint32)
    return replace(
        Chunks.to_come(segment, np.array(lengths, np.uint64)), offset=np.concatenate(offsets).astype(np.uint64)
    )


def rows(*of: tuple[int, int, int]) -> np.ndarray:
    return np.array(of, np.int64).reshape(-1, 3)


def expanded(wanted: np.ndarray, found: ReaderAssignment) -> list[tuple[int, int]]:
    """The (piece, chunk) that a rank gets, from others and by itself."""
    row, run = found.wants
    taken = [(row, int(found.piece[r]), c) for row, r in zip(row.tolist(), run.tolist(), strict=True)
             for c in range(int(found.first[r]), int(found.last[r]))]
    assert all(piece == wanted[row, 0] for row, piece, _ in taken)
    alone = [(row, int(wanted[row, 0]), c) for row in found.alone.tolist() for c in range(*wanted[row, 1:].tolist())]
    return sorted((row, chunk) for row, _, chunk in [*taken, *alone])


@pytest.mark.parametrize("seed", range(40))
def test_everybody_gets_what_it_wants_and_what_two_want_is_read_once(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.choice([100, 5000, 70_000, MIB, 3 * MIB + 17, 30 * MIB]) for _ in range(chance.randint(1, 12))]
    table = chunks_of(lengths)
    chunks = table.counts
    pool = [(p, a, b) for p, n in enumerate(chunks.tolist()) for a, b in {(0, n), (n // 2, n)} if a < b]
    ranks = chance.randint(2, 5)
    wanted = [rows(*(chance.choice(pool) for _ in range(chance.randint(0, 9)))) for _ in range(ranks)]
    found = [assign_readers(wanted, me, table, half_bytes=HALF) for me in range(ranks)]
    first = found[0]
    for me, one in enumerate(found):
        for name in ("piece", "first", "last", "batch", "reader", "position"):
            assert np.array_equal(getattr(one, name), getattr(first, name)), "all come to the same"
        assert expanded(wanted[me], one) == sorted(
            (row, c) for row, (_, a, b) in enumerate(wanted[me].tolist()) for c in range(a, b)
        )
    runs = list(zip(first.piece.tolist(), first.first.tolist(), first.last.tolist(), strict=True))
    holders = {key: sum(key in map(tuple, one.tolist()) for one in wanted) for one in wanted for key in map(tuple, one)}
    shared = sorted((p, c) for (p, a, b), n in holders.items() if n > 1 for c in range(a, b))
    assert sorted((p, c) for p, a, b in runs for c in range(a, b)) == shared
    check_seats(first, table, ranks)


def check_seats(found: ReaderAssignment, table: Chunks, ranks: int) -> None:
    """No two runs of a batch share room in a ring; readers have much the same to do."""
    length = table.stored_bytes(found.piece, found.first, found.last)
    assert (found.position + length <= HALF).all()
    assert found.bytes == length.sum()
    for batch in range(found.batches):
        loads = []
        for reader in range(ranks):
            at = np.flatnonzero((found.batch == batch) & (found.reader == reader))
            begin, stop = found.position[at], found.position[at] + length[at]
            assert (stop[:-1] <= begin[1:]).all()
            loads.append(int(length[at].sum()))
        assert max(loads) - min(loads) <= HALF
        assert max(loads) <= sum(loads) / ranks + 8 * MIB, "within a run of equal parts"


def test_ranks_that_want_nothing_are_dealt_nothing() -> None:
    table = chunks_of([MIB])
    none = assign_readers([rows(), rows()], 0, table, half_bytes=HALF)
    assert (none.batches, none.bytes, len(none.alone)) == (0, 0, 0)
    alone = assign_readers([rows((0, 0, 1)), rows()], 0, table, half_bytes=HALF)
    assert (alone.batches, alone.alone.tolist()) == (0, [0])
