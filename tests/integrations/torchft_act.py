"""One replica group of a job with torchft, of one rank: `torchft_act.py JSON`.

lighthouse  its address
name        of the group; `number`: whose share of each batch it takes
runs        the store
out         where it writes what it ends with
kill_at     the step before which it ends by SIGKILL, once step 2 is committed
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
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from flowstone.adapters.torchft import ReplicaCheckpointer

WIDTH, STEPS, GROUPS = 160, 10, 2


def manager_of(told: dict[str, Any]) -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=120)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), load_state_dict=None, state_dict=None, min_replica_size=GROUPS,
        timeout=timeout, quorum_timeout=timedelta(seconds=600), connect_timeout=timeout, rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=told["lighthouse"], replica_id=told["name"],
        hostname="127.0.0.1",
    )
    manager.keeps = store
    return manager


def main() -> None:
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(7)
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 5))
    if told.get("other_weights"):
        for parameter in network.parameters():
            parameter.data.fill_(9)
    manager = manager_of(told)
    model = DistributedDataParallel(manager, network)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "note": told["name"]}
    committed, tries = [], 0
    with ReplicaCheckpointer(told["runs"], manager, state, keep=20) as ckpt:
        while (step := manager.current_step()) < STEPS:
            if step == told.get("kill_at"):
                while not (Path(told["runs"]) / "step-00000002" / "manifest.json").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            noise = torch.Generator().manual_seed(10 * step + told["number"])
            model(torch.randn(4, WIDTH, generator=noise)).square().mean().backward()
            optimizer.step()
            ckpt.save()
            tries += 1
            if manager.current_step() == step + 1:
                committed.append(step + 1)
        ckpt.wait()
    parts = {"model": digest(model.state_dict()), "optimizer": digest(optimizer.state_dict())}
    Path(told["out"]).write_text(json.dumps({
        "parts": parts, "loaded": ckpt.loaded, "committed": committed, "tries": tries, "note": state["note"],
        "manager": manager.state_dict(),
    }))
    sys.stdout.flush()
    os._exit(0)  # without the end of gloo's threads, which now and then aborts a process


if __name__ == "__main__":
    main()
