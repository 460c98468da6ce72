"""The cost of a durable checkpoint of every step for a training, and the rate at which its journal replays.

    python -m bench.every_step [--directory DIR] [--rounds 4] [--steps 25] [--lags 1 4] [--sync-ms 0]

The demo's GPT (25.4 million parameters, fp32, fused AdamW, both cores) trains in one process. Blocks of steps with
`every_step`, with each `lag_steps` in turn, are each between two blocks without (bench/paired.py), so that all run in
the same conditions. A step's time includes its call of `save`. Then a new training loads, which replays the last block.

`--sync-ms` makes each sync of a journal take that much longer, as on a network file system: the thread waits.
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
from flowstone.events.phases import Event
from flowstone.store.appendable import AppendFile
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.wrap import Wrapper
from flowstone_demo.sizes import FULL
from flowstone_demo.train import Training
from flowstone_study import machine


def plain(training: Training, steps: int) -> list[float]:
    """Seconds of each step, without saves."""
    step_s = []
    for _ in range(steps):
        begin = time.perf_counter()
        training.train_step()
        step_s.append(time.perf_counter() - begin)
    return step_s


def journal_cpu_s() -> float:
    """Processor seconds of the journal's threads."""
    names = ("flowstone-journal", "flowstone-fingerprint")
    own = [thread.native_id for thread in threading.enumerate() if thread.name.startswith(names)]
    return sum(int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]) for number in own) / 1e9


class SlowSyncs(Wrapper):
    """A store in which each sync of a growing file takes longer by `seconds`."""

    def __init__(self, inner: Store, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self._seconds, self._sleep = seconds, sleep

    def append_to_new(self, path: str) -> AppendFile:
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
    """Seconds of each step, all durable in the end; events; and further measurements.

    These are the most steps that were not durable when a `save` had returned, the processor seconds of each `save`, and
    the mean processor seconds of the journal's threads.

    Two steps come before the measured ones: the full checkpoint, and a step that copies gradients because the loop is
    not known yet.
    """
    events: list[Event] = []
    step_s, behind, cpu, before = [], 0, list[float](), 0.0
    place = SlowSyncs(LocalStore(root), sync_s) if sync_s else root
    with fs.Checkpointer(
        place, every_step=True, recovery_s=600, lag_steps=lag_steps, on_event=events.append
    ) as checkpointer:
        saves = []
        for step in range(1, steps + 4):
            begin = time.perf_counter()
            training.train_step()
            cpu.append(-time.thread_time())
            saves.append(checkpointer.save(step, training.state(step)))
            cpu[-1] += time.thread_time()
            step_s.append(time.perf_counter() - begin)
            if step < 4:
                saves[-1].committed.result()
            behind = max(behind, sum(not save.committed.done() for save in saves))
            before = journal_cpu_s() if step == 3 else before
        saves[-1].committed.result()
        cpu.append((journal_cpu_s() - before) / steps)
    return step_s[3:], events, behind, cpu[3:]


def replayed(training: Training, root: Path) -> tuple[fs.Replay, bool]:
    """The replay of a new training's load, and whether its state equals the other one's bit for bit."""
    fresh = Training(FULL, seed=2)
    fresh.train_step()  # torch's first step imports its compiler
    with fs.Checkpointer(root) as checkpointer:
        report = checkpointer.load(fresh.state(0))
    assert report.replay is not None
    mine, theirs = training.model.parameters(), fresh.model.parameters()
    return report.replay, all(torch.equal(tensor, other) for tensor, other in zip(mine, theirs, strict=True))


class Measured:
    """The measurements of blocks with one `lag_steps`."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.events: list[Event] = []
        self.behind = 0
        self.cpu: list[float] = []  # of each step, on the caller's thread
        self.journal_cpu: list[float] = []  # of a step on the journal's, in each block

    def row(self) -> dict[str, object]:
        written = [event for event in self.events if isinstance(event, fs.Journaled)]
        return summary(self.blocks) | {
            "with_ms": round(1e3 * statistics.median(step for block in self.blocks for step in block.within), 1),
            "steps_not_durable_max": self.behind,
            "bytes_per_step": int(statistics.median(event.bytes for event in written)),
            "synced": {"mean": round(statistics.mean(event.synced for event in written), 2),
                       "max": max(event.synced for event in written)},
            "cpu_ms_per_step": {
                "save": round(1e3 * statistics.median(self.cpu), 1),
                "journal": round(1e3 * statistics.mean(self.journal_cpu), 1),
            },
            "durable_after_ms": round(1e3 * statistics.median(event.seconds for event in written), 1),
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
    by_lag = {lag_steps: Measured() for lag_steps in chosen.lags}
    turns = [lag for number in range(chosen.rounds) for lag in (chosen.lags if number % 2 else chosen.lags[::-1])]
    try:
        plain(training, 3)
        without = plain(training, chosen.steps)
        for number, lag_steps in enumerate(turns):
            last, measured = number == len(turns) - 1, by_lag[lag_steps]
            steps = chosen.steps * (2 if last else 1)
            times, emitted, most, cpu = journaled(
                training, work / str(number), steps, lag_steps, chosen.sync_ms / 1e3
            )
            replay, is_same = replayed(training, work / str(number)) if last else (None, False)
            shutil.rmtree(work / str(number))
            os.sync()  # removals are on the device before plain steps are measured again
            plain(training, 1)
            behind = plain(training, chosen.steps)
            measured.blocks.append(Block(times, [*without, *behind]))
            measured.events, measured.behind, without = measured.events + emitted, max(measured.behind, most), behind
            measured.cpu, measured.journal_cpu = [*measured.cpu, *cpu[:-1]], [*measured.journal_cpu, cpu[-1]]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    assert replay is not None
    median = statistics.median(step for result in by_lag.values() for block in result.blocks for step in block.without)
    print(json.dumps({
        "machine": machine.describe(work.parent), "sync_ms": chosen.sync_ms,
        "lag_steps": {str(lag_steps): result.row() for lag_steps, result in by_lag.items()},
        "replay": {
            "steps": replay.steps, "seconds": round(replay.seconds, 2), "exactness": replay.exactness,
            "same_bits": is_same, "share_of_training": round(replay.seconds / (replay.steps * median), 3),
        },
    }, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
