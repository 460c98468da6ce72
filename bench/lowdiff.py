"""The cost of a durable checkpoint of every step if gradients are exchanged compressed (LowDiff, arXiv 2509.04084).

    python -m bench.lowdiff DIR [--ranks 4] [--rounds 30] [--steps 10] [--width 768] [--batch 32]

Ranks of DistributedDataParallel over gloo, with a thread each, train layers of `width` with AdamW, and exchange the
largest hundredth of their gradients, with error feedback. Short blocks of steps with and without `every_step`
alternate, and each is compared with its neighbours (bench/paired.py). A step's time is that of rank 0, and includes its
call of `save`. Processor time is that of all threads of rank 0 per step; beside other work on the machine it is more
reliable than time. The state is weights and both moments, without the residuals, which steps do not log. At the end,
new ranks load, which replays the last block. Prints a line of JSON after each round with the results so far, so that
they survive if the run is killed, and everything at the end.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel

import flowstone as fs
from bench.every_step import journal_cpu_s
from bench.paired import Block, summary, tell
from flowstone.adapters.ddp import TopKGradients, exchange
from flowstone_study import machine

LAYERS = 6


class Training:
    """One rank's training. All begin with the same weights, and learn from inputs of their own."""

    def __init__(self, width: int, batch: int, seed: int) -> None:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(*[
            layer for _ in range(LAYERS) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())
        ])
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        compression = TopKGradients(self.model, ratio=0.01)
        self.model.register_comm_hook(compression, exchange)
        self.compression = fs.PerRank(compression)
        self._inputs = torch.Generator().manual_seed(seed + 100 * dist.get_rank())
        self._shape = batch, width

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "gradients": self.compression}

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(*self._shape, generator=self._inputs)).square().mean().backward()
        self.optimizer.step()

    @property
    def state_bytes(self) -> int:
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters())


def plain(training: Training, steps: int) -> tuple[list[float], float]:
    """Seconds of each step without saves, and processor seconds per step."""
    step_s, before = [], time.process_time()
    for _ in range(steps):
        begin = time.perf_counter()
        training.train_step()
        step_s.append(time.perf_counter() - begin)
    return step_s, (time.process_time() - before) / steps


def journaled(training: Training, root: Path, steps: int) -> tuple[list[float], list[float], list[fs.Journaled]]:
    """Seconds of each step, all durable in the end; processor seconds per step; and events.

    Processor seconds are of all threads, of the call of `save`, and of the journal's thread. The full checkpoint comes
    before the measured steps.
    """
    events: list[fs.Event] = []
    step_s, before, calls, journal = [], 0.0, 0.0, 0.0
    with fs.Checkpointer(root, every_step=True, recovery_s=600, on_event=events.append) as checkpointer:
        for step in range(1, steps + 4):
            begin = time.perf_counter()
            training.train_step()
            called = time.thread_time()
            save = checkpointer.save(step, training.state())
            calls += time.thread_time() - called
            step_s.append(time.perf_counter() - begin)
            if step < 4:
                save.committed.result()
                dist.barrier()
                before, calls, journal = time.process_time(), 0.0, journal_cpu_s()
        save.committed.result()
        seconds = [(time.process_time() - before) / steps, calls / steps, (journal_cpu_s() - journal) / steps]
    return step_s[3:], seconds, [event for event in events if isinstance(event, fs.Journaled)]


def train(rank: int, chosen: argparse.Namespace, work: Path) -> None:
    """One rank. Rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(work / "meet"), chosen.ranks), rank=rank,
                            world_size=chosen.ranks)
    training = Training(chosen.width, chosen.batch, seed=1)
    emitted: list[fs.Journaled] = []
    blocks: list[Block] = []
    cpu_without: list[float] = []
    cpu_within: list[list[float]] = []
    plain(training, 5)
    before, _ = plain(training, chosen.steps)
    for number in range(chosen.rounds):
        root = work / str(number)
        times, cpu, events = journaled(training, root, chosen.steps)
        emitted, cpu_within = emitted + events, [*cpu_within, cpu]
        expected = [parameter.detach().clone() for parameter in training.model.parameters()]
        dist.barrier()
        if rank == 0 and number < chosen.rounds - 1:
            shutil.rmtree(root)
        plain(training, 2)
        behind, cpu = plain(training, chosen.steps)
        blocks, cpu_without, before = [*blocks, Block(times, [*before, *behind])], [*cpu_without, cpu], behind
        if rank == 0:
            tell({"round": number + 1, "step": summary(blocks), **_cpu(cpu_without, cpu_within)})
    fresh = Training(chosen.width, chosen.batch, seed=2)
    with fs.Checkpointer(work / str(chosen.rounds - 1)) as checkpointer:
        report = checkpointer.load(fresh.state())
    replay = report.replay
    assert replay is not None
    is_same = all(torch.equal(tensor, other) for tensor, other in zip(expected, fresh.model.parameters(), strict=True))
    own = torch.tensor([statistics.median(event.bytes for event in emitted), float(not is_same), float(any(
        event.uncompressed for event in emitted
    ))], dtype=torch.float64)
    dist.all_reduce(own)
    if rank == 0:
        tell({
            "machine": machine.describe(work.parent), "ranks": chosen.ranks, "step": summary(blocks),
            **_cpu(cpu_without, cpu_within),
            "bytes_per_step": int(own[0]), "share_of_state": round(float(own[0]) / training.state_bytes, 4),
            "durable_after_ms": round(1e3 * statistics.median(event.seconds for event in emitted), 1),
            "uncompressed": bool(own[2]),
            "replay": {
                "steps": replay.steps, "seconds": round(replay.seconds, 2), "exactness": replay.exactness,
                "approximate": replay.approximate, "same_bits_on_all_ranks": not own[1],
                "share_of_training": round(replay.seconds / (replay.steps * statistics.median(before)), 3),
            },
        })
    dist.barrier()
    dist.destroy_process_group()


def _cpu(without: Sequence[float], within: Sequence[Sequence[float]]) -> dict[str, object]:
    """Processor time of a step, without and with saves, of two parts of it, and the ratio."""
    plain_s = statistics.median(without)
    saved_s, call_s, journal_s = (statistics.median(column) for column in zip(*within, strict=True))
    return {
        "cpu_ms": {"without": round(1e3 * plain_s, 1), "with": round(1e3 * saved_s, 1),
                   "call of save": round(1e3 * call_s, 2), "journal's thread": round(1e3 * journal_s, 2)},
        "cpu": round(saved_s / plain_s, 4),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, help="of the device to measure")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=32)
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    work = Path(tempfile.mkdtemp(prefix="lowdiff-", dir=chosen.directory))
    ranks = processes.spawn(train, (chosen, work), nprocs=chosen.ranks, join=False)
    try:
        while not ranks.join():
            pass
    finally:
        _kill(ranks.processes)
        shutil.rmtree(work, ignore_errors=True)


def _kill(ranks: Sequence[BaseProcess]) -> None:
    """Keeps the file at which ranks meet until all have ended: torch would read it for ever once it is gone."""
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main(sys.argv[1:])
