"""Optimizers and schedulers through adapters of frameworks: each run resumes bit for bit as without Flowstone."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resumes import AFTER, BEFORE, BETWEEN, SETTINGS, Flow, Run, differing, torch_save

pytest.importorskip("lightning", reason="`make test-integrations` installs it")
pytest.importorskip("transformers", reason="`make test-integrations` installs it, with Accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.fabric import Fabric
from transformers import Trainer, TrainingArguments

from flowstone.adapters.huggingface import get_last_checkpoint, use_flowstone
from flowstone.adapters.lightning import FlowstoneIO

OPTIMIZERS = (
    "SGD momentum", "Adam amsgrad", "AdamW groups", "AdamW fused", "AdamW tensor lr", "AdamW names", "NAdam",
    "Adagrad start", "RMSprop both", "ASGD t0", "Adafactor",
)
SCHEDULERS = ("none", "LambdaLR object", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")
OF_TRAINER = ("LambdaLR", "OneCycleLR", "SequentialLR")  # which it steps itself


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def accelerated(run: Run) -> Any:
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()  # type: ignore[attr-defined]
    accelerator = use_flowstone(Accelerator(cpu=True))
    accelerator.prepare(*run.objects.values())
    return accelerator


def through_accelerate(path: Path, source: Run, target: Run) -> None:
    accelerator = accelerated(source)
    accelerator.save_state(str(path))
    accelerator.end_training()
    accelerated(target).load_state(str(path))


def through_fabric(path: Path, source: Run, target: Run) -> None:
    plug_in = FlowstoneIO()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plug_in])
    fabric.save(path, source.objects)
    plug_in.wait()
    fabric.load(path, target.objects)
    plug_in.teardown()


FLOWS: dict[str, Flow] = {"accelerate": through_accelerate, "fabric": through_fabric}


@pytest.mark.parametrize("setting", ["plain", "late"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("flow", FLOWS)
def test_a_loop_resumes_as_from_torch_save(tmp_path: Path, flow: str, optimizer: str, setting: str) -> None:
    def resumed(flow: Flow, scheduler: str, live: bool) -> dict[str, Any]:
        source = Run(optimizer, scheduler, SETTINGS[setting]).train(BEFORE)
        target = Run(optimizer, scheduler, SETTINGS[setting], seed=1).train(BETWEEN if live else 0)
        target.steps = BEFORE
        flow(tmp_path / f"{scheduler} {live}", source, target)
        return target.train(AFTER).contents()

    for scheduler, live in itertools.product(SCHEDULERS, (False, True)):
        expected, actual = resumed(torch_save, scheduler, live), resumed(FLOWS[flow], scheduler, live)
        assert list(differing(expected, actual)) == [], (scheduler, live)


class Loss(torch.nn.Module):
    """A run's model as the Trainer trains it."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.a, self.b = run.model["a"], run.model["b"]

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.a(x) + self.b(x)).square().mean()}


def trained(folder: Path, optimizer: str, scheduler: str, steps: int, use: Callable[[Any], Any], resume: Any) -> Run:
    run = Run(optimizer, scheduler, SETTINGS["plain"], seed=steps)
    arguments = TrainingArguments(
        str(folder), max_steps=steps, save_steps=BEFORE, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        disable_tqdm=True, remove_unused_columns=False, save_only_model=False, dataloader_pin_memory=False,
    )
    rows = [{"x": torch.full((4,), float(index))} for index in range(2 * (BEFORE + AFTER))]
    pair = run.optimizer, run.scheduler
    trainer = use(Trainer(Loss(run), arguments, train_dataset=rows, optimizers=pair))
    trainer.train(resume_from_checkpoint=resume)
    return run


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_trainer_resumes_as_without_flowstone(tmp_path: Path, optimizer: str) -> None:
    for scheduler in OF_TRAINER:
        ours, own = tmp_path / scheduler / "ours", tmp_path / scheduler / "own"
        trained(ours, optimizer, scheduler, BEFORE, use_flowstone, None)
        trained(own, optimizer, scheduler, BEFORE, lambda trainer: trainer, None)
        actual = trained(ours, optimizer, scheduler, BEFORE + AFTER, use_flowstone, get_last_checkpoint(ours))
        expected = trained(own, optimizer, scheduler, BEFORE + AFTER, lambda trainer: trainer, True)
        assert list(differing(expected.contents(), actual.contents())) == [], scheduler
