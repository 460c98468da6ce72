"""Accelerate's `save_state` and `load_state` through Flowstone: killed and resumed, with the same result to the bit."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_ranks

import flowstone as fs

pytest.importorskip("accelerate", reason="`make test-integrations` installs it")
pytest.importorskip("transformers", reason="`make test-integrations` installs it")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration
from accelerate_act import prepared
from trainer_act import digest

from flowstone.adapters.huggingface import get_last_checkpoint, use_flowstone

ACT = str(Path(__file__).with_name("accelerate_act.py"))


def act(folder: Path, run: str, *, ranks: int = 1, **value: Any) -> list[int]:
    return run_ranks([ACT, json.dumps({"out": str(folder / "out"), **value})], folder / run, ranks)


def said(folder: Path, run: str, rank: int = 0) -> str:
    return (folder / f"{run}-{rank}.txt").read_text()


@pytest.fixture(autouse=True)
def _one_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps what the first Accelerator of a process was told."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.set_num_threads(1)
    yield
    for item in (AcceleratorState, GradientState, PartialState):
        item._reset_state()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_and_resumed_run_ends_as_one_without_flowstone(ranks: int, tmp_path: Path) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir(), killed.mkdir()
    assert set(act(calm, "undisturbed", ranks=ranks, flowstone=False)) == {0}, said(calm, "undisturbed")
    codes = act(killed, "cut-short", ranks=ranks, kill_at=18)
    assert -signal.SIGKILL in codes, said(killed, "cut-short")
    reached = fs.open(killed / "out").step
    assert reached in (5, 10, 15)
    assert fs.open(killed / "out").verify().sound
    assert set(act(killed, "resumed", ranks=ranks)) == {0}, said(killed, "resumed")
    for rank in range(ranks):
        expected, actual = (json.loads((item / f"out-{rank}.json").read_text()) for item in (calm, killed))
        assert actual == expected
        assert len(actual["losses"]) == 30
    assert fs.open(killed / "out").step == 30


@pytest.mark.parametrize(("full_at", "steps"), [(0, 20), (7, 20), (7, 10)], ids=["first", "second", "last"])
def test_a_save_that_fails_is_raised(full_at: int, steps: int, tmp_path: Path) -> None:
    codes = act(tmp_path, "full", full_at=full_at, steps=steps)
    assert set(codes) == {1}, said(tmp_path, "full")
    assert "ulimit -f" in said(tmp_path, "full")
    assert get_last_checkpoint(tmp_path / "out") == (str(tmp_path / "out/step-00000005") if full_at else None)
    assert not (tmp_path / "out-0.json").exists()


def made(**given: Any) -> tuple[Any, Any]:
    accelerator = use_flowstone(Accelerator(cpu=True, **given))
    return accelerator, prepared(accelerator)


def change(model: torch.nn.Module) -> str:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return digest(model.state_dict())


def kept(store: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in store.glob("step-*"))


def test_the_path_that_was_saved_to_is_the_path_to_load_from(tmp_path: Path) -> None:
    accelerator, (model, *_) = made()
    states = {}
    for step in (100, 200, 300):
        accelerator._flowstone._checkpointer and accelerator._flowstone._checkpointer.fence()
        states[step] = change(model)
        path = accelerator.save_state(tmp_path / f"checkpoint-{step}")
        assert path == tmp_path / f"step-{step:08d}"
    accelerator.load_state(tmp_path / "checkpoint-100")
    assert digest(model.state_dict()) == states[100]
    accelerator.load_state(get_last_checkpoint(tmp_path))
    assert digest(model.state_dict()) == states[300]
    accelerator.load_state(tmp_path)
    assert digest(model.state_dict()) == states[300]
    accelerator.load_state(str(tmp_path / "step-00000200"))
    accelerator.save_state(tmp_path / "checkpoint-250")
    accelerator.end_training()
    assert kept(tmp_path) == [100, 200, 250]
    assert len(list(tmp_path.glob(".superseded-*"))) == 1
    checkpoint = fs.open(tmp_path)
    assert {"model.0.weight", "model.4.bias", "model.1.running_mean"} < set(checkpoint.tensors)
    assert checkpoint.objects["accelerator"] == {"step": 0}
    assert checkpoint.objects["registered"] == {"losses": []}


def test_a_path_without_a_number_holds_the_newest(tmp_path: Path) -> None:
    accelerator, (model, *_) = made()
    for _ in range(3):
        after = change(model)
        accelerator.save_state(tmp_path / "newest")
        accelerator._flowstone._checkpointer.wait()
    accelerator.load_state(tmp_path / "newest")
    assert digest(model.state_dict()) == after
    accelerator.end_training()
    assert kept(tmp_path / "newest") == [2]
    again, (model, *_) = made()
    again.load_state(tmp_path / "newest")
    assert digest(model.state_dict()) == after
    again.save_state(tmp_path / "newest")
    again.end_training()
    assert kept(tmp_path / "newest") == [3]


def test_automatic_names_count_on_after_a_load(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator, (model, *_) = made(project_config=project)
    for _ in range(4):
        after = change(model)
        accelerator.save_state()
        accelerator._flowstone._checkpointer.wait()
    accelerator.end_training()
    assert kept(tmp_path / "checkpoints") == [2, 3]
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    again, (model, *_) = made(project_config=project)
    again.load_state()
    assert digest(model.state_dict()) == after
    again.save_state()
    again.end_training()
    assert kept(tmp_path / "checkpoints") == [3, 4]


def test_what_accelerate_saved_by_itself_is_loaded(tmp_path: Path) -> None:
    plain = Accelerator(cpu=True)
    model, *_ = prepared(plain)
    before = change(model)
    plain.save_state(tmp_path / "step_7")
    accelerator, (model, *_) = made()
    accelerator.load_state(str(tmp_path / "step_7"))
    assert digest(model.state_dict()) == before


def test_hooks_of_loads_are_refused_by_name_and_nothing_changes(tmp_path: Path) -> None:
    plain = Accelerator(cpu=True)
    prepared(plain)
    plain.save_state(tmp_path / "by-itself")
    accelerator, (model, *_) = made()
    accelerator.save_state(tmp_path / "step_5")
    accelerator._flowstone._checkpointer.fence()
    before = change(model)
    called: list[str] = []
    hook = accelerator.register_load_state_pre_hook(lambda models, folder: called.append(folder))
    with pytest.raises(fs.ArgumentError, match="register_load_state_pre_hook"):
        accelerator.load_state(tmp_path / "step_5")
    assert digest(model.state_dict()) == before
    assert not called
    accelerator.load_state(str(tmp_path / "by-itself"))
    assert called == [str(tmp_path / "by-itself")]
    hook.remove()
    accelerator.load_state(tmp_path / "step_5")
    accelerator.end_training()


def test_use_flowstone_twice_derives_once(tmp_path: Path) -> None:
    accelerator, _ = made()
    kind = type(accelerator)
    assert type(use_flowstone(accelerator)) is kind
    assert kind.__name__ == "Accelerator"
    assert isinstance(accelerator, Accelerator)


def test_a_subclass_keeps_its_own_methods(tmp_path: Path) -> None:
    class Mine(Accelerator):  # type: ignore[misc]
        def save_state(self, output_dir: Any, **given: Any) -> Any:
            self.saved = super().save_state(f"{output_dir}/step_1", **given)

    accelerator = use_flowstone(Mine(cpu=True))
    prepared(accelerator)
    accelerator.save_state(tmp_path)
    accelerator.end_training()
    assert accelerator.saved == tmp_path / "step-00000001"
    assert kept(tmp_path) == [1]


def test_wrong_calls_are_refused_by_name(tmp_path: Path) -> None:
    accelerator = use_flowstone(Accelerator(cpu=True))
    with pytest.raises(fs.ArgumentError, match="prepare"):
        accelerator.save_state(tmp_path / "step_1")
    prepared(accelerator)
    with pytest.raises(fs.ArgumentError, match="needs a directory"):
        accelerator.save_state()
    with pytest.raises(fs.NoCheckpointError, match="step_9"):
        accelerator.load_state(tmp_path / "step_9")
    accelerator.save_state(tmp_path / "step_5")
    with pytest.raises(fs.StepExistsError):
        accelerator.save_state(tmp_path / "step_5")
    with pytest.raises(fs.ArgumentError, match="strict"):
        accelerator.load_state(tmp_path / "step_5", strict=False)
    with pytest.raises(fs.ArgumentError, match="does not support exclude_frozen_parameters"):
        accelerator.save_state(tmp_path / "step_6", exclude_frozen_parameters=True)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(fs.ArgumentError, match="register_save_state_pre_hook"):
        accelerator.save_state(tmp_path / "step_6")
    accelerator.end_training()
    assert kept(tmp_path) == [5]
