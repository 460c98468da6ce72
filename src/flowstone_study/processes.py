"""The processes of a measurement, which start their work at the same time."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from flowstone_study.records import Cell
from flowstone_study.worker import GO, LEAVE, Answer, Done, Failed, Order, Ready, decode


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a measurement with all processes has found. `seconds`: from the start signal until the last process has
    finished.
    """

    seconds: float
    cpu_s: float
    requests: int


class Processes:
    """The worker processes. They are started when they are first needed, and used for all measurements. Use this in a
    `with` statement.
    """

    def __init__(self) -> None:
        self._workers: list[subprocess.Popen[bytes]] = []
        self._ready: list[subprocess.Popen[bytes]] = []

    def prepare(self, cell: Cell, directory: Path) -> Failed | None:
        """Let each process prepare memory and requests. Returns once all are ready; or the failure of a process, if
        there is one.
        """
        while len(self._workers) < cell.processes:
            self._workers.append(_start())
        workers = self._workers[: cell.processes]
        for rank, worker in enumerate(workers):
            _send(worker, msgspec.json.encode(Order(cell, rank, str(directory))) + b"\n")
        answers = [_receive(worker) for worker in workers]
        self._ready = [w for w, answer in zip(workers, answers, strict=True) if isinstance(answer, Ready)]
        failed = self._first_failure(answers)
        if failed is not None:
            for worker in self._ready:
                _send(worker, LEAVE)
        return failed

    def run(self) -> Outcome | Failed:
        """Start all prepared processes at the same time. Returns once the last one has finished."""
        started_s = time.monotonic()
        for worker in self._ready:
            _send(worker, GO)
        answers = [_receive(worker) for worker in self._ready]
        failed = self._first_failure(answers)
        if failed is not None:
            return failed
        done = [answer for answer in answers if isinstance(answer, Done)]
        assert len(done) == len(answers)
        return Outcome(
            max(d.ended_s for d in done) - started_s, sum(d.cpu_s for d in done), sum(d.requests for d in done)
        )

    def _first_failure(self, answers: list[Answer]) -> Failed | None:
        dead = [worker for worker in self._workers if worker.poll() is not None]
        for worker in dead:
            self._workers.remove(worker)
            _end(worker)
        return next((answer for answer in answers if isinstance(answer, Failed)), None)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.kill()  # in any state, as its result is no longer needed
            _end(worker)
        self._workers.clear()


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flowstone_study.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


def _send(worker: subprocess.Popen[bytes], line: bytes) -> None:
    assert worker.stdin is not None
    with suppress(BrokenPipeError):  # its answer, which is read next, reports that it has ended
        worker.stdin.write(line)


def _receive(worker: subprocess.Popen[bytes]) -> Answer:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    return decode(line) if line.endswith(b"\n") else Failed(f"the process ended with status {worker.wait()}")


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            pipe.close()
