"""Functions that ranks run in tests of DCP's files."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def save_sharded(rank: int, path: str) -> None:
    """Two tensors, one cut into rows and one into columns, and a number."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows, columns = torch.arange(70 * 9.0).reshape(70, 9), torch.arange(9 * 70.0).reshape(9, 70)
    model = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]), "columns": distribute_tensor(columns, mesh, [Shard(1)]),
    }
    dcp.save({"model": model, "step": 7}, checkpoint_id=path)
