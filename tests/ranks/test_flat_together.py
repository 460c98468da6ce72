"""Flattened and unflattened, with any sharding: real ranks train, save, load each other's checkpoints, and continue."""

from __future__ import annotations

from pathlib import Path

from processes import run
from test_together import values


def test_what_any_ranks_of_any_kind_save_any_ranks_of_any_kind_load_and_train_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    done = run(3, "flat_acts", "every_layout", str(path))
    loads = 4 * 12 + 2 * 3 + 3  # of every kind but "zero", whose other end is itself or "plain"
    assert done == [3 * loads, 2 * loads, loads]
    for how in ("flat", "original"):
        for step in (1, 2):  # captured lazily, while the optimizer was about to step
            assert values(Path(f"{path}-{how}"), step) == {float(step)}


def test_slots_that_are_no_tensors_come_to_whoever_keeps_their_parameter(tmp_path: Path) -> None:
    """Of a sharded parameter, or of a ZeroRedundancyOptimizer, no rank has them all."""
    results = run(3, "flat_acts", "slots_without_tensors", str(tmp_path / "run"))
    layers = {f"{layer}.{name}" for layer in ("first", "conv", "last.0") for name in ("weight", "bias")}
    kept: dict[str, set[str]] = {}
    for of_rank in results:
        assert isinstance(of_rank, dict)
        for load, names in of_rank.items():
            kept[load] = kept.get(load, set()).union(names)
    assert len(kept) == 8
    assert all(names == {"scale", "last.1.weight", *layers} for names in kept.values()), kept
