"""One rank of a job with torchtitan's parts, in the order of its Trainer: `torchtitan_act.py ACT MODE DIRECTORY`.

whole, resumed   load what there is, train to the end through Flowstone, and tell what came out
killed           the same, and die of SIGKILL on the way, with a save in flight where the mode has such
native           train half of the way, and let torchtitan save
policies         what its policies do to checkpoints of Flowstone
exports          weights alone, for Hugging Face, and from there
failures         saves that fail, and what is refused

`Job` is the loop of torchtitan's Trainer, in its order, with parts that can be exchanged; `torchtitan_trainer_act.py`
runs the Trainer itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from digests import digest
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

import flowstone as fs
from flowstone.adapters.torchtitan import FlowstoneCheckpointManager

WIDTH, STEPS = 160, 8


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            noise = torch.Generator().manual_seed(1000 * self.at + dist.get_rank())
            self.at += 1
            yield {"input": torch.randn(WIDTH, generator=noise)}, torch.randn(5, generator=noise)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Names:
    """A state dict adapter, as torchtitan's models have one."""

    fqn_to_index_mapping, hf_assets_path = None, None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hf."): value for name, value in state.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        return HuggingFaceStorageReader(path)


class Job(Stateful):
    """The parts that torchtitan's Trainer hands to its checkpoint manager, and its loop."""

    def __init__(self, directory: Path, kind: Any = FlowstoneCheckpointManager, **options: Any) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 5)
        )
        if dist.get_world_size() > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizers = default_adamw(lr=1e-2).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2, total_steps=2 * STEPS)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        self.loader = ParallelAwareDataloader(Stream(), dist.get_rank(), dist.get_world_size(), batch_size=4)
        self.step, self.seen, self.stops_before = 0, 0, STEPS + 1
        self.directory = directory
        self.load_step = options.get("load_step", -1)
        self.last = options.pop("last", STEPS)
        given = {"enable": True, "interval": 1, "keep_latest_k": 0, "last_save_model_only": False, **options}
        self.checkpointer = kind.Config(**given).build(
            dataloader=self.loader, model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=self.schedulers, states={"train_state": self}, sd_adapter=Names(),
            base_folder=str(directory),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.seen = state["step"], state["ntokens_seen"]

    @property
    def folder(self) -> Path:
        return self.directory / "checkpoint"

    def load(self) -> bool:
        return bool(self.checkpointer.load(step=self.load_step))

    def train(self, until: int) -> None:
        batches = iter(self.loader)
        while self.step < until:
            self.step += 1
            self.optimizers.zero_grad()
            given, labels = next(batches)
            self.seen += labels.numel()
            (self.model(given["input"]) - labels).square().mean().backward()
            if self.step == self.stops_before:
                while not (self.folder / "step-2" / "manifest.json").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.checkpointer.save(self.step, last_step=self.step == self.last)

    def parts(self) -> dict[str, str]:
        weights, moments = (
            {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in part.items()}
            for part in (self.model.state_dict(), self.optimizers.state_dict())
        )
        return {
            "model": digest(weights), "optimizer": digest(moments), "schedule": digest(self.schedulers.state_dict()),
            "loader": digest(self.loader.state_dict()), "state": digest(self.state_dict()),
        }


def run(act: str, mode: str, directory: Path) -> None:
    job = Job(directory, CheckpointManager if act == "native" else FlowstoneCheckpointManager, async_mode=mode)
    print("from", job.step if job.load() else 0, job.step, flush=True)
    if act == "killed":
        job.stops_before = 5
    job.train(4 if act == "native" else STEPS)
    job.checkpointer.maybe_wait_for_saving()
    job.checkpointer.close()
    Path(f"{directory}-{act}-{dist.get_rank()}.json").write_text(json.dumps(job.parts()))


def names(job: Job) -> set[str]:
    return {path.name for path in job.folder.iterdir()}


def policies(mode: str, directory: Path) -> None:
    job = Job(directory, async_mode=mode, keep_latest_k=2, last=6)
    assert not job.load()
    for other in ("step-2.bak", "notes"):
        (job.folder / other).mkdir(parents=True)
    dead = job.folder / "step-5"  # of a save by torchtitan itself that was killed
    dead.mkdir()
    (dead / "__0_0.distcp").write_bytes(b"half")
    dead = job.folder / "step-0"
    dead.mkdir()
    job.train(6)
    job.checkpointer.close()
    aside = [path for path in job.folder.iterdir() if path.name.startswith(".superseded-00000005-")]
    assert [path.name for path in aside[0].iterdir()] == ["__0_0.distcp"]
    kept = {"step-4", "step-5", "step-6"}  # torchtitan does not purge after the last save
    assert names(job) == kept | {"step-2.bak", "notes", "step-0", aside[0].name}
    for newer in ("step-20", "step-21"):
        shutil.copytree(job.folder / "step-6", job.folder / newer)
    shutil.copytree(job.folder / "step-6", job.folder / ".deleting-00000000-0123456789abcdef")  # of a killed purge
    job = Job(directory, async_mode=mode, keep_latest_k=2, load_step=4)
    assert not list(job.folder.glob(".deleting-*"))
    assert job.load()
    assert job.step == 4
    job.train(5)
    job.checkpointer.close()
    steps = {name for name in names(job) if name.startswith("step-") and name not in ("step-2.bak", "step-0")}
    assert steps == {"step-5", "step-20", "step-21"}, "what this run has saved stays, however old"
    assert fs.open(job.folder / "step-5").verify().sound
    before = names(job)
    job = Job(directory, load_only=True, load_step=5, exclude_from_loading=["lr_scheduler"], last=7)
    assert job.load()
    assert (job.step, job.schedulers.state_dict()["last_epoch"]) == (5, 0)
    job.train(7)
    assert names(job) == before


def exports(mode: str, directory: Path) -> None:
    job = Job(directory, async_mode=mode, last_save_model_only=True, export_dtype="bfloat16", last=3, interval=2)
    job.train(3)
    job.checkpointer.close()
    weights, full = fs.open(job.folder / "step-3"), fs.open(job.folder / "step-2")
    assert set(weights.tensors) == set(job.model.state_dict())
    assert weights.read("0.weight").dtype == torch.bfloat16
    assert set(weights.tensors) < set(full.tensors)
    assert full.objects["train_state"]["step"] == 2
    other = Job(directory.with_name("other"), initial_load_path=str(job.folder / "step-2"))
    assert other.load()
    assert other.step == 0, "weights alone"
    assert torch.equal(other.model.state_dict()["0.weight"], full.read("0.weight"))
    last = Job(directory.with_name("last"), last_save_model_only=True, last_save_in_hf=True, last=2, interval=5)
    last.train(2)
    assert (last.folder / "step-2" / "model.safetensors.index.json").is_file()
    again = Job(
        directory.with_name("again"), initial_load_path=str(last.folder / "step-2"), initial_load_in_hf=True,
    )
    assert again.load()
    assert digest(again.model.state_dict()) == digest(last.model.state_dict())
    with pytest.raises(fs.NoCheckpointError, match=r"Hugging Face[\s\S]*initial_load_in_hf"):
        Job(directory.with_name("last")).load()
    (last.folder / "step-7").mkdir()
    with pytest.raises(fs.NoCheckpointError, match="not committed"):
        Job(directory.with_name("last"), load_step=7).load()


def failing(mode: str, directory: Path) -> Job:
    """A job that has begun a save of step 2, which cannot succeed."""
    job = Job(directory, async_mode=mode)
    job.step = 1
    job.train(2)
    return job


def fail_and_close(job: Job) -> None:
    """As torchtitan's main does."""
    try:
        raise KeyError("an error of training")
    except KeyError:
        job.checkpointer.close()
        raise


def train_again_and_close(mode: str, directory: Path) -> None:
    """As a script that trains again where training has failed."""
    try:
        raise KeyError("an error of training")
    except KeyError:
        failing(mode, directory).checkpointer.close()


def failures(mode: str, directory: Path) -> None:
    job = Job(directory, async_mode=mode)
    (job.folder / "step-2").mkdir(parents=True)
    (job.folder / "step-2" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointException, match=r"NotAStoreError[\s\S]*notes\.txt"):
        job.train(3)
    assert job.step == (2 if mode == "disabled" else 3)
    assert {"step-1", "step-2"} == {name for name in names(job) if name.startswith("step-")}
    if mode != "disabled":  # the failure of the last save is raised by close; and does not hide another one
        job = failing(mode, directory)
        with pytest.raises(CheckpointException, match="NotAStoreError"):
            job.checkpointer.close()
        job = failing(mode, directory)
        with pytest.raises(KeyError, match="of training"):
            fail_and_close(job)
        with pytest.raises(CheckpointException, match="NotAStoreError"):
            train_again_and_close(mode, directory)
    assert {"step-1", "step-2"} == names(job)
    with pytest.raises(fs.ArgumentError, match=r"gs://bucket/run[\s\S]*shared file system"):
        Job(directory, folder="gs://bucket/run")
    with pytest.raises(ValueError, match="by_pigeon"):
        Job(directory, async_mode="by_pigeon")
    config = FlowstoneCheckpointManager.Config(enable=True)
    config.async_mode = "by_pigeon"  # of a version that has more modes
    with pytest.raises(fs.ArgumentError, match=r"by_pigeon[\s\S]*async_with_pinned_mem"):
        FlowstoneCheckpointManager(config, base_folder=str(directory))
    disabled = Job(directory, enable=False)
    assert not disabled.load()
    disabled.train(1)
    disabled.checkpointer.close()
    with next((job.folder / "step-1").glob("rank-*")).open("r+b") as opened:
        opened.seek(-70_000, os.SEEK_END)
        opened.write(b"damage" * 100)
    with pytest.raises(CheckpointException, match="DamagedError"):
        Job(directory).load()


if __name__ == "__main__":
    act, mode, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    match act:
        case "policies":
            policies(mode, directory)
        case "exports":
            exports(mode, directory)
        case "failures":
            failures(mode, directory)
        case _:
            run(act, mode, directory)
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process
