"""Which chunks of earlier files a save rewrites."""

from __future__ import annotations

import numpy as np
import pytest

from flowstone.config import MIB
from flowstone.delta.compaction import chunks_to_rewrite


def again(used: list[int], sizes: list[int], **limits: int) -> list[int]:
    """MiB of each file that are written again; of file i, of `sizes[i]` MiB, `used[i]` are used."""
    segment = np.repeat(np.arange(len(used), dtype=np.uint32), used)
    length = np.full(len(segment), MIB, np.uint32)
    result = chunks_to_rewrite(segment, length, np.array(sizes, np.int64) * MIB, **limits)
    return np.bincount(segment[result], minlength=len(used)).tolist()


def test_a_file_of_which_a_quarter_is_used_is_kept() -> None:
    assert again([25, 24, 100, 0], [100, 100, 100, 100]) == [0, 24, 0, 0]


def test_nothing_used_is_nothing_to_write() -> None:
    assert again([], []) == []
    assert again([0, 0], [8, 8]) == [0, 0]


def test_one_save_writes_again_no_more_than_its_limit() -> None:
    assert again([20, 3], [100, 100], bytes_max=10 * MIB) == [7, 3]
    assert again([20, 3], [100, 100], bytes_max=2 * MIB) == [0, 2]
    assert again([200], [1000], bytes_max=256 * MIB) == [200]


def test_later_saves_go_on_until_the_file_is_not_used() -> None:
    left, saves = 20, 0
    while left:
        left -= again([left], [100], bytes_max=6 * MIB)[0]
        saves += 1
    assert saves == 4


def test_of_many_small_files_the_least_used_are_written_together() -> None:
    used = [3, 1, 2, 4]
    assert again(used, used, files_max=4) == [0, 0, 0, 0]
    assert again(used, used, files_max=2) == [0, 1, 2, 0]


@pytest.mark.parametrize("seed", range(20))
def test_it_never_writes_more_than_its_limit_and_never_what_is_used_well(seed: int) -> None:
    chance = np.random.default_rng(seed)
    sizes = chance.integers(1, 50, 12)
    used = [int(chance.integers(0, size + 1)) for size in sizes]
    actual = again(used, sizes.tolist(), bytes_max=20 * MIB)
    assert sum(actual) <= 20
    for written, of, size in zip(actual, used, sizes.tolist(), strict=True):
        assert written <= of
        assert written == 0 or of < 0.25 * size
