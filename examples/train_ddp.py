"""Train on several ranks with DDP. After a kill, start it again, on the same number of ranks or another.

    torchrun --nproc-per-node 2 examples/train_ddp.py runs/ddp --steps 40
    torchrun --nproc-per-node 1 examples/train_ddp.py runs/ddp --steps 60

It runs on CPUs, over gloo. All ranks save into one checkpoint, each an equal part of it.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flowstone as fs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("store", help="the directory that holds the checkpoints, the same for all ranks")
parser.add_argument("--steps", type=int, default=40)
arguments = parser.parse_args()

BATCH = 48  # of all ranks together
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer, "step": 0}

with fs.Checkpointer(arguments.store, keep=fs.Keep(last=3)) as ckpt:
    if ckpt.latest() is not None:
        ckpt.load(state)
        if rank == 0:
            print(f"resumed after step {state['step']} on {ranks} ranks")
    for step in range(state["step"] + 1, arguments.steps + 1):
        samples = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
        batch = samples[rank::ranks]  # depends only on the step, so there is no loader position to save
        loss = (model(batch) - batch.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] = step
        if step % 10 == 0 or step == arguments.steps:
            ckpt.save(step, state)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.6f} on rank 0")
dist.destroy_process_group()
