"""The cost for a training when another thread only reads, or only writes, as many bytes as a step's gradients have.

    python -m bench.bare_bytes [--directory DIR] [--rounds 18] [--steps 6]

Training, blocks and pairs are those of bench/journal_parts.py, but Flowstone does not run. After each step, a thread
gets as many bytes as the gradients have, in huge pages that are mapped already and never change. It either adds them
up, or writes them into an allocated file with direct I/O and one sync. So this is the minimum cost on this machine of
any journal of every step, unless it writes fewer bytes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from bench.every_step import plain
from bench.paired import Block, summary
from flowstone_demo.sizes import FULL
from flowstone_demo.train import Training
from flowstone_study import machine

REQUEST_BYTES = 8 << 20


def _huge(length: int) -> memoryview:
    """Memory of that size, touched."""
    memory = mmap.mmap(-1, length)
    memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = memoryview(memory)
    np.frombuffer(buffer, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, length, np.uint8)
    return buffer


@contextmanager
def _writer(path: Path, buffer: memoryview) -> Iterator[Callable[[], None]]:
    """A function that writes all of `buffer` to the same blocks of the file, and waits until the device has them."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

    def write() -> None:
        for offset in range(0, len(buffer), REQUEST_BYTES):
            part = buffer[offset : offset + REQUEST_BYTES]
            assert os.pwrite(fd, part, offset) == len(part)
        os.fdatasync(fd)

    try:
        write()  # from now on the file's blocks are allocated
        yield write
    finally:
        os.close(fd)


class _Beside:
    """A thread that runs `act` once for each step that has ended."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self.seconds = act, list[float]()
        self._due: SimpleQueue[bool] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Pass one step to the thread. Waits for the previous one."""
        self._idle.wait()
        self._idle.clear()
        self._due.put(True)

    def end(self) -> None:
        self._idle.wait()
        self._due.put(False)
        self._thread.join()

    def _run(self) -> None:
        while self._due.get():
            begin = time.perf_counter()
            self._act()
            self.seconds.append(time.perf_counter() - begin)
            self._idle.set()


def _steps_beside(training: Training, act: Callable[[], None], steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of the thread's work for each."""
    beside, laps = _Beside(act), []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        training.train_step()
        beside.step()
        laps.append(time.perf_counter() - begin)
    beside.end()
    return laps[1:], beside.seconds[:-1]  # the thread does nothing beside the first step


def ways(training: Training, work: Path, *, rounds: int, steps: int) -> dict[str, dict[str, object]]:
    """The cost of each way for the training's steps, and `beside_ms`, the time of the thread's work."""
    length = -(-sum(parameter.nbytes for parameter in training.model.parameters()) // REQUEST_BYTES) * REQUEST_BYTES
    buffer = _huge(length)
    numbers = np.frombuffer(buffer, np.uint64)
    blocks: dict[str, list[Block]] = {"read": [], "written": []}
    alone: dict[str, list[float]] = {"read": [], "written": []}
    with _writer(work / "bytes", buffer) as write:
        acts: dict[str, Callable[[], None]] = {"read": lambda: _add_up(numbers), "written": write}
        plain(training, 3)
        before = plain(training, steps)
        for number in range(rounds):
            for name in list(acts) if number % 2 else list(acts)[::-1]:
                within, seconds = _steps_beside(training, acts[name], steps)
                plain(training, 1)
                behind = plain(training, steps)
                blocks[name].append(Block(within, [*before, *behind]))
                alone[name] += seconds
                before = behind
    return {
        name: summary(blocks[name]) | {"bytes": length, "beside_ms": round(1e3 * float(np.median(alone[name])), 1)}
        for name in blocks
    }


def _add_up(numbers: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
    numbers.sum()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=None, help="of the device to measure")
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--steps", type=int, default=6, help="of a block")
    chosen = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="bare-bytes-", dir=chosen.directory))
    try:
        measured = ways(Training(FULL, seed=1), work, rounds=chosen.rounds, steps=chosen.steps)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({"machine": machine.describe(work.parent), "ways": measured}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
