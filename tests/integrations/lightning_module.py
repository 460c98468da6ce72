"""The LightningModule of the samples."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from prelude import loss_of, network


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
