"""The same training on several ranks: FSDP2 shards the model, and each rank trains on its rows of the batch.

The rest is train.py's: the state, the loop, and resuming after a kill, on any number of ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flowstone_demo.train import Training


class Sharded(Training):
    """A training divided among the ranks of torch.distributed's default group.

    Every rank draws the whole batch, so that loader and generators are equal on all ranks, and the batch is the same on
    any number of ranks; that number divides the batch size.
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
        """The mean of all ranks' losses, on each rank."""
        total = loss.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()
