"""The demo's training on several ranks. FSDP2 shards the model, and each rank trains on its part of the batch.

The state, the training loop, and resuming after a kill are in train.py, for any number of ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flowstone_demo.train import Training


class Sharded(Training):
    """A training divided among the ranks of torch.distributed's default group.

    Every rank draws the full batch. So loader and generators are equal on all ranks, and the batch is the same for any
    number of ranks. The batch size must be divisible by the number of ranks.
    """

    def shard(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def own_rows(self, batch: torch.Tensor) -> torch.Tensor:
        rows, rest = divmod(len(batch), dist.get_world_size())
        assert rest == 0, "ranks with more rows than others would count for less in the mean"
        return batch.narrow(0, rows * dist.get_rank(), rows)

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of the losses of all ranks. Each rank gets it."""
        total = loss.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()
