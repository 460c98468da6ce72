"""DeepSpeed's partitions, saved through Flowstone and loaded by other numbers of ranks: every bit in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import HERE, is_installed, run_ranks

import flowstone as fs

pytestmark = pytest.mark.skipif(
    not is_installed("deepspeed"), reason="`make test-integrations` installs deepspeed"
)
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def act(ranks: int, stage: int, settings: dict[str, Any], source: Path | None, target: Path) -> None:
    record = {
        "stage": stage, "settings": settings, "source": None if source is None else str(source), "target": str(target),
    }
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [str(HERE / "deepspeed_ranks_act.py"), json.dumps(record)]
    codes = run_ranks(command, target, ranks, environment, is_launched=True)
    logs = [Path(f"{target}-{rank}.txt").read_text()[-3000:] for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(logs)


def whole(directory: str) -> fs.Checkpoint:
    """What DeepSpeed itself has saved, put together of its partitions."""
    target = Path(f"{directory}-whole")
    if not target.exists():
        fs.import_checkpoint(directory, target)
    return fs.open(target)


def groups(checkpoint: fs.Checkpoint) -> list[dict[str, Any]]:
    """The optimizer's, whichever order their parameters are flattened in."""
    stored: Any = checkpoint.objects["optimizer"]
    return [{**group, "params": sorted(group["params"])} for group in stored["param_groups"]]


def assert_same(loaded: str, saved: str) -> None:
    actual, expected = whole(loaded), whole(saved)
    assert set(actual.tensors) == set(expected.tensors)
    assert len(actual.tensors) >= 26  # six parameters with master weights and two slots each, a frozen one, a buffer
    for name in expected.tensors:
        assert torch.equal(actual.read(name), expected.read(name)), name
    assert groups(actual) == groups(expected)
    assert actual.objects["lr_scheduler"] == expected.objects["lr_scheduler"]
    assert actual.objects["client_state"] == expected.objects["client_state"] == {"epoch": 2}
    assert actual.objects["deepspeed"]["global_steps"] == expected.objects["deepspeed"]["global_steps"]


@pytest.mark.parametrize(("stage", "settings"), [
    (1, {}),
    (1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),  # another class of optimizer
    (2, {**BF16, "zero": {"round_robin_gradients": True}}),  # parameters in an order that depends on the ranks
    (3, {**BF16, "zero": {"sub_group_size": 1000, "stage3_param_persistence_threshold": 50}}),
])
def test_other_numbers_of_ranks_go_on(tmp_path: Path, stage: int, settings: dict[str, Any]) -> None:
    act(2, stage, settings, None, tmp_path / "two")
    act(1, stage, settings, tmp_path / "two", tmp_path / "one")
    assert_same(f"{tmp_path}/one-loaded", f"{tmp_path}/two-trained")
    act(3, stage, settings, tmp_path / "two", tmp_path / "three")
    assert_same(f"{tmp_path}/three-loaded", f"{tmp_path}/two-trained")
    act(2, stage, settings, tmp_path / "three", tmp_path / "again")
    assert_same(f"{tmp_path}/again-loaded", f"{tmp_path}/three-trained")
