"""The supervisor's handle of one training process: start it, read its messages, kill it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from flowstone_demo.messages import Message, Order, RankOrder, decode

SILENCE_MAX_S = 120.0  # starting a process on a busy machine takes a tenth of that


class DiedError(Exception):
    """A training process ended, or stopped sending messages, without having been killed by the demo."""


class ChildProcess:
    """One training process. Its messages come through a pipe, its standard error goes to `log`.

    place  environment variables with the rank, for one of several ranks

    A context manager; leaving it ends the process. Not thread-safe.
    """

    def __init__(self, order: Order | RankOrder, log: Path, place: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._rest = b""
        self._open = True
        self._heard = time.monotonic()
        module = "child" if isinstance(order, Order) else "rank"
        environment = {**os.environ, **_environment(order.form.threads), **(place or {})}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"flowstone_demo.{module}", msgspec.json.encode(order).decode()],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment,
            )

    def hear(self, timeout_s: float) -> list[Message]:
        """The messages that have arrived; waits `timeout_s` for the first. Raises DiedError after a long silence."""
        if not self._open or not select.select([self], [], [], timeout_s)[0]:
            if self._open and time.monotonic() - self._heard > SILENCE_MAX_S:
                raise DiedError(f"the training process printed nothing for {SILENCE_MAX_S:.0f} s\n{self._last_words()}")
            return []
        part = os.read(self.fileno(), 1 << 16)
        self._open, self._heard = bool(part), time.monotonic()
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [decode(line) for line in lines]

    def fileno(self) -> int:
        """The pipe's descriptor, for waiting on several processes at once."""
        assert self._process.stdout is not None, "opened as a pipe"
        return self._process.stdout.fileno()

    @property
    def over(self) -> bool:
        """Whether the process has closed its end of the pipe, and all its messages were read."""
        return not self._open

    def kill(self) -> list[Message]:
        """Send SIGKILL. Returns the messages sent before. Raises DiedError if the process ended for another reason."""
        self._process.kill()
        status = self._process.wait()
        messages = []
        while not self.over:
            messages += self.hear(0.0)
        if status not in (0, -signal.SIGKILL):
            raise DiedError(f"the training process ended by itself with status {status}\n{self._last_words()}")
        return messages

    def end(self, status: int = 0) -> None:
        """Wait for a process that is over. Raises DiedError with its log if its status is not `status`."""
        found = self._process.wait()
        if found != status:
            raise DiedError(f"the training process ended with status {found}\n{self._last_words()}")

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self._process.returncode == -signal.SIGKILL

    @property
    def pid(self) -> int:
        return self._process.pid

    def _last_words(self) -> str:
        text = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join([f"the end of its log, {self.log}:", *text[-30:]])

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None, "opened as a pipe"
        self._process.stdout.close()


def _environment(threads: int) -> dict[str, str]:
    """Environment for equal arithmetic in every process, steps that stay fast on a busy machine, and crash traces.

    Otherwise MKL may change its number of threads, and with it the bits. GNU OpenMP's threads spin while they wait;
    beside one busy process on two cores a step took 1 to 9 s with the default, 1.0 s with 10,000 turns, 0.6 s with
    OMP_WAIT_POLICY=PASSIVE; without a busy process 0.33, 0.36 and 0.45 s.
    """
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "MKL_DYNAMIC": "FALSE", "OMP_DYNAMIC": "FALSE",
        "GOMP_SPINCOUNT": "10000", "PYTHONFAULTHANDLER": "1",
    }
