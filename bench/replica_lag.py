"""The time between a step's durability and its execution by the replica of the state (docs/REPLICA.md).

    python -m bench.replica_lag DIRECTORY [--ranks 1 2] [--steps 100] [--width 768] [--pause-ms 100]

Ranks of DistributedDataParallel over gloo (one rank trains alone), with a thread each, train six layers of `width` with
AdamW, and save every step. Rank 0 records when each step is durable, and asks its replica every two milliseconds which
step it has executed; with several ranks, that is the step that all of them have. Steps count from the one at which the
replica has caught up. If it never does, it is slower than this training, and no lag is printed. Training waits
`--pause-ms` after each step, as if it ran on a device, so that the processors are as free as those of such a host.
Prints a line of JSON for each number of ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel

import flowstone as fs
from bench.paired import percentile, tell
from flowstone.replica.replica_wire import replica_status
from flowstone.store.memory.local_sockets import DIRECTORY_VARIABLE
from flowstone_study import machine

LAYERS, WIDTH_VARIABLE, POLL_S, STEPS_MAX = 6, "REPLICA_LAG_WIDTH", 0.002, 5000


def build() -> dict[str, object]:
    """The state, for the training and its replica."""
    width = int(os.environ[WIDTH_VARIABLE])
    torch.manual_seed(1)
    net: torch.nn.Module = torch.nn.Sequential(*[
        layer for _ in range(LAYERS) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())
    ])
    net = DistributedDataParallel(net) if dist.is_initialized() else net
    return {"model": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=1e-4)}


class Watch(threading.Thread):
    """Asks the replica of rank 0 for its `step`. `made`: when it was first seen to have executed each."""

    def __init__(self, location: str) -> None:
        super().__init__(daemon=True)
        self._location, self.step = location, 0
        self.made: dict[int, float] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(POLL_S):
            status = replica_status(self._location)
            if status is None or status.step <= self.step:
                continue
            now = time.monotonic()
            self.made.update(dict.fromkeys(range(self.step + 1, status.step + 1), now))
            self.step = status.step


def lags(durable: Mapping[int, float], made: Mapping[int, float]) -> list[float]:
    """The lag of each step in seconds, from the first one that the replica executed before the next was durable."""
    both = sorted(durable.keys() & made.keys())
    first = next((step for step in both if made[step] < durable.get(step + 1, 0.0)), None)
    return [] if first is None else [max(made[step] - durable[step], 0.0) for step in both if step >= first]


def train(rank: int, ranks: int, chosen: argparse.Namespace, work: Path) -> None:
    """One rank. Rank 0 prints."""
    torch.set_num_threads(1)
    os.environ |= {WIDTH_VARIABLE: str(chosen.width), DIRECTORY_VARIABLE: str(work / "agents")}
    if ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(work / "meet"), ranks), rank=rank, world_size=ranks
        )
    state, inputs, durable, took = build(), torch.Generator().manual_seed(rank), dict[int, float](), list[float]()
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)

    def note(event: fs.Event) -> None:
        if isinstance(event, fs.Journaled):
            durable[event.step] = time.monotonic()

    root = work / f"run{ranks}"
    watch, replica = Watch(str(root)), fs.Replica("bench.replica_lag:build")
    if rank == 0:
        watch.start()
    with fs.Checkpointer(root, every_step=replica, recovery_s=3600, on_event=note) as checkpointer:
        step = counted = 0
        while counted < chosen.steps and step < STEPS_MAX:
            step += 1
            began = time.perf_counter()
            optimizer.zero_grad()
            model(torch.randn(16, chosen.width, generator=inputs)).square().mean().backward()
            optimizer.step()
            checkpointer.save(step, state)
            time.sleep(chosen.pause_ms / 1e3)
            took.append(time.perf_counter() - began)
            is_near = torch.tensor([float(watch.step >= max(step - 1, 2) or counted > 0)])
            if ranks > 1:
                dist.broadcast(is_near, 0)
            counted += int(is_near)
        checkpointer.wait()
        time.sleep(1.0)
        watch.over.set()
        status = replica_status(str(root)) if rank == 0 else None
    if rank == 0:
        lag_s = lags(durable, watch.made)
        tell({
            "machine": machine.describe(work.parent), "ranks": ranks, "steps": len(lag_s),
            "step_ms": round(1e3 * statistics.median(took[-chosen.steps:]), 1),
            "state_mb": round(3 * sum(parameter.nbytes for parameter in model.parameters()) / 1e6),
            "class": None if status is None else status.exactness,
            "lag_ms": None if not lag_s else {
                "p50": round(1e3 * statistics.median(lag_s), 1), "p95": round(1e3 * percentile(lag_s, 0.95), 1),
                "longest": round(1e3 * max(lag_s), 1),
            },
        })
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, help="of the device to measure")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--pause-ms", type=float, default=100.0)
    chosen = parser.parse_args(arguments)
    for ranks in chosen.ranks:
        work = Path(tempfile.mkdtemp(prefix="replica-lag-", dir=chosen.directory))
        try:
            processes.spawn(train, (ranks, chosen, work), nprocs=ranks)
        finally:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
