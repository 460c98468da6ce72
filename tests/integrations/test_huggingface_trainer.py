"""transformers' Trainer through Flowstone: trained, killed and resumed with the same result bit for bit.

Also the contents of its checkpoints, and calls that are refused.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_ranks

import flowstone as fs

transformers = pytest.importorskip("transformers", reason="`make test-integrations` installs it")

from trainer_act import STEPS, Text, digest, ended, made_trainer, small_gpt  # noqa: E402  (it imports transformers)

from flowstone.adapters.huggingface import get_last_checkpoint, use_flowstone  # noqa: E402

ACT = str(Path(__file__).with_name("trainer_act.py"))
KILL_AT = 18  # between two saves, within the second epoch


def act(folder: Path, run: str, *, ranks: int = 1, **value: Any) -> list[int]:
    return run_ranks([ACT, json.dumps({"out": str(folder / "out"), **value})], folder / run, ranks)


def said(folder: Path, run: str, rank: int = 0) -> str:
    return (folder / f"{run}-{rank}.txt").read_text()


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_and_resumed_run_ends_as_the_trainer_by_itself(ranks: int, tmp_path: Path) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir(), killed.mkdir()
    settings = {"eval_strategy": "steps", "eval_steps": 5, "metric_for_best_model": "loss", "save_total_limit": 3}
    assert set(act(calm, "undisturbed", ranks=ranks, flowstone=False, args=settings)) == {0}, said(calm, "undisturbed")
    codes = act(killed, "cut-short", ranks=ranks, kill_at=KILL_AT, args=settings)
    assert -signal.SIGKILL in codes, said(killed, "cut-short")
    reached = fs.open(killed / "out").step
    assert reached in (5, 10, 15)
    assert fs.open(killed / "out").verify().sound
    codes = act(killed, "resumed", ranks=ranks, resume="last", args=settings)
    assert set(codes) == {0}, said(killed, "resumed")
    for rank in range(ranks):
        expected, actual = (json.loads((item / f"out-{rank}.json").read_text()) for item in (calm, killed))
        assert actual == expected
        assert len([entry for entry in actual["log"] if "loss" in entry]) == STEPS
    assert said(killed, "resumed").count("'loss'") == STEPS - reached, "it went on behind what was saved"
    assert not list((killed / "out").glob("checkpoint-*"))


class Once(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Does something before one step, the first time that this is reached."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            self.act()


def trained(
    out: Path, *callbacks: Any, scores: list[float] | None = None, steps: int = 20, resume: object = None, **given: Any
) -> Any:
    """A Trainer over Flowstone that has trained; `scores` are what its evaluations, every five steps, find."""
    if scores is not None:
        given |= {"eval_strategy": "steps", "eval_steps": 5, "metric_for_best_model": "score"}
    trainer = made_trainer(out, list(callbacks), max_steps=steps, greater_is_better=True, **given)
    if scores is not None:
        left = iter(scores)
        trainer.compute_metrics = lambda _: {"score": next(left)}
    trainer = use_flowstone(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def kept(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in out.glob("step-*"))


def stored_trainer_state(out: Path, step: int | None = None) -> dict[str, Any]:
    record: dict[str, Any] = fs.open(out, step=step).state_dict("trainer_state", rank=0)
    return record


@pytest.mark.parametrize(
    ("limit", "scores", "expected"),
    [
        (None, None, [5, 10, 15, 20]), (2, None, [15, 20]), (2, [9.0, 1.0, 2.0, 3.0], [5, 20]),
        (3, [1.0, 9.0, 2.0, 3.0], [10, 15, 20]), (2, [1.0, 2.0, 3.0, 4.0], [15, 20]),
        (1, [1.0, 9.0, 2.0, 3.0], [10, 20]),
    ],
)
def test_save_total_limit_keeps_the_newest_and_the_best(
    limit: int | None, scores: list[float] | None, expected: list[int], tmp_path: Path
) -> None:
    trained(tmp_path / "out", scores=scores, save_total_limit=limit)
    assert kept(tmp_path / "out") == expected


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    trainer = trained(out, scores=[1.0, 9.0, 2.0, 3.0], load_best_model_at_end=True, save_total_limit=1)
    assert trainer.state.best_global_step == 10
    assert trainer.state.best_model_checkpoint == str(out / "step-00000010")
    best = fs.open(out, step=10).state_dict("model")
    assert all(torch.equal(best[name], tensor) for name, tensor in trainer.model.state_dict().items())
    last = fs.open(out, step=20).state_dict("model")
    assert not all(torch.equal(last[name], tensor) for name, tensor in trainer.model.state_dict().items())
    assert stored_trainer_state(out)["best_model_checkpoint"] == str(out / "step-00000010")


def test_the_best_step_is_loaded_although_its_save_is_the_last_and_still_in_flight(tmp_path: Path) -> None:
    out = tmp_path / "out"
    trainer = trained(out, scores=[1.0, 2.0, 3.0, 4.0], load_best_model_at_end=True)
    assert trainer.state.best_model_checkpoint == str(out / "step-00000020")
    best = fs.open(out, step=20).state_dict("model")
    assert all(torch.equal(best[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_the_best_step_is_loaded_from_the_store_of_the_run_before(tmp_path: Path) -> None:
    trained(tmp_path / "a", scores=[9.0, 1.0], steps=10)
    trainer = trained(tmp_path / "b", scores=[1.0, 2.0], load_best_model_at_end=True, resume=str(tmp_path / "a"))
    assert trainer.state.best_model_checkpoint == str(tmp_path / "a/step-00000005")
    best = fs.open(tmp_path / "a", step=5).state_dict("model")
    assert all(torch.equal(best[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_a_best_step_that_was_removed_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    trained(out, scores=[9.0, 1.0], steps=10)
    shutil.rmtree(out / "step-00000005")
    again = trained(out, scores=[1.0, 2.0], load_best_model_at_end=True, resume=True)
    assert again.state.best_model_checkpoint is None
    assert kept(out) == [10, 15, 20]
    gone = tmp_path / "b/step-00000005"
    with caplog.at_level(logging.WARNING, "flowstone"):
        trained(
            tmp_path / "b", Once(12, partial(shutil.rmtree, gone)), scores=[9.0, 1.0, 2.0], steps=15,
            load_best_model_at_end=True,
        )
    assert f"{gone} does not exist, and is not loaded" in caplog.text


def test_the_trainers_own_checkpoints_are_compared_with_the_best_once_that_is_saved(tmp_path: Path) -> None:
    out = tmp_path / "out"
    made_trainer(out, [], max_steps=5).train()
    trained(out, scores=[1.0], steps=10, resume=True, save_total_limit=1)
    assert kept(out) == [10]
    assert not list(out.glob("checkpoint-*")), "the Trainer removes all but the best"


def test_save_strategies_save_when_they_say(tmp_path: Path) -> None:
    trained(tmp_path / "epochs", steps=30, save_strategy="epoch")
    assert kept(tmp_path / "epochs") == [12, 24, 30]
    trained(tmp_path / "best", scores=[1.0, 9.0, 2.0, 10.0], save_strategy="best")
    assert kept(tmp_path / "best") == [5, 10, 20]
    trained(tmp_path / "none", save_strategy="no")
    assert not (tmp_path / "none").exists() or not kept(tmp_path / "none")


def test_trainer_state_is_what_the_trainer_writes_by_itself(tmp_path: Path) -> None:
    plain = made_trainer(tmp_path / "plain", [], max_steps=10)
    plain.train()
    expected = json.loads((tmp_path / "plain/checkpoint-10/trainer_state.json").read_text())
    trained(tmp_path / "ours", steps=10)
    actual = stored_trainer_state(tmp_path / "ours")
    # A list in which each save adds to what the one before has listed; ours has the callbacks as they are.
    assert actual == expected
    assert list(fs.open(tmp_path / "ours").objects) == ["model", "optimizer", "scheduler"]


def test_without_the_optimizer_only_weights_are_saved(tmp_path: Path) -> None:
    trained(tmp_path / "out", steps=5, save_only_model=True)
    checkpoint = fs.open(tmp_path / "out")
    assert {name.partition(".")[0] for name in checkpoint.tensors} == {"model"}
    with pytest.raises(fs.MismatchError, match="optimizer"):
        use_flowstone(made_trainer(tmp_path / "out", [])).train(resume_from_checkpoint=True)


def test_a_run_goes_back_to_an_older_step_and_sets_newer_ones_aside(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = ended(trained(out))
    trainer = use_flowstone(made_trainer(out, [], max_steps=20))
    trainer.train(resume_from_checkpoint=out / "step-00000010")
    assert ended(trainer) == first
    assert kept(out) == [5, 10, 15, 20]
    assert len(list(out.glob(".superseded-*"))) == 2


def test_a_run_goes_on_from_another_runs_store(tmp_path: Path) -> None:
    first = ended(trained(tmp_path / "a"))
    trainer = use_flowstone(made_trainer(tmp_path / "b", [], max_steps=20))
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "step-00000010"))
    assert ended(trainer) == first
    assert (kept(tmp_path / "a"), kept(tmp_path / "b")) == ([5, 10, 15, 20], [15, 20])


def test_a_store_that_the_trainer_wrote_its_model_into_is_resumed_from_as_a_store(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    trainer = trained(out)
    expected = ended(trainer)
    shutil.copytree(out / "step-00000010", other / "step-00000010")
    shutil.copy(out / "flowstone.json", other)
    trainer.save_model(str(other))
    trainer.args.output_dir = str(other)
    trainer.save_state()
    assert {"model.safetensors", "trainer_state.json"} < {path.name for path in other.iterdir()}
    assert ended(trained(other, resume=str(other))) == expected


def test_an_interrupted_run_goes_on_in_the_same_process(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    settings = {"gradient_accumulation_steps": 2, "save_steps": 4}
    calm = ended(trained(tmp_path / "calm", **settings))
    trainer = use_flowstone(made_trainer(tmp_path / "out", [Once(9, interrupt)], max_steps=20, **settings))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert kept(tmp_path / "out") == [4, 8]
    trainer.train(resume_from_checkpoint=True)
    assert ended(trainer) == calm


def test_a_smaller_batch_size_sets_the_steps_of_the_larger_one_aside(tmp_path: Path) -> None:
    def short_of_memory() -> None:
        raise RuntimeError("CUDA out of memory.")

    def epochs(out: Path) -> dict[int, float]:
        return {step: stored_trainer_state(out, step)["epoch"] for step in kept(out)}

    out = tmp_path / "out"
    trained(out, Once(3, short_of_memory), auto_find_batch_size=True, steps=10)
    assert epochs(out) == {5: 5 / 16, 10: 10 / 16}
    with pytest.raises(fs.StepExistsError, match="restarted the training at step 0"):
        trained(tmp_path / "b", Once(7, short_of_memory), auto_find_batch_size=True)
    out = tmp_path / "c"
    trained(out, steps=5)
    trained(out, Once(12, short_of_memory), auto_find_batch_size=True, steps=15, resume=True)
    assert epochs(out) == {5: 5 / 12, 10: 10 / 16, 15: 15 / 16}
    assert len(list(out.glob(".superseded-*"))) == 1


def test_a_run_goes_on_from_what_the_trainer_saved_by_itself(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plain = made_trainer(out, [], max_steps=20)
    plain.train()
    expected = ended(plain)
    for other in ("checkpoint-15", "checkpoint-20"):
        (out / other).rename(tmp_path / other)
    assert get_last_checkpoint(out) == str(out / "checkpoint-10")
    trainer = use_flowstone(made_trainer(out, [], max_steps=20))
    trainer.train(resume_from_checkpoint=True)
    assert ended(trainer) == expected
    assert kept(out) == [15, 20]
    assert get_last_checkpoint(out) == str(out / "step-00000020")


def by_flowstone(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged by us: transformers says some things once in a process."""
    return [record.getMessage() for record in caplog.records if record.name == "flowstone"]


