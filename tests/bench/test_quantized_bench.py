"""bench/quantized.py: trainings that go on from checkpoints of more and less precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.quantized import RULES, resumed


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """A training of the demo asks torch for one thread and for determinism, in the whole process."""
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(is_deterministic)


def test_a_training_goes_on_from_each_checkpoint_nearly_alike(tmp_path: Path) -> None:
    found = resumed(tmp_path, 0, 4, 3)
    assert set(found) == set(RULES)
    exact_bytes, exact_loss = found["exact"]
    assert found["moments"][0] < 0.6 * exact_bytes
    assert found["moments and weights"][0] < 0.35 * exact_bytes
    for name in RULES:
        assert abs(found[name][1] - exact_loss) < 0.05, name
    assert found["moments and weights"][1] != exact_loss
