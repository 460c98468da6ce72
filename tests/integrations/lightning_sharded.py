"""The model of the samples of sharded strategies, of which each process holds a part; and its full state."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from prelude import WIDTH, loss_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, 1),
    )


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    if mesh["tensor_parallel"].size() > 1:
        columns = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("0", "4")}
        parallelize_module(model, mesh["tensor_parallel"], columns)
    for layer in (model[0], model[4]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def configure_model(self) -> None:
        sharded(self.net, self.device_mesh)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [12, 20])  # whose state has numbers for keys
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def whole(state: Any) -> Any:
    """A state with whole tensors; all ranks call this."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(value) for value in state] if isinstance(state, list) else state
