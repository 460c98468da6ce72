"""One rank of a replica group of a job with torchft: `torchft_act.py JSON`.

In a group of several ranks, these share the model's parts (FSDP2), and average gradients with the other groups' parts.

lighthouse  its address
name        of the group; `number`: whose share of each batch it takes
runs        the store
out         where it writes what it ends with
rank, ranks  of the group; `port`: where its ranks meet
kill_at     the step before which its last rank ends by SIGKILL, once step 2 is committed
other_weights  the parameters begin with other values: a load, or a healing, leaves nothing of these
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from flowstone.adapters.torchft import ReplicaCheckpointer

WIDTH, STEPS, GROUPS = 160, 10, 2


def manager_of(record: dict[str, Any]) -> Any:
    rank, ranks = record["rank"], record["ranks"]
    store = dist.TCPStore("127.0.0.1", record["port"], is_master=rank == 0, wait_for_workers=False)
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=ranks)
    timeout = timedelta(seconds=120)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), load_state_dict=None, state_dict=None, min_replica_size=GROUPS,
        timeout=timeout, quorum_timeout=timedelta(seconds=600), connect_timeout=timeout, rank=rank, world_size=ranks,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=record["lighthouse"], replica_id=record["name"],
        hostname="127.0.0.1",
    )
    manager.keeps = store
    return manager


class Shared(nn.Module):
    """A model of which each rank of a group has parts; gradients are averaged with those of the other groups."""

    def __init__(self, manager: Any, network: nn.Sequential) -> None:
        super().__init__()
        self.network, self.manager = network, manager
        fully_shard(network, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        # Another group asks for the state while the parameters of this one are gathered.
        network[0].register_forward_hook(lambda *_: manager.wait_quorum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

    def average(self) -> None:
        """All gradients, behind the backward pass."""
        for work in [self.manager.allreduce(parameter.grad.to_local()) for parameter in self.parameters()]:
            work.wait()


def local(value: Any) -> Any:
    """What this rank has of a state."""
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    return value.to_local() if isinstance(value, DTensor) else value


def main() -> None:
    record = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(7)
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 5))
    if record.get("other_weights"):
        for parameter in network.parameters():
            parameter.data.fill_(9)
    manager = manager_of(record)
    model = DistributedDataParallel(manager, network) if record["ranks"] == 1 else Shared(manager, network)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-2))
    note = record["name"] if record["ranks"] == 1 else "begun again" if record.get("other_weights") else "begun"
    state = {"model": model, "optimizer": optimizer, "note": note}  # torchft heals each rank from any group
    committed, tries = [], 0
    with ReplicaCheckpointer(record["runs"], manager, state, keep=20) as ckpt:
        while (step := manager.current_step()) < STEPS:
            if step == record.get("kill_at") and record["rank"] == record["ranks"] - 1:
                while not (Path(record["runs"]) / "step-00000002" / "manifest.json").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            noise = torch.Generator().manual_seed(100 * step + 10 * record["rank"] + record["number"])
            model(torch.randn(4, WIDTH, generator=noise)).square().mean().backward()
            if isinstance(model, Shared):
                model.average()
            optimizer.step()
            ckpt.save()
            tries += 1
            if manager.current_step() == step + 1:
                committed.append(step + 1)
        ckpt.wait()
    parts = {"model": digest(local(model.state_dict())), "optimizer": digest(local(optimizer.state_dict()))}
    Path(record["out"]).write_text(json.dumps({
        "parts": parts, "loaded": ckpt.loaded, "committed": committed, "tries": tries, "note": state["note"],
        "manager": manager.state_dict(),
    }))
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process


if __name__ == "__main__":
    main()