@pytest.mark.parametrize("later", ["checkpoint-15", "checkpoint-20261231235959000001"], ids=["a step", "a date"])
def test_a_later_checkpoint_of_the_trainers_own_is_told_where_ours_is_used(
    later: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    trained(out, steps=5)
    (out / "checkpoint-5").mkdir()
    with caplog.at_level(logging.WARNING, "flowstone"):
        assert get_last_checkpoint(out) == str(out / "step-00000005")
    assert not by_flowstone(caplog), "a checkpoint of the same step is not a later one"
    (out / later).mkdir()
    for use in (
        lambda: get_last_checkpoint(out),
        lambda: use_flowstone(made_trainer(out, [], max_steps=10)).train(resume_from_checkpoint=True),
    ):
        with caplog.at_level(logging.WARNING, "flowstone"):
            use()
        [message] = by_flowstone(caplog)
        assert str(out / "step-00000005") in message
        assert str(out / later) in message
        caplog.clear()
    assert kept(out) == [5, 10]


@pytest.mark.parametrize(("full_at", "max_steps"), [(0, 20), (7, 20), (7, 10)], ids=["first", "second", "last"])
def test_a_save_that_fails_ends_the_training_with_its_error(full_at: int, max_steps: int, tmp_path: Path) -> None:
    codes = act(tmp_path, "full", full_at=full_at, args={"max_steps": max_steps})
    reported = said(tmp_path, "full")
    assert set(codes) == {1}, reported
    assert "ulimit -f" in reported
    assert "SaveFailedError: step 10 was not saved: " in reported or full_at == 0
    assert reported.count("'loss'") <= 15, "it ended at the next save"
    assert get_last_checkpoint(tmp_path / "out") == (str(tmp_path / "out/step-00000005") if full_at else None)
    assert not (tmp_path / "out-0.json").exists()


def test_wrong_calls_are_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(fs.ArgumentError, match="is neither a Trainer nor an Accelerator"):
        use_flowstone(object())
    pushing = made_trainer(out, [])
    pushing.args.push_to_hub = True  # only now: a Trainer with it asks the hub
    with pytest.raises(fs.ArgumentError, match="hub_strategy='every_save'"):
        use_flowstone(pushing)
    assert get_last_checkpoint(out) is None
    with pytest.raises(fs.NoCheckpointError, match="get_last_checkpoint"):
        use_flowstone(made_trainer(out, [])).train(resume_from_checkpoint=True)
    with pytest.raises(fs.FlowstoneError, match="nowhere"):
        use_flowstone(made_trainer(out, [])).train(resume_from_checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(fs.ArgumentError, match="neither a path nor True"):
        use_flowstone(made_trainer(out, [])).train(resume_from_checkpoint=7)
    trained(out, steps=5)
    with pytest.raises(fs.StepExistsError, match="resume_from_checkpoint=True"):
        use_flowstone(made_trainer(out, [])).train()
    with fs.Checkpointer(tmp_path / "by-hand") as checkpointer:
        checkpointer.save(1, {"model": small_gpt()})
    with pytest.raises(fs.MismatchError, match="not saved by a Trainer"):
        use_flowstone(made_trainer(tmp_path / "c", [])).train(resume_from_checkpoint=str(tmp_path / "by-hand"))


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    trained(out, steps=5)
    trainer = made_trainer(out, [])
    trainer.model = small_gpt(width=32)
    before = digest(trainer.model.state_dict())
    with pytest.raises(fs.MismatchError, match="shape"):
        use_flowstone(trainer).train(resume_from_checkpoint=True)
    assert digest(trainer.model.state_dict()) == before


def test_a_version_that_is_not_known_goes_on_where_its_interface_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "99.1.0")  # it replaces itself while it is imported
    with caplog.at_level(logging.WARNING):
        use_flowstone(made_trainer(tmp_path / "out", []))
    assert "transformers 99.1.0" in caplog.text
    assert "5.23.0" in caplog.text
    monkeypatch.setattr(transformers.Trainer, "_save_checkpoint", lambda self, model, trial, place: None)
    with pytest.raises(fs.FrameworkError, match=r"_checkpoint\(model, trial, place\), known with \(model, trial\)"):
        use_flowstone(made_trainer(tmp_path / "out", []))


def test_a_subclass_keeps_its_own_methods(tmp_path: Path) -> None:
    class Mine(transformers.Trainer):  # type: ignore[misc, name-defined]
        losses = saves = 0

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            self.losses += 1
            return super().compute_loss(*given, **named)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.saves += 1
            super()._save_checkpoint(model, trial)

    plain = made_trainer(tmp_path / "out", [], max_steps=5)
    mine = use_flowstone(Mine(model=plain.model, args=plain.args, train_dataset=Text(48)))
    assert isinstance(mine, Mine)
    assert type(mine).__name__ == "Mine"
    mine.train()
    assert (mine.losses, mine.saves) == (5, 1)
    assert kept(tmp_path / "out") == [5]
