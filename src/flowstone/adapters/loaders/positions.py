"""The arithmetic of redistribution: N ranks have read some entries of a shared order, and M ranks continue.

Rank r of N takes the entries r, r + N, r + 2N, ... of a shared order. `DistributedSampler` divides samples in this way,
and `split_dataset_by_node` divides shards in this way. If all ranks have taken equally many entries, the taken entries
are the beginning of that order, and M ranks can continue after it.
"""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(counts: Sequence[int]) -> int | None:
    """How many entries all ranks together have taken, if the taken entries are exactly the first ones of the shared
    order, without a gap.

    counts   how many entries each rank has taken, rank 0 first
    returns  None if the taken entries have gaps, because some rank is ahead of another
    """
    total = sum(counts)
    return total if [*counts] == counts_per_rank(total, len(counts)) else None


def counts_per_rank(total: int, ranks: int) -> list[int]:
    """How many of the first `total` entries each of `ranks` ranks takes."""
    return [(total - rank + ranks - 1) // ranks for rank in range(ranks)]


def batches_in(samples: int, batch_size: int, drop_last: bool) -> int:
    """How many batches a loader makes of the remaining samples."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def samples_per_rank(samples: int, ranks: int, drop_last: bool) -> int:
    """How many samples each rank gets from `DistributedSampler`, which drops or repeats samples if they cannot be
    divided equally.
    """
    return samples // ranks if drop_last else -(-samples // ranks)
