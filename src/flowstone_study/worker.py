"""One process of a run: `python -m flowstone_study.worker`, orders on standard input, answers on standard output.

For each order: prepare (memory, requests), answer Ready, wait for the start signal, move the bytes, answer Done. The
last process to finish ends the run, so work after a process's own clock has stopped does not count.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flowstone import _native
from flowstone.config import BLOCK_BYTES
from flowstone_study.memory import Run
from flowstone_study.placing import Part, Requests, parts, requests, run_bytes
from flowstone_study.records import Cell

GO, LEAVE = b"go\n", b"leave\n"  # what follows an order that was answered with Ready


@dataclass(frozen=True, slots=True)
class Order:
    """Run `cell` as process `rank`, on files in `directory`."""

    cell: Cell
    rank: int
    directory: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Memory and requests are prepared."""


@dataclass(frozen=True, slots=True)
class Done:
    """The bytes are moved. `ended_s` is on the machine's monotonic clock, which all processes share."""

    ended_s: float
    cpu_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class Failed:
    """This process cannot do it; with the reason."""

    reason: str


# Tagged by name, so that a line of JSON says which one it is.
Answer = Ready | Done | Failed
_NAMES: dict[str, type[Answer]] = {"Ready": Ready, "Done": Done, "Failed": Failed}


def encode(answer: Answer) -> bytes:
    return msgspec.json.encode({type(answer).__name__: answer}) + b"\n"


def decode(line: bytes) -> Answer:
    ((name, fields),) = msgspec.json.decode(line).items()
    answer: Answer = msgspec.convert(fields, _NAMES[name])
    return answer


class Worker:
    """Keeps its memory between orders if the cells allow it, so that `reused` touches it once."""

    def __init__(self) -> None:
        self._kept: tuple[object, Run] | None = None

    def perform(self, order: Order) -> Iterator[Answer]:
        """Ready, then Done when the next answer is requested; or Failed instead of either."""
        cell = order.cell
        try:
            own = parts(cell, order.rank)
            columns = requests(cell, own)
            run = self._prepare(cell, order.rank)
        except (OSError, ValueError, MemoryError) as error:
            yield Failed(_told(error))
            return
        yield Ready()
        try:
            before_s = _cpu_s()
            if run is None:  # fresh memory in a write: filled while writing
                run = Run(run_bytes(cell), huge_pages=cell.huge_pages)
                run.fill(cell, order.rank)
            _move(cell, own, columns, run, Path(order.directory))
            done = Done(time.monotonic(), _cpu_s() - before_s, len(columns.file))
        except (OSError, ValueError, MemoryError) as error:
            yield Failed(_told(error))
            return
        yield done if run.is_filled(cell, order.rank) else Failed("what was restored is not what was written")

    def _prepare(self, cell: Cell, rank: int) -> Run | None:
        """Memory as the cell needs it when the timer starts; None if even mapping it is part of the measurement."""
        if cell.memory == "fresh":
            self._kept = None
            return None if cell.direction == "write" else Run(run_bytes(cell), huge_pages=cell.huge_pages)
        key = (cell.mix, cell.bytes, cell.processes, cell.huge_pages)
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # release first, or both are held at once
            self._kept = (key, Run(run_bytes(cell), huge_pages=cell.huge_pages))
        run = self._kept[1]
        if cell.direction == "restore":
            run.spoil()
        elif not run.is_filled(cell, rank):
            run.fill(cell, rank)
        return run


def _move(cell: Cell, own: Sequence[Part], columns: Requests, run: Run, directory: Path) -> None:
    """Open, reserve, move, sync files and directory, close. Everything here is inside the timer."""
    with _opened(cell, own, directory) as files:
        fault = _native.run_requests(
            backend=cell.engine, direction="write" if cell.direction == "write" else "read",
            queue_depth=cell.queue_depth, files=[file for file, _ in files], file=columns.file, offset=columns.offset,
            address=columns.start + run.address, length=columns.length, register=cell.memory == "registered",
        )
        if fault is not None:
            raise OSError(fault.errno, os.strerror(fault.errno) if fault.errno else fault.operation)
        if cell.direction == "write":
            for _, fd in files:
                os.fsync(fd)
    if cell.direction == "write":
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _opened(cell: Cell, own: Sequence[Part], directory: Path) -> Iterator[list[tuple[_native.File, int]]]:
    flags = os.O_WRONLY | os.O_CREAT if cell.direction == "write" else os.O_RDONLY
    flags |= os.O_CLOEXEC | (os.O_DIRECT if cell.direct else 0)
    files: list[tuple[_native.File, int]] = []
    try:
        for part in own:
            path = str(directory / part.file)
            fd = os.open(path, flags, 0o644)
            files.append((_native.File(fd=fd, path=path, alignment=BLOCK_BYTES if cell.direct else 1), fd))
            if cell.direction == "write" and cell.reserved:
                _native.reserve_file(fd, part.size_bytes)  # every sharer does it: reserving twice changes nothing
        yield files
    finally:
        for _, fd in files:
            os.close(fd)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)  # threads that have ended are in it, the ring's workers too
    return usage.ru_utime + usage.ru_stime


def _told(error: BaseException) -> str:
    """One line without paths, so that equal reasons have equal text."""
    if isinstance(error, OSError) and error.strerror:
        return f"{errno.errorcode.get(error.errno or 0, 'OSError')}: {error.strerror}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its processes itself
    worker, answers = Worker(), sys.stdout.buffer
    for line in sys.stdin.buffer:
        for answer in worker.perform(msgspec.json.decode(line, type=Order)):
            answers.write(encode(answer))
            answers.flush()
            if isinstance(answer, Ready) and sys.stdin.buffer.readline() != GO:
                break


if __name__ == "__main__":
    main()
