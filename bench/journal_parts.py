"""Where the time of a journal of every step goes: the same training in each of the ways of bench/journal_ways.py.

    python -m bench.journal_parts [--directory DIR] [--rounds 30] [--steps 8] [--only WAY ...]

Short blocks of steps in each way alternate, each between two blocks of plain steps (bench/paired.py), so that other
load on the machine affects both. Prints a line of JSON after each block with its way's results so far, so that they
survive if the run is killed, and the complete table at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import flowstone as fs
from bench.every_step import journal_cpu_s, plain
from bench.journal_ways import PARTS, journaling_by
from bench.paired import Block, summary, tell
from flowstone import _native
from flowstone_demo.sizes import FULL
from flowstone_demo.train import Training
from flowstone_study import machine

BEFORE = 3  # steps of a block that are not counted: the full checkpoint, and the step that copies gradients


def steps_of(training: Training, root: Path, steps: int) -> tuple[list[float], float, list[float]]:
    """Seconds of each step; processor seconds of the journal's thread for each; seconds of each call of `save`."""
    step_s, calls, before = [], list[float](), 0.0
    with fs.Checkpointer(root, every_step=True, recovery_s=600) as checkpointer:
        for step in range(1, BEFORE + steps + 1):
            begin = time.perf_counter()
            training.train_step()
            called = time.perf_counter()
            save = checkpointer.save(step, training.state(step))
            end = time.perf_counter()
            step_s.append(end - begin)
            calls.append(end - called)
            if step <= BEFORE:
                save.committed.result()
                before = journal_cpu_s()
        save.committed.result()
        return step_s[BEFORE:], (journal_cpu_s() - before) / steps, calls[BEFORE:]


@dataclass
class Measured:
    """The blocks of one way; for each, per step, the journal thread's processor time and the time of `save`."""

    blocks: list[Block] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        return summary(self.blocks) | {
            "journal_cpu_ms": round(1e3 * statistics.mean(self.cpu_s), 1),
            "save_ms": round(1e3 * statistics.median(self.calls_s), 1),
        }


def turns(
    training: Training, work: Path, ways: Sequence[str], *, rounds: int, steps: int
) -> Iterator[tuple[str, Measured]]:
    """Blocks of each way in turn; the files of each are removed from the device before plain steps are counted again.

    yields  after each block its way, and all its measurements so far
    """
    by_name = {name: Measured() for name in ways}
    plain(training, 3)
    before = plain(training, steps)
    for number in range(rounds):
        for name in ways if number % 2 else ways[::-1]:
            with journaling_by(name):
                times, cpu_s, calls_s = steps_of(training, work / "run", steps)
            shutil.rmtree(work / "run", ignore_errors=True)
            os.sync()
            plain(training, 1)
            behind = plain(training, steps)
            measured = by_name[name]
            measured.blocks.append(Block(times, [*before, *behind]))
            measured.cpu_s.append(cpu_s)
            measured.calls_s.append(statistics.median(calls_s))
            before = behind
            yield name, measured


def digest_ms(training: Training, steps: int) -> dict[str, float]:
    """Milliseconds to digest a step's gradients while training stands still: by one thread, and by two with half each.

    Each measurement uses gradients that a step has just made and used, as in `save`.
    """
    laps: dict[str, list[float]] = {"one thread": [], "two threads": []}
    with ThreadPoolExecutor(1) as other:
        other.submit(int).result()
        for number in range(2 * steps):
            training.train_step()
            parts = [parameter.grad for parameter in training.model.parameters() if parameter.grad is not None]
            halves = [parts[0::2], parts[1::2]] if number % 2 else [parts]
            columns = [np.array([(g.data_ptr(), g.nbytes) for g in half], np.uint64).T.copy() for half in halves]
            begin = time.perf_counter()
            running = [other.submit(_native.digest_memory, *half) for half in columns[1:]]
            _native.digest_memory(*columns[0])
            for future in running:
                future.result()
            laps["two threads" if number % 2 else "one thread"].append(time.perf_counter() - begin)
    return {name: round(1e3 * statistics.median(times), 2) for name, times in laps.items()}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=None, help="of the device to measure")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=8, help="of a block")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    chosen = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="journal-parts-", dir=chosen.directory))
    try:
        training = Training(FULL, seed=1)
        head = {"machine": machine.describe(work.parent), "digest_ms": digest_ms(training, 8)}
        tell(head)
        record: dict[str, object] = {}
        for name, measured in turns(training, work, chosen.only, rounds=chosen.rounds, steps=chosen.steps):
            record[name] = measured.summary()
            tell({"way": name, **measured.summary()})
        tell({**head, "ways": record})
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
