"""Saves of several ranks that leave out derived tensors, loaded by other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from derived_acts import COLUMNS, ROWS, loads, whole
from processes import run

import flowstone as fs
from forge import stored_bytes


def test_what_two_ranks_derived_is_loaded_by_one_and_by_three(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(2, "derived_acts", "saves", str(path), 2)
    assert run(3, "derived_acts", "loads", str(path), 3, 2) == [True, True, True]
    assert loads(0, str(path), 1, 2)
    for step in (1, 2):
        checkpoint = fs.open(path, step)
        assert checkpoint.manifest.ranks == 2
        verified = checkpoint.verify()
        assert (verified.sound, verified.extra) == (True, ())
        for name, tensor in whole(step).items():
            assert torch.equal(checkpoint.read(f"{name}.w"), tensor)
    assert {"copies", "codec.cast"} <= set(checkpoint.manifest.critical), "the first plan is made without a look"
    assert stored_bytes(path, 2) < 4 * ROWS * COLUMNS + 60_000, "the masters alone"
    made_up = {section.section: section for section in checkpoint.sections}
    assert made_up["working"].derived == 2 * ROWS * COLUMNS
