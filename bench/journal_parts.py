"""Where the time of a journal of every step goes: the same training by each of the ways of bench/journal_ways.py.

    python -m bench.journal_parts [--directory DIR] [--rounds 30] [--steps 8] [--only WAY ...]

Short blocks of steps of each way take turns, each between two blocks of plain steps (bench/paired.py), so that what the
machine does meanwhile is in both. Prints lines of JSON, each at once: after each block what its way has come to by
then, so that a run that is killed has told what it has measured; last of all the whole table.
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

BEFORE = 3  # steps of a block that are not counted: the whole checkpoint, and the step that copies gradients


def steps_of(training: Training, root: Path, steps: int) -> tuple[list[float], float, list[float]]:
    """Seconds of each step; of a processor, of the journal's thread for each; of each call of `save`."""
    found, calls, before = [], list[float](), 0.0
    with fs.Checkpointer(root, every_step=True, recovery_s=600) as checkpointer:
        for step in range(1, BEFORE + steps + 1):
            begin = time.perf_counter()
            training.learn()
            called = time.perf_counter()
            save = checkpointer.save(step, training.state(step))
            end = time.perf_counter()
            found.append(end - begin)
            calls.append(end - called)
            if step <= BEFORE:
                save.committed.result()
                before = journal_cpu_s()
        save.committed.result()
        return found[BEFORE:], (journal_cpu_s() - before) / steps, calls[BEFORE:]


@dataclass
class Measured:
    """One way's blocks, and of each, per step, the journal's thread's processor time, and how long `save` took."""

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
    """Blocks of each way by turns; each is removed, and that is on the device, before plain steps are counted again.

    yields  after each block its way, and all that was measured of that so far
    """
    found = {name: Measured() for name in ways}
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
            measured = found[name]
            measured.blocks.append(Block(times, [*before, *behind]))
            measured.cpu_s.append(cpu_s)
            measured.calls_s.append(statistics.median(calls_s))
            before = behind
            yield name, measured


def digest_ms(training: Training, steps: int) -> dict[str, float]:
    """Milliseconds to digest a step's gradients while the training stands still: by one thread, and by two, half each.

    Each look is at gradients that a step has just made and used, as those in `save` are.
    """
    found: dict[str, list[float]] = {"one thread": [], "two threads": []}
    with ThreadPoolExecutor(1) as other:
        other.submit(int).result()
        for number in range(2 * steps):
            training.learn()
            parts = [one.grad for one in training.model.parameters() if one.grad is not None]
            halves = [parts[0::2], parts[1::2]] if number % 2 else [parts]
            columns = [np.array([(one.data_ptr(), one.nbytes) for one in half], np.uint64).T.copy() for half in halves]
            begin = time.perf_counter()
            running = [other.submit(_native.digest_memory, *half) for half in columns[1:]]
            _native.digest_memory(*columns[0])
            for one in running:
                one.result()
            found["two threads" if number % 2 else "one thread"].append(time.perf_counter() - begin)
    return {name: round(1e3 * statistics.median(times), 2) for name, times in found.items()}


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
        found: dict[str, object] = {}
        for name, one in turns(training, work, chosen.only, rounds=chosen.rounds, steps=chosen.steps):
            found[name] = one.summary()
            tell({"way": name, **one.summary()})
        tell({**head, "ways": found})
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
