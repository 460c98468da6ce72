"""One rank of a job of Megatron-core's: `megatron_act.py ACT MODE DIRECTORY`.

whole, resumed  load what there is, train a GPT to the end through Flowstone, and tell what came out
killed          the same, and die of SIGKILL on the way
native          train half of the way, and save as Megatron does
loads           load what any number of ranks have saved, and tell whether it is what the checkpoint holds
damaged         load what was damaged, and tell the error
refused         saves that fail, of which no rank's checkpoint comes

MODE: "save", or "async" by Megatron's queue. On a CPU what asks for a GPU is told that there is nothing to wait for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from digests import digest
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

import flowstone as fs
from flowstone.adapters.megatron import FlowstoneLoadStrategy, FlowstoneSaveStrategy, register, strategies

STEPS, WORDS, LENGTH, HIDDEN = 8, 32, 16, 64


class Job:
    """A GPT of two layers, split by tensor parallelism, with Megatron's optimizer."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.directory, self.mode, self.step = directory, mode, 0
        self.extra: object = None
        torch.manual_seed(7)
        config = TransformerConfig(
            num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=2 * HIDDEN, hidden_dropout=0.0,
            attention_dropout=0.0, use_cpu_initialization=True, tensor_model_parallel_size=dist.get_world_size(),
        )
        self.model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=LENGTH)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2)
        for parameter in self.parameters:  # the optimizer has its state before it is asked what there is to load
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.strategy, self.queue = FlowstoneSaveStrategy(), AsyncCallsQueue()
        register()

    def state(self) -> dict[str, Any]:
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.state_dict()
        optim_state_to_sharding_state(optimizer, get_param_id_to_sharded_param_map(model, self.parameters), ("step",))
        return {
            "model": model, "optimizer": optimizer, "optimizer_steps": self.optimizer_steps(),
            "iteration": self.step,
            "rng": ShardedObject(
                "rng", {"torch": torch.get_rng_state()}, (dist.get_world_size(),), (dist.get_rank(),)
            ),
            **({} if self.extra is None else {"extra": self.extra}),
        }

    def optimizer_steps(self) -> list[torch.Tensor]:
        return [self.optimizer.state[parameter]["step"] for parameter in self.parameters]

    def place(self) -> Path:
        return self.directory / f"iter_{self.step:07d}"

    def save(self, strategy: object) -> None:
        if dist.get_rank() == 0:
            self.place().mkdir(parents=True, exist_ok=True)
        dist.barrier()
        request = dist_checkpointing.save(
            self.state(), str(self.place()), strategy, async_sharded_save=self.mode == "async"
        )
        if request is not None:
            self.queue.schedule_async_request(request)

    def newest(self) -> Path | None:
        """Of the checkpoints that Megatron takes for such."""
        return max((path.parent for path in self.directory.glob("iter_*/metadata.json")), default=None)

    def load(self) -> bool:
        place = self.newest()
        if place is None:
            return False
        state = dist_checkpointing.load(self.state(), str(place))
        self.model.load_state_dict(state["model"])
        for number, step in enumerate(state["optimizer_steps"]):
            state["optimizer"]["state"][number]["step"] = step
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"]["torch"])
        self.step = state["iteration"]
        return True

    def train(self) -> None:
        """One step, on words that the generator of this rank draws: it has to come back, too."""
        self.queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
        words = torch.randint(WORDS, (2, LENGTH + 1))
        dist.broadcast(words, 0)
        mask = torch.tril(torch.ones(LENGTH, LENGTH)).lt(0.5)[None, None]
        positions = torch.arange(LENGTH).expand(2, -1)
        loss = self.model(words[:, :-1].contiguous(), positions, mask, labels=words[:, 1:].contiguous()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1

    def close(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
        self.queue.close()
        self.strategy.close()

    def told(self) -> dict[str, str]:
        moments = [sorted(self.optimizer.state[parameter].items()) for parameter in self.parameters]
        return {
            "model": digest([parameter.detach() for parameter in self.parameters]), "optimizer": digest(moments),
            "rng": digest(torch.get_rng_state()),
            "step": str(self.step),
        }


def train(job: Job, act: str) -> None:
    while job.step < (STEPS // 2 if act == "native" else STEPS):
        job.train()
        job.save(None if act == "native" else job.strategy)
        if act == "killed" and job.step == 5 and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    job.close()


def loads(job: Job) -> dict[str, Any]:
    place = job.newest()
    assert place is not None
    state = dist_checkpointing.load({"model": job.model.sharded_state_dict()}, str(place), FlowstoneLoadStrategy())
    stored = fs.open(place / "sharded")
    parts = [tensor for tensor in job.model.sharded_state_dict().values() if isinstance(tensor, ShardedTensor)]
    names = [name for name, tensor in job.model.sharded_state_dict().items() if isinstance(tensor, ShardedTensor)]
    first = parts[0]
    twins = [replace(first, data=torch.zeros_like(first.data), replica_id=number) for number in (0, 1)]
    FlowstoneLoadStrategy().load({"twins": twins}, place)
    return {
        "twins": all(torch.equal(twin.data, state["model"][names[0]]) for twin in twins),
        "equal": all(
            torch.equal(state["model"][name], stored.read(part.key)[part.global_slice()])
            for name, part in zip(names, parts, strict=True)
        ),
        "iteration": state["iteration"], "tensors": len(names),
        "described": sorted(dist_checkpointing.load_tensors_metadata(str(place))) == sorted(
            name for name in stored.tensors if not name.startswith("rng/")
        ),
        "objects": [key for key in load_sharded_metadata(str(place)) if key.startswith("rng/")],
    }


def damaged(job: Job) -> str:
    try:
        job.load()
    except fs.DamagedError as error:
        return str(error)
    return "loaded"


def refused(job: Job) -> list[str]:
    """What one rank cannot store, and what no rank can; then a save that works."""
    reported = []
    for ranks in ([dist.get_world_size() - 1], list(range(dist.get_world_size()))):
        job.step += 1
        extra = threading.Lock() if dist.get_rank() in ranks else None
        job.extra = ShardedObject("extra", extra, (dist.get_world_size(),), (dist.get_rank(),))
        try:
            job.save(job.strategy)
            job.queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
            reported.append("saved")
        except fs.FlowstoneError as error:
            reported.append(f"{type(error).__name__}: {error}")
        reported.append(str((job.place() / "metadata.json").exists()))
    job.extra, job.step = None, job.step + 1
    job.queue = AsyncCallsQueue()  # Megatron's own has lost count with what was raised in it
    job.save(job.strategy)
    job.close()
    reported.append(str((job.place() / "metadata.json").exists()))
    return [*reported, _error_of("a leaf", job), _error_of("a common part", job)]


def _error_of(wrong: str, job: Job) -> str:
    """Of what goes wrong on one rank before ranks have met: at a load, on the last one; at a save, on the first."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    try:
        if wrong == "a leaf":
            leaves = {"x": 5 if is_last else job.state()["rng"]}
            FlowstoneLoadStrategy().load(leaves, job.place())
        else:
            with mock.patch.object(strategies, "_sync", side_effect=OSError("the disk is gone")):
                FlowstoneSaveStrategy().save({"rng": job.state()["rng"]}, job.place())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def prepare() -> None:
    """Let Megatron train on a CPU, each rank a part of the model."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    get_cuda_rng_tracker().fork = lambda *_: nullcontext()  # nothing is drawn there: there is no dropout
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size())


def main(act: str, mode: str, directory: Path) -> None:
    prepare()
    job = Job(directory, mode)
    if act in ("loads", "damaged", "refused"):
        reported = globals()[act](job)
    else:
        print("from", job.step if job.load() else None, flush=True)
        train(job, act)
        reported = job.told()
    Path(f"{directory}-{act}-{dist.get_rank()}.json").write_text(json.dumps(reported))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which may abort a process


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
