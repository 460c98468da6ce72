"""Digests of a few bytes of each tensor, by which ranks know their replicas."""

from __future__ import annotations

import numpy as np
import torch
from far import Far, shown

from flowstone.stage.capture import sample_digests
from flowstone.state import describe


def digests(state: dict[str, object]) -> list[int]:
    described = describe(state)
    found: list[int] = sample_digests(described.pieces, described.places).tolist()
    return found


def test_equal_tensors_have_equal_digests_wherever_they_lie() -> None:
    torch.manual_seed(1)
    large, small, tiny = torch.randn(700, 600), torch.randn(40, 30), torch.tensor(3)
    plain = digests({"a": large, "b": small, "c": tiny, "d": torch.zeros(0)})
    turned = {"a": large.t().contiguous().t(), "b": small.repeat(1, 2)[:, :30], "c": tiny.clone(), "d": torch.zeros(0)}
    assert digests(turned) == plain
    assert digests({"a": large.numpy().copy()}) == plain[:1]
    with shown(Far(8 << 20)) as far:
        assert digests({"a": far.tensor(large), "b": small}) == plain[:2]
    assert len({*plain}) == 4


def test_tensors_that_differ_everywhere_have_other_digests() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        one, other = torch.randn(300, 500), torch.randn(300, 500)
        assert digests({"a": one}) != digests({"a": other})
    small = torch.zeros(7)
    assert digests({"a": small}) != digests({"a": small + 1})


def test_a_change_of_one_byte_in_a_small_tensor_is_seen() -> None:
    for at in range(64):
        values = np.zeros(64, np.uint8)
        before = digests({"a": values})
        values[at] = 1
        assert digests({"a": values}) != before
