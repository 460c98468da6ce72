"""Train a small model and save every ten steps. After a kill, start it again: it resumes from the newest checkpoint.

    python examples/train.py runs/train --steps 100
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import flowstone as fs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("store", help="the directory that holds the checkpoints")
parser.add_argument("--steps", type=int, default=100)
arguments = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer, "rng": fs.rng(), "step": 0}

with fs.Checkpointer(arguments.store, keep=fs.Keep(last=3)) as ckpt:
    if ckpt.latest() is not None:
        ckpt.load(state)
        print(f"resumed after step {state['step']}")
    for step in range(state["step"] + 1, arguments.steps + 1):
        batch = torch.randn(32, 64)
        loss = (model(batch) - batch.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] = step
        if step % 10 == 0 or step == arguments.steps:
            ckpt.save(step, state)  # returns at once; the next optimizer.step() waits for the capture
            print(f"step {step}: loss {loss.item():.9f}")
