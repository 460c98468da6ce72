"""DeepSpeed, really trained on the CPU: its checkpoints are imported, and its saves through Flowstone resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs import is_installed, run_ranks

import flowstone as fs

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(
    not is_installed("deepspeed"), reason="`make test-integrations` installs deepspeed"
)


def act(name: str, stage: int, kind: str, directory: Path, ranks: int, *how: str) -> list[int]:
    """The exit codes of the ranks."""
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [str(HERE / "deepspeed_act.py"), name, str(stage), kind, str(directory), *how]
    return run_ranks(command, Path(f"{directory}-{name}"), ranks, environment, is_launched=True)


def said(directory: Path, name: str) -> str:
    logs = sorted(directory.parent.glob(f"{directory.name}-{name}-*.txt"))
    return "\n".join(path.read_text()[-3000:] for path in logs)


def told(directory: Path, name: str, ranks: int) -> list[dict[str, object]]:
    return [json.loads(Path(f"{directory}-{name}-{rank}.json").read_text()) for rank in range(ranks)]


def check_resumes(tmp_path: Path, stage: int, kind: str, ranks: int, *how: str) -> None:
    assert act("whole", stage, kind, tmp_path / "a", ranks, *how) == [0] * ranks, said(tmp_path / "a", "whole")
    assert -9 in act("killed", stage, kind, tmp_path / "b", ranks, *how), said(tmp_path / "b", "killed")
    assert act("resumed", stage, kind, tmp_path / "b", ranks, *how) == [0] * ranks, said(tmp_path / "b", "resumed")
    logs = [Path(f"{tmp_path / 'b'}-resumed-{rank}.txt").read_text() for rank in range(ranks)]
    resumed_from = [line for log in logs for line in log.splitlines() if line.startswith("from ")]
    assert len(resumed_from) == ranks
    assert set(resumed_from) in ({"from 2"}, {"from 3"}, {"from 4"})
    assert told(tmp_path / "b", "resumed", ranks) == told(tmp_path / "a", "whole", ranks)
    assert fs.open(tmp_path / "b").verify().sound


@pytest.mark.parametrize(("stage", "kind", "ranks"), [(0, "bf16", 2), (1, "bf16", 2), (2, "fp32", 1), (3, "fp32", 2)])
def test_a_killed_run_resumes_to_the_last_bit(tmp_path: Path, stage: int, kind: str, ranks: int) -> None:
    check_resumes(tmp_path, stage, kind, ranks)


@pytest.mark.parametrize(("stage", "kind", "ranks"), [(0, "fp32", 1), (1, "fp32", 1), (2, "bf16", 2), (3, "bf16", 2)])
def test_a_killed_run_that_has_datastates_ckpt_resumes_to_the_last_bit(
    tmp_path: Path, stage: int, kind: str, ranks: int
) -> None:
    check_resumes(tmp_path, stage, kind, ranks, "slot")


def test_the_package_that_deepspeed_imports_for_datastates_ckpt(tmp_path: Path) -> None:
    assert act("slots", 2, "bf16", tmp_path / "a", 1, "slot") == [0], said(tmp_path / "a", "slots")
    log = said(tmp_path / "a", "slots")
    assert log.splitlines()[-1] == "the end"
    assert "has no effect on a DeepSpeed engine that saves through a TorchCheckpointEngine" in log


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_another_number_of_ranks_loads_everything_or_the_model_alone(tmp_path: Path, stage: int) -> None:
    assert act("whole", stage, "bf16", tmp_path / "a", 2) == [0, 0], said(tmp_path / "a", "whole")
    assert act("other-ranks", stage, "bf16", tmp_path / "a", 1) == [0], said(tmp_path / "a", "other-ranks")
    assert said(tmp_path / "a", "other-ranks").splitlines()[-1] == "the end"


def test_a_job_that_deepspeed_saved_goes_on_through_flowstone(tmp_path: Path) -> None:
    assert act("whole", 2, "bf16", tmp_path / "a", 1) == [0], said(tmp_path / "a", "whole")
    assert act("native", 2, "bf16", tmp_path / "b", 1) == [0], said(tmp_path / "b", "native")
    assert act("resumed", 2, "bf16", tmp_path / "b", 1) == [0], said(tmp_path / "b", "resumed")
    assert "from 3" in said(tmp_path / "b", "resumed")
    assert told(tmp_path / "b", "resumed", 1) == told(tmp_path / "a", "whole", 1)


@pytest.mark.parametrize(("stage", "kind"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_what_deepspeed_saved_comes_in(tmp_path: Path, stage: int, kind: str) -> None:
    """Equal to what DeepSpeed itself gathers from the ranks."""
    assert act("native", stage, kind, tmp_path / "a", 2) == [0, 0], said(tmp_path / "a", "native")
    report = fs.import_checkpoint(tmp_path / "a", tmp_path / "run")
    assert (report.kind, report.skipped) == ("deepspeed", ())
    checkpoint = fs.open(tmp_path / "run")
    gathered = torch.load(f"{tmp_path / 'a'}-gathered.pt", weights_only=True)
    assert len(gathered) == (18 if stage else 0)
    for name, tensor in gathered.items():
        assert torch.equal(checkpoint.read(name), tensor), name
    weight = checkpoint.read("model.first.weight")
    if stage in (1, 2):
        assert torch.equal(weight, gathered["master.first.weight"].to(weight.dtype))
    assert checkpoint.read("model.seen")[0, 0] == 3
    assert checkpoint.objects["client_state"] == {"seen": [3]}
    assert checkpoint.objects["deepspeed"]["global_steps"] == 3


def test_verbs_of_a_job(tmp_path: Path) -> None:
    assert act("verbs", 2, "bf16", tmp_path / "a", 1) == [0], said(tmp_path / "a", "verbs")


def test_a_publication_that_was_lost_ends_the_process_with_status_1(tmp_path: Path) -> None:
    assert act("lost", 0, "fp32", tmp_path / "a", 1) == [1], said(tmp_path / "a", "lost")
    lost = "flowstone: step 3 is committed, but could not be published to DeepSpeed under the tag 'taken'"
    assert lost in said(tmp_path / "a", "lost")
    assert (tmp_path / "a" / "latest").read_text() == "tagged"
