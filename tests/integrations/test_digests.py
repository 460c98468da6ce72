"""Different values have different digests: otherwise a resumed run with other values would pass."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from digests import digest

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a border between texts": (["ab", "c"], ["a", "bc"]),
    "a border between tensors": (
        [torch.zeros(1), torch.zeros(2)], [torch.zeros(2), torch.zeros(1)]
    ),
    "a border between containers": ([[1], [2, 3]], [[1, 2], [3]]),
    "a text that reads as two": (["1', '2"], ["1", "2"]),
    "a key that reads as a value": ({"a": "b", "c": "d"}, {"a": ["b", "c", "d"]}),
    "an empty container": ([[], 1], [1]),
    "lists and tuples": ([1, 2], (1, 2)),
    "shapes": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "dtypes": (torch.zeros(2, dtype=torch.float32), torch.zeros(2, dtype=torch.int32)),
    "bytes of a tensor": (torch.zeros(4), torch.tensor([0.0, 0.0, 0.0, -0.0])),
    "a tensor and an array": (torch.zeros(2), np.zeros(2, np.float32)),
    "numbers and texts": (1, "1"),
    "kinds of numbers": (1, True),
    "attributes": (SimpleNamespace(a=1), SimpleNamespace(b=1)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_values_that_differ_have_different_digests(name: str) -> None:
    first, second = DIFFERENT[name]
    assert digest(first) != digest(second)


def test_equal_values_have_one_digest() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert digest({"w": whole.t()}) == digest(OrderedDict(w=whole.t().contiguous()))
    assert digest([whole.to(torch.bfloat16), np.arange(3)]) == digest([whole.bfloat16().clone(), np.arange(3)])


@pytest.mark.parametrize(
    "value", [print, hashlib.sha256(), np.array([None]), {1, 2}], ids=lambda value: type(value).__name__
)
def test_what_is_not_known_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="no digest"):
        digest({"a": [value]})
