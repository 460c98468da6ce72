"""bench/quantized.py: trainings that continue from checkpoints of more and less precision."""

from __future__ import annotations

from pathlib import Path

from bench.quantized import RULES, resumed


def test_a_training_goes_on_from_each_checkpoint_nearly_alike(tmp_path: Path) -> None:
    result = resumed(tmp_path, 0, 4, 3)
    assert set(result) == set(RULES)
    exact_bytes, exact_loss = result["exact"]
    assert result["moments"][0] < 0.6 * exact_bytes
    assert result["moments and weights"][0] < 0.35 * exact_bytes
    for name in RULES:
        assert abs(result[name][1] - exact_loss) < 0.05, name
    assert result["moments and weights"][1] != exact_loss
