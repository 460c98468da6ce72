"""Universal Checkpoints by Flowstone, loaded by DeepSpeed, which continues to train without a difference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import is_installed, run_ranks

import flowstone as fs

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(
    not is_installed("deepspeed"), reason="`make test-integrations` installs deepspeed"
)


def act(name: str, stage: int, kind: str, directory: Path, ranks: int, groups: int) -> None:
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [str(HERE / "deepspeed_universal_act.py"), name, str(stage), kind, str(directory), str(groups)]
    log = Path(f"{directory}-{name}")
    codes = run_ranks(command, log, ranks, environment, is_launched=True)
    assert codes == [0] * ranks, "\n".join(Path(f"{log}-{rank}.txt").read_text()[-2000:] for rank in range(ranks))


def told(place: str, ranks: int) -> list[Any]:
    return [json.loads(Path(f"{place}-{rank}.json").read_text()) for rank in range(ranks)]


def assert_same_weights(place: str, expected: str) -> None:
    actual, whole = (torch.load(f"{item}.pt", weights_only=True) for item in (place, expected))
    assert actual.keys() == whole.keys()
    for name, weights in whole.items():
        assert torch.equal(actual[name], weights), name


# DeepSpeed itself refuses fp16 on processors that have none.
FP16 = pytest.param(1, "fp16", [], marks=pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="this processor has no fp16 for DeepSpeed to train with"
))


@pytest.mark.parametrize(("stage", "kind", "others"), [FP16, (1, "bf16", []), (2, "bf16", [1]), (3, "bf16", [1])])
def test_training_goes_on_as_from_deepspeeds_own_conversion(
    tmp_path: Path, stage: int, kind: str, others: list[int]
) -> None:
    """And as if it had not been interrupted; also where another stage goes on."""
    theirs, ours, groups = tmp_path / "theirs", tmp_path / "ours", 1 if stage == 3 else 2
    act("save", stage, kind, theirs, 2, groups)
    fs.import_checkpoint(theirs, tmp_path / "run", step=3)
    assert fs.export(tmp_path / "run", ours, to="universal").skipped == ()
    places = ["--input_folder", str(theirs / "global_step3"), "--output_folder", str(theirs / "global_step3_universal")]
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *places, "--inject_missing_state"]
    subprocess.run(convert, check=True, capture_output=True)
    for directory in (theirs, ours):
        act("load", stage, kind, directory, 2, groups)
    assert told(f"{ours}-{stage}", 2) == told(f"{theirs}-{stage}", 2)
    assert [row["client"]["seen"] for row in told(f"{ours}-{stage}", 2)] == [[3], [3]]
    for other in (stage, *others):
        if other != stage:
            act("load", other, kind, ours, 2, groups)
        assert_same_weights(f"{ours}-{other}", f"{theirs}-whole")
        whole, end = told(f"{theirs}-whole", 2)[0]["end"], told(f"{ours}-{other}", 2)[0]["end"]
        assert (end["groups"], end["scheduler"], end["step"]) == (whole["groups"], whole["scheduler"], 6)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_job_without_deepspeed_goes_on_with_it(tmp_path: Path, stage: int) -> None:
    groups = 1 if stage == 3 else 2
    act("torch", stage, "fp32", tmp_path / "run", 1, groups)
    assert fs.export(tmp_path / "run", tmp_path / "universal", to="universal").skipped == ()
    act("load", stage, "fp32", tmp_path / "universal", 1, groups)
    assert_same_weights(f"{tmp_path / 'universal'}-{stage}", f"{tmp_path / 'run'}-end")
    (result,) = told(f"{tmp_path / 'universal'}-{stage}", 1)
    assert result["client"] == {"seen": None, "epoch": 2}
    assert (result["loaded"]["step"], result["loaded"]["scheduler"]) == (3, 3)
