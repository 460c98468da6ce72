"""Samples of a few lines of each tensor, and their digests, by which ranks compare replicas."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flowstone import _native
from flowstone.stage.capture import _seeds
from flowstone.stage.samples import take_samples
from flowstone.state import describe
from flowstone.torch import device_memory
from flowstone.torch.tensors import memory_of
from simulated_device import SimulatedDevice, visible_device


def digests(state: dict[str, object], seed: int = 0) -> list[int]:
    described = describe(state)
    lengths = np.array([piece.bytes for piece in described.pieces], np.uint64)
    digests: list[int] = take_samples(
        described.places, np.arange(len(lengths)), lengths, seed=seed
    ).wait_digests().tolist()
    return digests


def begins(row_bytes: int, seeds: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where the lines of rows of this length lie, a row for each seed."""
    begins = _native.line_begins(np.full(len(seeds), row_bytes, np.uint64), seeds).astype(np.int64)
    return begins.reshape(len(seeds), -1)


def test_equal_tensors_have_equal_digests_wherever_they_lie() -> None:
    torch.manual_seed(1)
    large, small, tiny = torch.randn(700, 600), torch.randn(40, 30), torch.tensor(3)
    plain = digests({"a": large, "b": small, "c": tiny, "d": torch.zeros(0)})
    turned = {"a": large.t().contiguous().t(), "b": small.repeat(1, 2)[:, :30], "c": tiny.clone(), "d": torch.zeros(0)}
    assert digests(turned) == plain
    assert digests({"a": large.numpy().copy()}) == plain[:1]
    with visible_device(SimulatedDevice(8 << 20)) as far:
        assert digests({"a": far.tensor(large), "b": small}) == plain[:2]
        turned = {"a": far.strided(large.t().contiguous().t()), "b": far.tensor(small.repeat(1, 2))[:, :30]}
        assert digests(turned) == plain[:2]
        near = memory_of(tiny)
        with mock.patch.object(device_memory, "host_copy", return_value=near):  # no line of it can be taken over there
            assert digests({"c": far.tensor(tiny)}) == plain[2:3]
    assert len({*plain}) == 4


def test_tensors_that_differ_everywhere_have_other_digests() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        first, other = torch.randn(300, 500), torch.randn(300, 500)
        assert digests({"a": first}) != digests({"a": other})
    small = torch.zeros(7)
    assert digests({"a": small}) != digests({"a": small + 1})


def test_a_change_of_one_byte_in_a_small_tensor_is_seen() -> None:
    for index in range(64):
        values = np.zeros(64, np.uint8)
        before = digests({"a": values})
        values[index] = 1
        assert digests({"a": values}) != before


QUARTER = 256 * 1024


@pytest.mark.parametrize("changed", [64, 3072, 16 * 1024], ids=lambda n: f"{n} bytes")
def test_what_changes_is_looked_at_as_often_as_the_limits_say(changed: int) -> None:
    """docs/SAVING.md: n neighbouring bytes by a chance of n in 256 KiB at each save, wherever they are."""
    saves, rows = 2000, 25
    looks = begins(1 << 20, np.concatenate([_seeds(rows, step) for step in range(saves)]))
    for start in (0, 100 * 64, QUARTER - changed, QUARTER + 77 * 64):
        hits = np.any((looks >= start) & (looks < start + changed), axis=1).reshape(saves, rows)
        chance = changed / QUARTER
        assert_as_likely(hits, chance)
        # Saves and tensors have nothing to do with each other: what is missed in one is not missed for ever.
        assert_as_likely(hits.any(axis=0), 1 - (1 - chance) ** saves)
        assert_as_likely(hits.any(axis=1), 1 - (1 - chance) ** rows)


def assert_as_likely(hits: NDArray[np.bool_], chance: float) -> None:
    spread = (chance * (1 - chance) / hits.size) ** 0.5
    assert abs(float(hits.mean()) - chance) < 4 * spread + 1e-6


def test_neighbouring_tensors_and_saves_look_at_other_lines() -> None:
    looks = begins(QUARTER, np.concatenate([_seeds(50, step) for step in range(50)]))[:, 0].reshape(50, 50)
    for first, other in ((looks[1:], looks[:-1]), (looks[:, 1:], looks[:, :-1])):
        assert np.mean(first == other) < 0.01
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.1


def test_one_byte_of_4096_is_looked_at_whatever_the_seed() -> None:
    for row_bytes in (1 << 20, 5 << 20, 64 * 1024, 300_000, (7 << 20) + 4):
        for looks in begins(row_bytes, np.arange(100, dtype=np.uint64)):
            assert _native.LINE_BYTES * len(set(looks.tolist())) >= row_bytes / 4096
            assert looks.max() + _native.LINE_BYTES <= row_bytes


def test_replicas_that_differ_in_one_row_are_told_apart_after_some_saves() -> None:
    torch.manual_seed(1)
    tensor = torch.randn(4096, 256)
    other = tensor.clone()
    other[1234] += 1
    assert all(digests({"a": tensor}, seed) == digests({"a": tensor.clone()}, seed) for seed in range(5))
    told_apart = [digests({"a": tensor}, seed) != digests({"a": other}, seed) for seed in range(2000)]
    assert 2 <= sum(told_apart) <= 20, "1 KiB of 256: one save in 256"
