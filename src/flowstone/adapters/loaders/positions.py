"""The arithmetic of dividing: how far each of N ranks goes through an order that they share, and each of M other ranks.

Rank r of N takes the entries r, r + N, r + 2N, ... of an order that all ranks know: `DistributedSampler` deals samples
so, `split_dataset_by_node` deals shards. Where the ranks keep step, what they have taken together is the beginning of
that order; so it is on M ranks, for another division of the same entries.
"""

from __future__ import annotations

from collections.abc import Sequence


def taken_together(counts: Sequence[int]) -> int | None:
    """How many entries from the beginning of the order all ranks have taken together.

    counts   how many each rank has taken of its own, in the order of ranks
    returns  None if what they have taken is no beginning of the order: some rank is ahead of another
    """
    total = sum(counts)
    return total if [*counts] == counts_on(total, len(counts)) else None


def counts_on(total: int, ranks: int) -> list[int]:
    """How many of the first `total` entries each of `ranks` ranks takes."""
    return [(total - rank + ranks - 1) // ranks for rank in range(ranks)]


def batches_in(samples: int, batch_size: int, drop_last: bool) -> int:
    """How many batches a loader makes of the samples that are left to it."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def samples_of_a_rank(samples: int, ranks: int, drop_last: bool) -> int:
    """How many samples `DistributedSampler` gives to each rank: what does not divide is dropped, or some repeated."""
    return samples // ranks if drop_last else -(-samples // ranks)
