"""Samples of docs/LIGHTNING.md, killed and resumed; ModelCheckpoint's policies; saves that fail; wrong calls."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import HERE, check_resumes, samples

import flowstone as fs

pytest.importorskip("lightning", reason="`make test-integrations` installs it")
import lightning.pytorch
import pytorch_lightning

from flowstone.adapters.lightning import FlowstoneIO, GeneratorStates

SAMPLES = samples("LIGHTNING.md")

_BEFORE = """
import os, torch, prelude
from prelude import *
from torch.utils.data import DataLoader
"""

_MODULE = """
import lightning_module
from lightning_order import Order
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
prelude.STORE = prelude.Path("runs/lightning")
class Module(lightning_module.Module):
    def on_load_checkpoint(self, checkpoint):
        order.begin = 4 * checkpoint["global_step"]
model, order = Module(), Order(RANKS)
loader = DataLoader(data, batch_size=4, sampler=order, generator=torch.Generator())
options = dict(accelerator="cpu", devices=RANKS, strategy="auto" if RANKS == 1 else "ddp", logger=False,
               enable_progress_bar=False, use_distributed_sampler=False)
"""
_TRAINER_PARTS = "model=model, optimizer=trainer.optimizers[0], scheduler=trainer.lr_scheduler_configs[0].scheduler"

_FABRIC = """
from lightning.fabric import Fabric
prelude.STORE = prelude.Path("runs/fabric")
options = dict(devices=RANKS, strategy="auto" if RANKS == 1 else "ddp")
"""


def test_each_sample_is_run() -> None:
    assert SAMPLES.keys() == {"trainer", "fabric", "reading", "sharded", "sharded-fabric", "sharded-reading"}
    changed = [line for line in SAMPLES["trainer"].splitlines() if "Flowstone" in line or "Generator" in line]
    assert len(changed) <= 3


def trainer_script(ranks: int) -> str:
    return f"RANKS = {ranks}\n{_BEFORE}{_MODULE}{SAMPLES['trainer']}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_trainer_resumes_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    check_resumes(f"{trainer_script(ranks)}\ntell({_TRAINER_PARTS})", tmp_path, store="lightning", ranks=ranks)


def test_what_was_written_reads_as_the_document_says(tmp_path: Path) -> None:
    run(trainer_script(1) + SAMPLES["reading"], tmp_path, store="lightning")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_fabric_loop_resumes_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    script = f"RANKS = {ranks}\n{_BEFORE}{_FABRIC}{SAMPLES['fabric']}"
    script += "\ntell(model=model, optimizer=optimizer, scheduler=scheduler)"
    check_resumes(script, tmp_path, store="fabric", ranks=ranks)


def run(script: str, folder: Path, *, store: str) -> None:
    where = {"RECIPE": store, "RECIPE_RUN": str(folder / "run"), "PYTHONPATH": str(HERE), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=os.environ | where, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def trained(package: Any, callbacks: list[Any], *, steps: int = 6, plugins: list[Any], **options: Any) -> Any:
    """A Trainer of either package that has trained a small model; the monitored loss goes up and down."""
    losses = [5.0, 3.0, 4.0, 3.0, 1.0, 2.0, 7.0, 0.5]

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(160, 160)
            self.save_hyperparameters({"width": 160, **options.pop("hyper", {})})

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.log("loss", torch.tensor(losses[index]))
            return self.layer(batch).sum()

        def test_step(self, batch: torch.Tensor, index: int) -> None: ...

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    module = Module()
    trainer = package.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, plugins=plugins,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 160)), **options)
    return trainer


Policies = Callable[[Any, Path], list[Any]]
POLICIES: dict[str, Policies] = {
    "the best two and the last": lambda kind, folder: [
        kind(folder, monitor="loss", save_top_k=2, every_n_train_steps=1, save_last=True)],
    "one best under one name": lambda kind, folder: [
        kind(folder, filename="best", monitor="loss", every_n_train_steps=1)],
    "all under one name": lambda kind, folder: [
        kind(folder, filename="x", monitor="loss", save_top_k=-1, every_n_train_steps=1)],
    "only the newest": lambda kind, folder: [kind(folder, every_n_train_steps=2)],
    "the last as a link": lambda kind, folder: [kind(folder, every_n_train_steps=2, save_last="link")],
    "weights alone": lambda kind, folder: [
        kind(folder, every_n_train_steps=2, save_weights_only=True, save_last=True)],
    "two in one folder": lambda kind, folder: [
        kind(folder, monitor="loss", save_top_k=1, every_n_train_steps=2),
        kind(folder, save_top_k=-1, every_n_train_steps=2)],
}


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning], ids=lambda value: value.__name__)
@pytest.mark.parametrize("name", POLICIES)
def test_policies_keep_what_they_keep_without_flowstone(name: str, package: Any, tmp_path: Path) -> None:
    collected = []
    for folder, plugins in ((tmp_path / "torch", []), (tmp_path / "flowstone", [FlowstoneIO()])):
        callbacks = POLICIES[name](package.callbacks.ModelCheckpoint, folder)
        trained(package, callbacks, plugins=plugins)
        best = [Path(callback.best_model_path).name for callback in callbacks]
        links = {path.name: os.readlink(path) for path in folder.iterdir() if path.is_symlink()}
        collected.append((sorted(os.listdir(folder)), best, links))
    assert collected[0] == collected[1]
    for path in (tmp_path / "flowstone").iterdir():
        assert fs.open(path).verify().sound
        assert path.name != "last.ckpt" or fs.open(path).step == 6


def test_the_best_checkpoint_is_loaded_by_its_policy(tmp_path: Path) -> None:
    policy = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, monitor="loss", every_n_train_steps=1)
    trainer = trained(lightning.pytorch, [policy], plugins=[FlowstoneIO()])
    assert fs.open(policy.best_model_path).step == 5
    before = trainer.lightning_module.layer.weight.clone()
    trainer.test(ckpt_path="best", dataloaders=torch.utils.data.DataLoader(torch.randn(1, 160)), verbose=False)
    stored = fs.open(policy.best_model_path)["state_dict.layer.weight"][:]
    assert torch.equal(trainer.lightning_module.layer.weight, stored)
    assert not torch.equal(before, stored)


@contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """The system refuses longer files, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Refused(lightning.pytorch.Callback):
    """From a step on, the system refuses what is saved."""

    def __init__(self, step: int) -> None:
        self.step, self.limit = step, small_files(10_000)

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        if trainer.global_step == self.step:
            trainer.strategy.checkpoint_io.wait()
            self.limit.__enter__()

    def teardown(self, *_: object) -> None:
        self.limit.__exit__(None, None, None)


