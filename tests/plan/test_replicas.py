"""Pieces with the same name and box on several ranks must be equal at every save."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from flowstone.coordination.messages import ReplicaDigests
from flowstone.errors import CollisionError
from flowstone.plan.assign_writers import assign_writers, check_replicas
from flowstone.plan.replicas import ReplicaComparison, ReplicaSets, differ
from flowstone.stage.piece_digests import whole_digests
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Layout, Piece, Pieces, TensorColumns

NONE = np.zeros(0, np.int64)
F32 = DTYPES["float32"]


def whole(*names: str, buffers: Sequence[int] = ()) -> Pieces:
    """A rank that holds all of some tensors."""
    return Pieces(TensorColumns(names, (F32,) * len(names), ((4,),) * len(names), frozenset(buffers)), NONE, NONE)


def samples(*of: int) -> np.ndarray:
    return np.array(of, np.uint64)


def test_replicas_with_equal_samples_are_the_same() -> None:
    ranks = [whole("a", "b"), whole("b", "c")]
    check_replicas(ranks, [samples(1, 2), samples(2, 3)])
    assert sum(map(len, assign_writers(ranks).writes)) == 3


def test_replicas_whose_samples_differ_are_named_with_their_ranks() -> None:
    ranks = [whole("a", "b", "c"), whole("a"), whole("b", "c")]
    with pytest.raises(CollisionError, match="'b' is not the same on rank 2 as on rank 0; 1 other"):
        check_replicas(ranks, [samples(1, 2, 4), samples(1), samples(3, 5)])
    many = [samples(1)] * 2 + [samples(2)] * 12
    with pytest.raises(CollisionError, match=r"'a' is not the same on ranks 2, 3, 4, .*, 9 and 4 more as on rank 0\n"):
        check_replicas([whole("a")] * 14, many)


def test_a_rank_without_samples_is_not_compared() -> None:
    ranks = [whole("a"), whole("a"), whole("a")]
    check_replicas(ranks, [None, samples(7), samples(7)])
    with pytest.raises(CollisionError, match="'a' is not the same on rank 2 as on rank 1"):
        check_replicas(ranks, [None, samples(7), samples(8)])


def test_what_a_rank_does_not_know_is_compared_among_the_others() -> None:
    ranks = [whole("a", "b")] * 4
    check_replicas(ranks, [samples(0, 5), samples(7, 0), samples(7, 5), samples(0, 0)])
    with pytest.raises(CollisionError, match="'a' is not the same on rank 2 as on rank 1\n"):
        check_replicas(ranks, [samples(0, 5), samples(7, 0), samples(8, 5), samples(0, 0)])
    with pytest.raises(CollisionError, match="'b' is not the same on ranks 2, 3 as on rank 0\n"):
        check_replicas(ranks, [samples(0, 5), samples(7, 0), samples(7, 6), samples(0, 6)])


def test_buffers_are_not_compared() -> None:
    ranks = [whole("a", "b", buffers=[1])] * 2
    check_replicas(ranks, [samples(1, 2), samples(1, 3)])
    assert [array.tolist() for array in assign_writers(ranks).replicas.number] == [[0, -1]] * 2


# By one number for each set


def seen(piece: Piece) -> int:
    return zlib.crc32(f"{piece.name} {piece.box}".encode()) % 65_536


class Rank:
    """One rank's pieces, and what it sees of each: a number that comes of its name and box alone."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.layout = Layout(Pieces.of(pieces), (), ())
        self.seen = np.array([seen(piece) for piece in pieces], np.uint16)

    @property
    def held(self) -> Pieces:
        parts = {index: piece.box for index, piece in enumerate(self.pieces) if piece.box != Box.whole(piece.shape)}
        boxes = [n for box in parts.values() for n in (*box.offset, *box.shape)]
        names = TensorColumns(self.layout.pieces.names, self.layout.pieces.dtypes, self.layout.pieces.shapes)
        return Pieces(names, np.array([*parts], np.int64), np.array(boxes, np.int64)).compact()


