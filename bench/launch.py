"""Worker processes: tasks in, measurements out."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from torch.distributed import TCPStore

from bench.records import Measured, Outcome, Task, joined
from bench.worker import READY

Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800.0  # of one worker; the slowest rival needs minutes for 5 GB


class WorkerError(Exception):
    """A worker ended without an outcome; its last output."""


def work(tasks: Sequence[Task], number: int, *, python: Path, io_uring: bool) -> Measured:
    """Run one process for each task, all at once; returns their joint outcome in round `number`.

    Several tasks are the ranks of one job. As under torchrun, no rank hosts the store at which they connect.
    """
    first = tasks[0]
    if first.ranks > 1:
        meeting = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        tasks = [dataclasses.replace(task, port=meeting.port) for task in tasks]
    with tempfile.TemporaryDirectory() as desk:
        workers: list[_Worker[Outcome]] = []
        timer = _timer(TIMEOUT_S, lambda: _stop(workers))
        try:
            for index, task in enumerate(tasks):
                own = Path(desk, str(index))
                workers.append(
                    _Worker(own, "bench.worker", task, Outcome, python, io_uring=io_uring, gated=task.gated)
                )
            if first.gated:
                for _ in range(first.times):
                    _open_gate(workers)
            outcomes = [worker.outcome() for worker in workers]
        except WorkerError as error:
            timed_out = f"no end after {TIMEOUT_S:.0f} s" if not timer.is_alive() else str(error)
            return Measured(first.rival, number, None, f"{first.what}: {timed_out}")
        finally:
            timer.cancel()
            for worker in workers:
                worker.end()
    return Measured(first.rival, number, joined(outcomes))


def call(
    module: str, task: object, result: type[Result], *, python: Path, timeout_s: float, alone: bool = False
) -> Result:
    """Run one process of `python -m MODULE TASK.json RESULT.json`; returns its result. `alone`: see `environment`.

    Raises WorkerError.
    """
    with tempfile.TemporaryDirectory() as desk:
        worker = _Worker(Path(desk, "0"), module, task, result, python, alone=alone)
        timer = _timer(timeout_s, worker.stop)
        try:
            return worker.outcome()
        except WorkerError as error:
            if timer.is_alive():
                raise
            raise WorkerError(f"no end after {timeout_s:.0f} s") from error
        finally:
            timer.cancel()
            worker.end()


def _timer(seconds: float, action: Callable[[], object]) -> threading.Timer:
    """A started worker. If the script is told to stop, it does not wait for the worker."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer


def _stop(workers: Sequence[_Worker[Outcome]]) -> None:
    for worker in workers:
        worker.stop()


def _open_gate(workers: Sequence[_Worker[Outcome]]) -> None:
    """Once all are ready for their next timer, start all."""
    for worker in workers:
        worker.wait_ready()
    for worker in workers:
        worker.let_start()


class _Worker(Generic[Result]):
    """A running worker, leader of a process group with all its children; nothing of it outlives `end`.

    Its standard error goes to a file, because a full pipe would stop it.
    """

    def __init__(
        self, desk: Path, module: str, task: object, result: type[Result], python: Path, *, io_uring: bool = True,
        gated: bool = False, alone: bool = False,
    ) -> None:
        desk.mkdir()
        self._result = result
        task_path, self._outcome_path = desk / "task.json", desk / "outcome.json"
        self._said_path = desk / "said"
        task_path.write_bytes(msgspec.json.encode(task))
        command = [str(python), "-m", module, str(task_path), str(self._outcome_path)]
        if not io_uring:
            command = [sys.executable, "-m", "bench.seccomp", *command]
        output = subprocess.PIPE if gated else subprocess.DEVNULL
        with self._said_path.open("wb") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment(desk, alone=alone), stdin=subprocess.PIPE, stdout=output,
                stderr=file, bufsize=0, start_new_session=True,
            )

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY.encode():
                return
        raise WorkerError(self._last_words())

    def let_start(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
        except BrokenPipeError as error:
            raise WorkerError(self._last_words()) from error

    def outcome(self) -> Result:
        self._wait_exit()
        if self._process.returncode != 0:
            raise WorkerError(self._last_words())
        return msgspec.json.decode(self._outcome_path.read_bytes(), type=self._result)

    def stop(self) -> None:
        """Kill the group, from any thread. Only before the worker is reaped, while its process id is its own."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the remaining processes, and reap."""
        self.stop()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _wait_exit(self) -> None:
        """Wait until the worker has ended by itself; then end its remaining children."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.end()

    def _last_words(self) -> str:
        if self._process.returncode is None:
            self._wait_exit()
        lines = self._said_path.read_text(errors="replace").strip().splitlines()
        # An error of several lines begins with its class, without indentation.
        first = max((index for index, line in enumerate(lines) if line[:1].strip()), default=0)
        return "; ".join(line.strip() for line in lines[first:]) or f"ended with {self._process.returncode}"


def environment(desk: Path, *, alone: bool = False) -> dict[str, str]:
    """The caller's environment, with absolute import paths, since workers start in the repository's root.

    alone  without these paths: beside the bench, the interpreter finds only its own packages

    Compiled modules may be written: a new tree would otherwise compile them inside its first timer, every time.

    Defaults are measured instead of this machine's tuning: the worker's own empty folder replaces the user's
    configuration.
    """
    callers = "" if alone else os.environ.get("PYTHONPATH", "")
    paths = [os.path.abspath(path) for path in callers.split(os.pathsep) if path]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), *paths]), "XDG_CONFIG_HOME": str(desk)}