@pytest.mark.parametrize(("steps", "failed"), [(4, 4), (6, 4)], ids=["by the end of fit", "by the next save"])
def test_a_save_that_fails_is_raised_and_the_old_checkpoint_stays(tmp_path: Path, steps: int, failed: int) -> None:
    policy = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    refused = Refused(3)
    try:
        with pytest.raises(fs.SaveFailedError, match=f"step={failed}"):
            trained(lightning.pytorch, [refused, policy], steps=steps, plugins=[FlowstoneIO()])
    finally:
        refused.limit.gen.close()
    assert os.listdir(tmp_path) == ["epoch=0-step=2.ckpt"]
    assert fs.open(tmp_path / "epoch=0-step=2.ckpt").verify().sound


def without_room(test: Callable[..., None]) -> Callable[..., None]:
    """No save that `lose` begins has any. In the test alone: pytest, too, may write into a file."""

    @wraps(test)
    def limited(*arguments: object, **named: object) -> None:
        with small_files(10_000):
            test(*arguments, **named)

    return limited


def lose(io: FlowstoneIO, path: Path) -> None:
    """Begin a save that fails in the background."""
    io.save_checkpoint({"state_dict": {"w": torch.zeros(10_000)}}, path)


@without_room
def test_a_failure_is_raised_to_a_caller_that_trains_in_an_except_block(tmp_path: Path) -> None:
    try:
        raise ValueError("the first try")
    except ValueError:
        io = FlowstoneIO()
        lose(io, tmp_path / "x.ckpt")
        with pytest.raises(fs.SaveFailedError, match=r"x\.ckpt"):
            io.teardown()


@without_room
def test_a_failure_is_raised_to_a_caller_that_trains_again_with_the_same_plug_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = FlowstoneIO()
    try:
        raise ValueError("of training")
    except ValueError:
        lose(io, tmp_path / "x.ckpt")
        io.teardown()  # as Lightning does
        assert "saving failed too" in caplog.text
        lose(io, tmp_path / "y.ckpt")
        with pytest.raises(fs.SaveFailedError, match=r"y\.ckpt"):
            io.teardown()


