"""An order divided among ranks, and its rest divided among other ranks: each entry once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowstone.adapters.loaders.positions import batches_in, common_prefix, counts_per_rank, samples_per_rank

RANKS = st.integers(1, 9)


@given(total=st.integers(0, 99), ranks=RANKS, more=st.integers(0, 5))
def test_ranks_take_the_beginning_of_an_order_and_go_on_behind_it(total: int, ranks: int, more: int) -> None:
    counts = counts_per_rank(total, ranks)
    assert sorted(rank + ranks * turn for rank in range(ranks) for turn in range(counts[rank])) == [*range(total)]
    assert common_prefix(counts) == total
    assert common_prefix([count + more for count in counts]) == total + more * ranks


@given(counts=st.lists(st.integers(0, 9), min_size=2, max_size=6))
def test_what_ranks_have_taken_with_gaps_is_no_beginning(counts: list[int]) -> None:
    taken = {rank + len(counts) * turn for rank, count in enumerate(counts) for turn in range(count)}
    assert (common_prefix(counts) is not None) == (taken == {*range(len(taken))})


def test_samples_and_batches_of_a_rank() -> None:
    assert [samples_per_rank(50, 3, drop_last) for drop_last in (True, False)] == [16, 17]
    assert [batches_in(17, 4, drop_last) for drop_last in (True, False)] == [4, 5]
    assert [batches_in(0, 4, drop_last) for drop_last in (True, False)] == [0, 0]
