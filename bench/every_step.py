"""What a durable checkpoint of every step costs a training, and how fast its journal replays.

    python -m bench.every_step [--directory DIR] [--rounds 4] [--steps 25] [--lags 1 4] [--sync-ms 0]

The demo's GPT (25.4 million parameters, fp32, fused AdamW, both cores) trains in one process; blocks of steps with
`every_step`, of each `lag_steps` by turns, each between two blocks without (bench/paired.py), so that all meet the same
machine. A step's time includes its call of `save`. Then a fresh training loads, which replays the last block.

With `--sync-ms`, each sync of a journal takes that much longer, as one of a network file system does: the thread waits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import flowstone as fs
from bench.paired import Block, summary
from flowstone.events import Event
from flowstone.store.appends import Appending
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.wrap import Wrapper
from flowstone_demo.sizes import FULL
from flowstone_demo.train import Training
from flowstone_study import machine


def plain(training: Training, steps: int) -> list[float]:
    """Seconds of each step, nothing saved."""
    found = []
    for _ in range(steps):
        begin = time.perf_counter()
        training.learn()
        found.append(time.perf_counter() - begin)
    return found


def journal_cpu_s() -> float:
    """Seconds of a processor that the journal's threads have taken."""
    names = ("flowstone-journal", "flowstone-fingerprint")
    own = [one.native_id for one in threading.enumerate() if one.name.startswith(names)]
    return sum(int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]) for number in own) / 1e9


class SlowSyncs(Wrapper):
    """A store in which each sync of a file that grows takes longer by `seconds`."""

    def __init__(self, inner: Store, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self._seconds, self._sleep = seconds, sleep

    def append_to_new(self, path: str) -> Appending:
        appending = super().append_to_new(path)
        sync = appending.sync

        def slow_sync() -> None:
            sync()
            self._sleep(self._seconds)

        appending.sync = slow_sync  # type: ignore[method-assign]
        return appending


def journaled(
    training: Training, root: Path, steps: int, lag_steps: int, sync_s: float = 0.0
) -> tuple[list[float], list[Event], int, list[float]]:
    """Seconds of each step, all of them durable in the end; what was told; how many steps, at most, were not durable
    yet when a `save` had returned; seconds of a processor, of each `save`, and last the mean of the journal's threads.

    The whole checkpoint that the journal begins with, and the step that copies gradients as the loop is not known yet,
    come before.
    """
    events: list[Event] = []
    found, behind, cpu, before = [], 0, list[float](), 0.0
    place = SlowSyncs(LocalStore(root), sync_s) if sync_s else root
    with fs.Checkpointer(
        place, every_step=True, recovery_s=600, lag_steps=lag_steps, on_event=events.append
    ) as checkpointer:
        saves = []
        for step in range(1, steps + 4):
            begin = time.perf_counter()
            training.learn()
            cpu.append(-time.thread_time())
            saves.append(checkpointer.save(step, training.state(step)))
            cpu[-1] += time.thread_time()
            found.append(time.perf_counter() - begin)
            if step < 4:
                saves[-1].committed.result()
            behind = max(behind, sum(not save.committed.done() for save in saves))
            before = journal_cpu_s() if step == 3 else before
        saves[-1].committed.result()
        cpu.append((journal_cpu_s() - before) / steps)
    return found[3:], events, behind, cpu[3:]


def replayed(training: Training, root: Path) -> tuple[fs.Replay, bool]:
    """What a fresh training's load has replayed, and whether it is bit for bit what the other one is."""
    fresh = Training(FULL, seed=2)
    fresh.learn()  # torch's first step imports its compiler
    with fs.Checkpointer(root) as checkpointer:
        report = checkpointer.load(fresh.state(0))
    assert report.replay is not None
    mine, theirs = training.model.parameters(), fresh.model.parameters()
    return report.replay, all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


class Measured:
    """What blocks of one `lag_steps` have come to."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.events: list[Event] = []
        self.behind = 0
        self.cpu: list[float] = []  # of each step, on the caller's thread
        self.journal_cpu: list[float] = []  # of a step on the journal's, in each block

    def row(self) -> dict[str, object]:
        written = [event for event in self.events if isinstance(event, fs.Journaled)]
        return summary(self.blocks) | {
            "with_ms": round(1e3 * statistics.median(step for one in self.blocks for step in one.within), 1),
            "steps_not_durable_max": self.behind,
            "bytes_per_step": int(statistics.median(one.bytes for one in written)),
            "synced": {"mean": round(statistics.mean(one.synced for one in written), 2),
                       "max": max(one.synced for one in written)},
            "cpu_ms_per_step": {
                "save": round(1e3 * statistics.median(self.cpu), 1),
                "journal": round(1e3 * statistics.mean(self.journal_cpu), 1),
            },
            "durable_after_ms": round(1e3 * statistics.median(one.seconds for one in written), 1),
        }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=None, help="of the device to measure")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=25, help="of a block; the last one has twice as many")
    parser.add_argument("--lags", type=int, nargs="+", default=[1], help="lag_steps, of which blocks take turns")
    parser.add_argument("--sync-ms", type=float, default=0.0, help="by which each sync of the journal takes longer")
    chosen = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="every-step-", dir=chosen.directory))
    training = Training(FULL, seed=1)
    found = {lag_steps: Measured() for lag_steps in chosen.lags}
    turns = [lag for number in range(chosen.rounds) for lag in (chosen.lags if number % 2 else chosen.lags[::-1])]
    try:
        plain(training, 3)
        without = plain(training, chosen.steps)
        for number, lag_steps in enumerate(turns):
            last, one = number == len(turns) - 1, found[lag_steps]
            steps = chosen.steps * (2 if last else 1)
            times, told, most, cpu = journaled(
                training, work / str(number), steps, lag_steps, chosen.sync_ms / 1e3
            )
            replay, is_same = replayed(training, work / str(number)) if last else (None, False)
            shutil.rmtree(work / str(number))
            os.sync()  # what is removed is on the device before plain steps are counted again
            plain(training, 1)
            behind = plain(training, chosen.steps)
            one.blocks.append(Block(times, [*without, *behind]))
            one.events, one.behind, without = one.events + told, max(one.behind, most), behind
            one.cpu, one.journal_cpu = [*one.cpu, *cpu[:-1]], [*one.journal_cpu, cpu[-1]]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    assert replay is not None
    median = statistics.median(step for one in found.values() for block in one.blocks for step in block.without)
    print(json.dumps({
        "machine": machine.describe(work.parent), "sync_ms": chosen.sync_ms,
        "lag_steps": {str(lag_steps): one.row() for lag_steps, one in found.items()},
        "replay": {
            "steps": replay.steps, "seconds": round(replay.seconds, 2), "exactness": replay.exactness,
            "same_bits": is_same, "share_of_training": round(replay.seconds / (replay.steps * median), 3),
        },
    }, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
