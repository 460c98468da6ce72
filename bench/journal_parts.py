"""Where the time of a journal of every step goes: the same training, with one part of the journal left out at a time.

    python -m bench.journal_parts [--directory DIR] [--rounds 4] [--steps 10] [--only PART ...]

Blocks of steps of each way take turns, each beside a block of plain steps, so that what the machine does meanwhile
is in both. What is left out makes the journal worthless: this shows costs, and nothing else.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import flowstone as fs
from bench.every_step import journal_cpu_s, plain
from flowstone.pipeline.journaling import Journaling
from flowstone_demo.sizes import FULL
from flowstone_demo.train import Training
from flowstone_study import machine

_write = Journaling._write
BEFORE = 3  # steps of a block that are not counted: the whole checkpoint, and the step that copies gradients


def _idle_write(self: Journaling, *arguments: Any) -> None:
    """The journal's thread runs only where a processor would idle."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _write(self, *arguments)


def _nice_write(self: Journaling, *arguments: Any) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    _write(self, *arguments)


def _no_digests(address: NDArray[np.uint64], _: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.zeros(len(address), np.uint64)


def _not_written(*_: object, confirm: Callable[[], None] = lambda: None, **__: object) -> None:
    confirm()


def _nothing(*_: object) -> None: ...


_DIGESTS = {"flowstone._native.digest_memory": _no_digests}
_FINGERPRINT = {"flowstone.pipeline.journaling.Journaling._fingerprint": lambda *_: ""}
_WRITE = {
    "flowstone.store.appending.LocalAppending.append": _not_written,
    "flowstone.store.appending.LocalAppending.sync": _nothing,
}
_THREAD = "flowstone.pipeline.journaling.Journaling._write"
PARTS: Mapping[str, Mapping[str, Any]] = {
    "whole": {}, "no fingerprint": _FINGERPRINT, "no digests": _DIGESTS, "no write": _WRITE,
    "no sync": {"flowstone.store.appending.LocalAppending.sync": _nothing},
    "frames only": {**_DIGESTS, **_FINGERPRINT, **_WRITE},
    "idle class": {_THREAD: _idle_write}, "nice 19": {_THREAD: _nice_write},
}


@contextmanager
def left_out(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for target, by in PARTS[name].items():
            stack.enter_context(mock.patch(target, by))
        yield


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


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=None, help="of the device to measure")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    chosen = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="journal-parts-", dir=chosen.directory))
    training = Training(FULL, seed=1)
    longer: dict[str, list[float]] = {name: [] for name in chosen.only}
    others: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen.only}
    try:
        plain(training, 3)
        for number in range(chosen.rounds):
            for name in chosen.only if number % 2 else chosen.only[::-1]:
                without = statistics.median(plain(training, chosen.steps))
                with left_out(name):
                    times, cpu, calls = steps_of(training, work / "run", chosen.steps)
                shutil.rmtree(work / "run", ignore_errors=True)
                longer[name].append(statistics.median(times) / without)
                others[name].append((1e3 * cpu, 1e3 * statistics.median(calls)))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({
        "machine": machine.describe(work.parent), "ways": {
            name: {
                "step": round(statistics.median(longer[name]), 3), "blocks": [round(one, 3) for one in longer[name]],
                "journal_cpu_ms": round(statistics.mean(cpu for cpu, _ in others[name]), 1),
                "save_ms": round(statistics.median(call for _, call in others[name]), 1),
            } for name in chosen.only
        },
    }, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