def folded(ranks: Sequence[Rank], sets: ReplicaSets, step: int, part: float | None = None) -> list[NDArray[np.uint64]]:
    folds = []
    for rank, number in zip(ranks, sets.number, strict=True):
        compared = ReplicaComparison.of(rank.layout, number, part)
        index = compared.sampled_rows(step)
        folds.append(compared.fold(index, rank.seen[compared.rows[index]], None))
    return folds


def drawn(chance: random.Random) -> list[Rank]:
    """Rows of some tensors on groups of ranks, others whole on some or all, in an order of each rank's own."""
    size, group = chance.choice([(2, 1), (4, 2), (6, 3), (5, 5)])
    ranks: list[list[Piece]] = [[] for _ in range(size)]
    for number in range(chance.randrange(1, 12)):
        name = f"t{number}"
        if chance.random() < 0.5:
            for rank, pieces in enumerate(ranks):
                pieces.append(Piece(name, F32, (group, 3), Box((rank % group, 0), (1, 3))))
        else:
            for rank in chance.sample(range(size), chance.randrange(1, size + 1)):
                ranks[rank].append(Piece(name, F32, (4, 3), Box.whole((4, 3))))
    for pieces in ranks:
        chance.shuffle(pieces)
    return [Rank(pieces) for pieces in ranks]


@pytest.mark.parametrize("seed", range(60))
def test_one_number_for_each_set_tells_every_difference_and_no_other(seed: int) -> None:
    chance = random.Random(seed)
    ranks = drawn(chance)
    replicas = assign_writers([rank.held for rank in ranks]).replicas
    assert not differ(replicas.sets, folded(ranks, replicas, step=seed))
    places = [(rank, index) for rank, own in enumerate(ranks) for index in range(len(own.pieces))]
    for rank, index in chance.sample(places, min(8, len(places))):
        piece = ranks[rank].pieces[index]
        shared = sum(other.box == piece.box for rank in ranks for other in rank.pieces if other.name == piece.name) > 1
        assert (replicas.number[rank][index] >= 0) == shared
        ranks[rank].seen[index] ^= 1 << chance.randrange(16)
        assert differ(replicas.sets, folded(ranks, replicas, step=seed)) == shared
        ranks[rank].seen[index] = seen(piece)


@pytest.mark.parametrize("seed", range(60))
def test_of_pieces_that_both_have_digested_each_difference_is_told_and_no_other(seed: int) -> None:
    chance = random.Random(seed)
    ranks = drawn(chance)
    replicas = assign_writers([rank.held for rank in ranks]).replicas
    # Some sets are digested by all ranks alike; of others each rank has digested some pieces, or none.
    alike = {key: chance.random() < 0.5 for array in replicas.sets for key in array.tolist()}
    digested = [
        [index for index, n in enumerate(number.tolist()) if n < 0 or alike[sets[n]] or chance.random() < 0.5]
        for number, sets in zip(replicas.number, replicas.sets, strict=True)
    ]

    def has_difference() -> bool:
        folds = []
        for rank, number, chosen in zip(ranks, replicas.number, digested, strict=True):
            rows = np.array(chance.sample(chosen, len(chosen)), np.int64)
            whole = rows, rank.seen[rows].astype(np.uint64)
            folds.append(ReplicaComparison.of(rank.layout, number, None).fold(NONE, rank.seen[NONE], whole))
        return differ(replicas.sets, folds)

    assert not has_difference()
    places = [(rank, index) for rank, own in enumerate(ranks) for index in range(len(own.pieces))]
    for rank, index in chance.sample(places, min(8, len(places))):
        number = replicas.number[rank][index]
        ranks[rank].seen[index] ^= 1 << chance.randrange(16)
        if number >= 0 and alike[replicas.sets[rank][number]]:
            assert has_difference()
        elif index not in digested[rank] or number < 0:
            assert not has_difference()
        ranks[rank].seen[index] = seen(ranks[rank].pieces[index])


