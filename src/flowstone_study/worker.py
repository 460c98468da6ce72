"""One process of a measurement: `python -m flowstone_study.worker`. Reads orders from standard input, and prints
answers to standard output.

For each order, the process prepares memory and requests, answers Ready, waits for the start signal, moves the bytes,
and answers Done. What counts is the time at which the last process has finished.
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

from flowstone._native import File, reserve_file, run_requests
from flowstone.config import BLOCK_BYTES
from flowstone_study.memory import Run
from flowstone_study.placing import Part, Requests, parts, requests, run_bytes
from flowstone_study.records import Cell

GO, LEAVE = b"go\n", b"leave\n"  # sent after the process has answered an order with Ready


@dataclass(frozen=True, slots=True)
class Order:
    """Run `cell` as process `rank`, on files in `directory`."""

    cell: Cell
    rank: int
    directory: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Answer: memory and requests are prepared."""


@dataclass(frozen=True, slots=True)
class Done:
    """Answer: the bytes are moved. `ended_s` is on the machine's monotonic clock, which is the same for all processes.
    """

    ended_s: float
    cpu_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer: this process cannot carry out the order, for this reason."""

    reason: str


# Each has its name in the JSON, so that a line says which answer it is.
Answer = Ready | Done | Failed
_NAMES: dict[str, type[Answer]] = {"Ready": Ready, "Done": Done, "Failed": Failed}


def encode(answer: Answer) -> bytes:
    return msgspec.json.encode({type(answer).__name__: answer}) + b"\n"


def decode(line: bytes) -> Answer:
    ((name, fields),) = msgspec.json.decode(line).items()
    answer: Answer = msgspec.convert(fields, _NAMES[name])
    return answer


class Worker:
    """Carries out orders. Keeps its memory from one order to the next if the cells allow that, so that memory of the
    kind "reused" is touched only once.
    """

    def __init__(self) -> None:
        self._kept: tuple[object, Run] | None = None

    def perform(self, order: Order) -> Iterator[Answer]:
        """Yields Ready; then, when the next answer is requested, moves the bytes and yields Done. Yields Failed instead
        of either, if it fails.
        """
        cell = order.cell
        try:
            own = parts(cell, order.rank)
            columns = requests(cell, own)
            run = self._prepare(cell, order.rank)
        except (OSError, ValueError, MemoryError) as error:
            yield Failed(_error_line(error))
            return
        yield Ready()
        try:
            before_s = _cpu_s()
            if run is None:  # with fresh memory, a write fills the memory while the timer runs
                run = Run(run_bytes(cell), huge_pages=cell.huge_pages)
                run.fill(cell, order.rank)
            _move(cell, own, columns, run, Path(order.directory))
            done = Done(time.monotonic(), _cpu_s() - before_s, len(columns.file))
        except (OSError, ValueError, MemoryError) as error:
            yield Failed(_error_line(error))
            return
        yield done if run.is_filled(cell, order.rank) else Failed("the bytes read differ from the bytes written")

    def _prepare(self, cell: Cell, rank: int) -> Run | None:
        """The memory that a cell needs when the timer starts. None if mapping the memory is a part of the measurement.
        """
        if cell.memory == "fresh":
            self._kept = None
            return None if cell.direction == "write" else Run(run_bytes(cell), huge_pages=cell.huge_pages)
        key = (cell.mix, cell.bytes, cell.processes, cell.huge_pages)
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # releases the old memory first, so that both never exist at the same time
            self._kept = (key, Run(run_bytes(cell), huge_pages=cell.huge_pages))
        run = self._kept[1]
        if cell.direction == "restore":
            run.erase_marks()
        elif not run.is_filled(cell, rank):
            run.fill(cell, rank)
        return run


def _move(cell: Cell, own: Sequence[Part], columns: Requests, run: Run, directory: Path) -> None:
    """Open and reserve the files, move the bytes, sync files and directory, and close the files. All of this is timed.
    """
    with _opened(cell, own, directory) as files:
        fault = run_requests(
            backend=cell.engine, direction="write" if cell.direction == "write" else "read",
            queue_depth=cell.queue_depth, files=[file for file, _ in files],
            columns=(columns.file, columns.offset, columns.start + run.address, columns.length),
            register=cell.memory == "registered",
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
def _opened(cell: Cell, own: Sequence[Part], directory: Path) -> Iterator[list[tuple[File, int]]]:
    flags = os.O_WRONLY | os.O_CREAT if cell.direction == "write" else os.O_RDONLY
    flags |= os.O_CLOEXEC | (os.O_DIRECT if cell.direct else 0)
    files: list[tuple[File, int]] = []
    try:
        for part in own:
            path = str(directory / part.file)
            fd = os.open(path, flags, 0o644)
            files.append((File(fd=fd, path=path, alignment=BLOCK_BYTES if cell.direct else 1), fd))
            if cell.direction == "write" and cell.reserved:
                # called by every process that shares the file, as reserving twice changes nothing
                reserve_file(fd, part.size_bytes)
        yield files
    finally:
        for _, fd in files:
            os.close(fd)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)  # includes threads that have ended, and io_uring's workers
    return usage.ru_utime + usage.ru_stime


def _error_line(error: BaseException) -> str:
    """The error as one line without paths, so that equal reasons have equal texts."""
    if isinstance(error, OSError) and error.strerror:
        return f"{errno.errorcode.get(error.errno or 0, 'OSError')}: {error.strerror}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which ends its processes
    worker, answers = Worker(), sys.stdout.buffer
    for line in sys.stdin.buffer:
        for answer in worker.perform(msgspec.json.decode(line, type=Order)):
            answers.write(encode(answer))
            answers.flush()
            if isinstance(answer, Ready) and sys.stdin.buffer.readline() != GO:
                break


if __name__ == "__main__":
    main()
