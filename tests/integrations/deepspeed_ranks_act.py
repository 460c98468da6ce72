"""One rank of a job that goes on from what another number of ranks has saved: `deepspeed_ranks_act.py JSON`.

stage      of ZeRO
settings   more of DeepSpeed's configuration
source     the directory that is loaded through Flowstone, or None; then the weights begin with other values
target     the directory that is saved into through Flowstone. Beside it, DeepSpeed itself saves: what was loaded in
           TARGET-loaded, and what was trained in TARGET-trained
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import deepspeed
import torch

from flowstone.adapters.deepspeed import attach

WIDTH = 40


class Network(torch.nn.Module):
    """With a buffer, a parameter that is not trained, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.last = torch.nn.Linear(WIDTH, 7)
        self.frozen = torch.nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(torch.relu(self.norm(self.first(x)))) * self.frozen


def engine_of(stage: int, settings: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = Network()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([
        {"params": [tensor for tensor in trained if tensor.ndim > 1], "weight_decay": 0.1},
        {"params": [tensor for tensor in trained if tensor.ndim == 1], "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    zero = {"stage": stage, **settings.pop("zero", {})}
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
        **settings,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def train(engine: Any, steps: int) -> None:
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    for _ in range(steps):
        noise = torch.Generator().manual_seed(100 * engine.global_steps + engine.global_rank)
        loss = engine(torch.randn(4, WIDTH, generator=noise).to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()


def main() -> None:
    record = json.loads(sys.argv[1])
    engine = engine_of(record["stage"], record["settings"], 7 if record["source"] is None else 8)
    own, former = engine.save_checkpoint, engine.checkpoint_engine
    plugin = attach(engine)
    through = engine.save_checkpoint

    def save_by_itself(directory: str) -> None:
        engine.save_checkpoint, engine.checkpoint_engine = own, former
        engine.save_checkpoint(directory, client_state={"epoch": 2})
        engine.save_checkpoint, engine.checkpoint_engine = through, plugin

    if record["source"] is not None:
        _, client = engine.load_checkpoint(record["source"])
        assert client["epoch"] == 2
        save_by_itself(f"{record['target']}-loaded")
    train(engine, 2)
    engine.save_checkpoint(record["target"], client_state={"epoch": 2})
    plugin.wait()
    save_by_itself(f"{record['target']}-trained")
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process


if __name__ == "__main__":
    main()