def test_a_digest_of_chunks_tells_their_order_and_number_and_is_never_zero() -> None:
    chunks, counts = np.arange(20, dtype=np.uint64), np.array([1, 3, 2, 14])
    actual = whole_digests(chunks, counts)
    assert whole_digests(chunks[1:4], counts[1:2])[0] == actual[1]
    for other in (chunks[[2, 1, 3]], chunks[1:3], chunks[1:5]):
        assert whole_digests(other, np.array([len(other)]))[0] != actual[1]
    assert (actual != 0).all()


def test_differences_that_two_ranks_share_are_found_and_those_not_asked_are_left_out() -> None:
    ranks = [Rank([Piece(name, F32, (4,), Box.whole((4,))) for name in "ab"]) for _ in range(4)]
    replicas = assign_writers([rank.held for rank in ranks]).replicas
    for rank in ranks[2:]:
        rank.seen[0] += 1
        rank.seen[1] -= 1
    folds: list[NDArray[np.uint64] | None] = [*folded(ranks, replicas, step=1)]
    assert differ(replicas.sets, folds)
    folds[:2] = None, None
    assert not differ(replicas.sets, folds)
    assert not differ(replicas.sets, [None] * 4)


def test_a_part_of_them_is_looked_at_by_turns_the_same_on_all_ranks() -> None:
    pieces = [Piece(f"t{n}", F32, (16,), Box.whole((16,))) for n in range(400)]
    ranks = [Rank(pieces), Rank(pieces[::-1])]
    replicas = assign_writers([rank.held for rank in ranks]).replicas
    seen: set[str] = set()
    for step in range(200):
        names = []
        for rank, number in zip(ranks, replicas.number, strict=True):
            compared = ReplicaComparison.of(rank.layout, number, 0.05)
            names.append({rank.pieces[row].name for row in compared.rows[compared.sampled_rows(step)].tolist()})
        assert names[0] == names[1]
        assert 0 < len(names[0]) < 60
        seen |= names[0]
        assert not differ(replicas.sets, folded(ranks, replicas, step, 0.05))
    assert len(seen) == 400, "in the course of many saves each is looked at"
    small = Rank([Piece("s", F32, (15,), Box.whole((15,)))])
    compared = ReplicaComparison.of(small.layout, np.zeros(1, np.int64), 1.0)
    assert compared.sampled_rows(1).tolist() == [0], "what is shorter than a line is looked at whole"


def test_what_was_not_looked_at_is_known_to_be_so() -> None:
    some = ReplicaDigests((np.array([7, 2, 5]), samples(70, 20, 50)), None)
    array = some.of(np.array([5, 7]))
    assert array is not None
    assert array.tolist() == [50, 70]
    assert some.of(np.array([5, 6])) is None
    nothing = some.of(np.zeros(0, np.int64))
    assert nothing is not None
    assert not len(nothing)
    assert ReplicaDigests((np.zeros(0, np.int64), samples()), None).of(np.array([1])) is None
    every = ReplicaDigests((None, samples(1, 2, 3)), None).of(np.array([2, 0]))
    assert every is not None
    assert every.tolist() == [3, 1]


def test_ranks_that_number_alike_share_one_array() -> None:
    """8 groups of 64 ranks, each group with replicas of one shard of 300 tensors."""
    ranks = [
        Rank([Piece(f"t{n}", F32, (8, 4), Box((rank % 8, 0), (1, 4))) for n in range(300)]) for rank in range(8)
    ] * 64
    held = [rank.held for rank in ranks[:8]] * 64
    replicas = assign_writers(held).replicas
    assert len({id(number) for number in replicas.number}) <= 8
    sets = np.concatenate(replicas.sets)
    assert (len(sets), len({*sets.tolist()})) == (512, 8)
    assert np.array_equal(sets[:8], sets[-8:])
