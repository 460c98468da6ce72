"""Steps in the names of other tools' checkpoints."""

from __future__ import annotations

import pytest

from flowstone.adapters.step_names import step_at_end
from flowstone.config import STEP_MAX


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_100", 100), ("checkpoint-7", 7), ("runs/2/checkpoint-7", 7), ("0012", 12), ("epoch0", 0),
        (f"step_{STEP_MAX}", STEP_MAX), (f"step_{STEP_MAX + 1}", None), ("20261231235959000001", None),
        ("newest", None), ("7-best", None), ("", None), ("step_٣", None),
    ],
)
def test_the_number_at_the_end_of_a_name_is_its_step(name: str, step: int | None) -> None:
    assert step_at_end(name) == step
