"""What a step's bytes cost a training by themselves: read once, or written once, by a thread that does nothing else.

    python -m bench.bare_bytes [--directory DIR] [--rounds 18] [--steps 6]

The training is that of bench/journal_parts.py, and so are blocks and pairs. Nothing of Flowstone runs beside it. After
each step a thread is given as many bytes as the gradients are, in huge pages that are mapped already and never change,
and either adds them up, or writes them over the blocks of a file that has all of them, with direct I/O and one sync.
So this is the least that a journal of every step costs on this machine, however it is made, unless it has fewer bytes.
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
    """So many bytes, touched."""
    memory = mmap.mmap(-1, length)
    memory.madvise(mmap.MADV_HUGEPAGE)
    room = memoryview(memory)
    np.frombuffer(room, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, length, np.uint8)
    return room


@contextmanager
def _writer(path: Path, room: memoryview) -> Iterator[Callable[[], None]]:
    """A function that writes all of `room` over the same blocks, and waits until the device has them."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

    def write() -> None:
        for at in range(0, len(room), REQUEST_BYTES):
            part = room[at : at + REQUEST_BYTES]
            assert os.pwrite(fd, part, at) == len(part)
        os.fdatasync(fd)

    try:
        write()  # from now on the file has its blocks
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
        """Hand one step over. Waits for the one before."""
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
    """Seconds of each step, and of what the thread did for each."""
    beside, found = _Beside(act), []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        training.learn()
        beside.step()
        found.append(time.perf_counter() - begin)
    beside.end()
    return found[1:], beside.seconds[:-1]  # the first step has nothing beside it


def ways(training: Training, work: Path, *, rounds: int, steps: int) -> dict[str, dict[str, object]]:
    """What each way costs the training's steps, and `beside_ms`, how long the thread takes for what it does."""
    length = -(-sum(one.nbytes for one in training.model.parameters()) // REQUEST_BYTES) * REQUEST_BYTES
    room = _huge(length)
    numbers = np.frombuffer(room, np.uint64)
    blocks: dict[str, list[Block]] = {"read": [], "written": []}
    alone: dict[str, list[float]] = {"read": [], "written": []}
    with _writer(work / "bytes", room) as write:
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
        found = ways(Training(FULL, seed=1), work, rounds=chosen.rounds, steps=chosen.steps)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({"machine": machine.describe(work.parent), "ways": found}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
