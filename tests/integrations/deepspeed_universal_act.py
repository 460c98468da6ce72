"""One rank of a job that takes a Universal Checkpoint: `deepspeed_universal_act.py ACT STAGE TYPE DIRECTORY GROUPS`.

ZeRO 3 loads the settings of the first group, and one count of steps for all groups to share, from any Universal
Checkpoint: so its optimizer has one group.

save    train half of the way with DeepSpeed, and let it save; then on to the end, and tell what came out
load    go on from a Universal Checkpoint to the end, and tell what was loaded, and what came out
torch   train without DeepSpeed; save half of the way through Flowstone, and go on to the end
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from digests import digest

import flowstone as fs

WIDTH, STEPS = 96, 6
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Network(torch.nn.Module):
    """With tied weights, a buffer, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))) * self.frozen


def groups_of(model: torch.nn.Module, count: int) -> list[dict[str, Any]]:
    """One group of all parameters, or two with settings of their own."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if count == 1:
        return [{"params": trained, "weight_decay": 0.1}]
    return [
        {"params": [tensor for tensor in trained if tensor.ndim > 1], "weight_decay": 0.1},
        {"params": [tensor for tensor in trained if tensor.ndim == 1], "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


def network() -> Network:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return Network()


def engine_of(stage: int, kind: str, groups: int, *, universal: bool) -> Any:
    model = network()
    optimizer = torch.optim.AdamW(groups_of(model, groups), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "checkpoint": {"load_universal": universal},
    }
    if kind != "fp32":
        config[kind] = {"enabled": True}
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def batch(step: int, rank: int, kind: str) -> torch.Tensor:
    noise = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=noise).to(DTYPES[kind])


def train(engine: Any, until: int, kind: str) -> None:
    while engine.global_steps < until:
        loss = engine(batch(engine.global_steps, engine.global_rank, kind)).float().square().mean()
        engine.backward(loss)
        engine.step()


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    """The master weights, as DeepSpeed puts them together; of several groups it does not find the slots by itself."""
    return {
        name: safe_get_full_fp32_param(parameter).clone() for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def state_of(engine: Any) -> dict[str, object]:
    """What training depends on: digests, and what people can read."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    return {
        "parts": digest(in_order(engine.optimizer.state_dict())), "step": engine.global_steps,
        "groups": json.loads(json.dumps(groups, default=str)), "scheduler": engine.lr_scheduler.last_epoch,
    }


def in_order(value: Any) -> Any:
    """The same, with dicts in the order of their keys: DeepSpeed enters slots in that of a set."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value, key=str)}
    return [in_order(item) for item in value] if isinstance(value, list | tuple) else value


def save(stage: int, kind: str, directory: Path, groups: int) -> None:
    engine = engine_of(stage, kind, groups, universal=False)
    train(engine, STEPS // 2, kind)
    engine.save_checkpoint(str(directory), client_state={"seen": [3]})
    train(engine, STEPS, kind)
    tell(engine, {}, Path(f"{directory}-whole"))


def load(stage: int, kind: str, directory: Path, groups: int) -> None:
    engine = engine_of(stage, kind, groups, universal=True)
    _, client = engine.load_checkpoint(str(directory))
    record = {"loaded": state_of(engine), "client": {key: client.get(key) for key in ("seen", "epoch")}}
    train(engine, STEPS, kind)
    tell(engine, record, Path(f"{directory}-{stage}"))


def tell(engine: Any, record: dict[str, object], place: Path) -> None:
    masters = gathered(engine)
    if engine.global_rank == 0:
        torch.save(masters, f"{place}.pt")
    Path(f"{place}-{engine.global_rank}.json").write_text(json.dumps(record | {"end": state_of(engine)}))


def plain(directory: Path, groups: int) -> None:
    model = network()
    optimizer = torch.optim.AdamW(groups_of(model, groups), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        if step == STEPS // 2:
            with fs.Checkpointer(directory) as checkpointer:
                checkpointer.save(step, {
                    "model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 2, "seen": None,
                })
        model(batch(step, 0, "fp32")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    trained = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    torch.save(trained, f"{directory}-end.pt")


if __name__ == "__main__":
    act, stage, kind, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    groups = int(sys.argv[5])
    match act:
        case "save":
            save(stage, kind, directory, groups)
        case "load":
            load(stage, kind, directory, groups)
        case "torch":
            plain(directory, groups)
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process