@pytest.mark.parametrize("is_first", [False, True], ids=["a save before", "a save of what has failed"])
@without_room
def test_a_failure_does_not_mask_the_error_that_ended_the_training(
    is_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`ModelCheckpoint(save_on_exception=True)` may save for the first time while that error is handled."""
    io = FlowstoneIO()
    if not is_first:
        lose(io, tmp_path / "x.ckpt")
    try:
        raise ValueError("of training")
    except ValueError:
        if is_first:
            lose(io, tmp_path / "x.ckpt")
        io.teardown()
    assert "saving failed too" in caplog.text


def test_strategies_that_do_not_load_through_plugins_are_refused() -> None:
    strategies = lightning.pytorch.strategies
    for strategy in (strategies.FSDPStrategy(state_dict_type="full"), strategies.ModelParallelStrategy(1, 1)):
        strategy.checkpoint_io = FlowstoneIO()
        with pytest.raises(fs.ArgumentError, match="does not load through plug-ins"):
            GeneratorStates().setup(Namespace(strategy=strategy), None, "fit")
    for strategy in (strategies.DDPStrategy(), strategies.FSDPStrategy()):  # the second saves by itself
        if isinstance(strategy, strategies.DDPStrategy):
            strategy.checkpoint_io = FlowstoneIO()
        GeneratorStates().setup(Namespace(strategy=strategy), None, "fit")


def test_a_save_of_fabric_that_was_lost_ends_the_process_with_status_1(tmp_path: Path) -> None:
    script = """if True:
        import resource, torch
        from lightning.fabric import Fabric
        from flowstone.adapters.lightning import FlowstoneIO
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[FlowstoneIO()])
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        fabric.save("x.ckpt", {"w": torch.zeros(100_000)})
        print("the end")
    """
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.strip().splitlines()[-1]) == (1, "the end")
    assert "x.ckpt failed in the background" in done.stderr
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_stored_is_named_with_what_to_do(tmp_path: Path) -> None:
    policy = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    with pytest.raises(fs.UnsupportedStateError, match=r"hyper_parameters\.act: .*function") as caught:
        trained(lightning.pytorch, [policy], plugins=[FlowstoneIO()], hyper={"act": torch.relu})
    assert "save_hyperparameters(ignore=['act'])" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_wrong_calls_are_refused_by_name(tmp_path: Path) -> None:
    io, state = FlowstoneIO(), {"state_dict": {"w": torch.zeros(3)}, "global_step": 4}
    with pytest.raises(fs.ArgumentError, match="storage_options"):
        io.save_checkpoint(state, tmp_path / "x.ckpt", storage_options={"a": 1})
    with pytest.raises(fs.ArgumentError, match="s3://bucket/x"):
        io.save_checkpoint(state, "s3://bucket/x")
    with pytest.raises(fs.ArgumentError, match="map_location"):
        io.load_checkpoint(tmp_path / "x.ckpt", map_location=lambda storage, location: storage)
    with pytest.raises(fs.NoCheckpointError, match="no checkpoint at"):
        io.load_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(fs.ArgumentError, match="EngineOptions"):
        FlowstoneIO(engine="fast")  # type: ignore[arg-type]
    (tmp_path / "torch.ckpt").mkdir()
    (tmp_path / "torch.ckpt" / "mine.txt").touch()
    with pytest.raises(fs.NotAStoreError, match=r"mine\.txt"):
        io.save_checkpoint(state, tmp_path / "torch.ckpt")
    io.remove_checkpoint(tmp_path / "torch.ckpt")
    assert (tmp_path / "torch.ckpt" / "mine.txt").exists()
    io.teardown()


def test_files_of_lightning_are_read_where_that_is_asked_for(tmp_path: Path) -> None:
    policy = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    trained(lightning.pytorch, [policy], plugins=[], steps=2)
    path = tmp_path / "epoch=0-step=2.ckpt"
    with pytest.raises(fs.NotAStoreError, match="reads_torch_files=True"):
        FlowstoneIO().load_checkpoint(path)
    later = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    io = FlowstoneIO(reads_torch_files=True)
    trainer = trained(lightning.pytorch, [later], plugins=[io], steps=4, ckpt_path=path)
    assert trainer.global_step == 4
    assert fs.open(tmp_path / "epoch=0-step=4.ckpt").step == 4


def test_an_unknown_version_goes_on_where_the_interface_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    script = """if True:
        import logging, lightning.fabric
        logging.basicConfig()
        lightning.fabric.__version__ = "9.9"
        {change}
        from flowstone.adapters.lightning import FlowstoneIO
        FlowstoneIO()
    """
    other = "lightning.fabric.plugins.CheckpointIO.load_checkpoint = lambda self, name, device, *, safe: None"
    messages = {}
    for change in ("", other):
        done = subprocess.run(
            [sys.executable, "-c", script.format(change=change)], capture_output=True, text=True, check=False
        )
        messages[done.returncode] = done.stderr
    assert "Flowstone's adapter was not tested with lightning 9.9" in messages[0]
    assert "2.6.6" in messages[0]
    assert "FrameworkError: the interface of lightning 9.9 is unknown to this adapter" in messages[1]
    assert "load_checkpoint(" in messages[1]
