"""A training process, for the supervisor: starts it, reads its messages, and kills it."""

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

SILENCE_MAX_S = 120.0  # seconds without a message; starting a process on a busy machine takes a tenth of that


class DiedError(Exception):
    """A training process ended, or stopped sending messages, although the demo did not kill it."""


class ChildProcess:
    """One training process. Its messages arrive through a pipe; its standard error is written to the file `log`.

    place  for one of several ranks: the environment variables with its rank

    Use it in a `with` statement, at the end of which the process is ended. Not thread-safe.
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

    def receive(self, timeout_s: float) -> list[Message]:
        """The messages that have arrived. Waits at most `timeout_s` for the first one. Raises DiedError if the process
        has sent nothing for SILENCE_MAX_S.
        """
        if not self._open or not select.select([self], [], [], timeout_s)[0]:
            if self._open and time.monotonic() - self._heard > SILENCE_MAX_S:
                raise DiedError(f"the training process printed nothing for {SILENCE_MAX_S:.0f} s\n{self._last_words()}")
            return []
        part = os.read(self.fileno(), 1 << 16)
        self._open, self._heard = bool(part), time.monotonic()
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [decode(line) for line in lines]

    def fileno(self) -> int:
        """The descriptor of the pipe, with which several processes can be awaited at once."""
        assert self._process.stdout is not None, "opened as a pipe"
        return self._process.stdout.fileno()

    @property
    def over(self) -> bool:
        """Whether the process has closed its end of the pipe, and all of its messages were read."""
        return not self._open

    def kill(self) -> list[Message]:
        """Send SIGKILL. Returns the messages that were sent before. Raises DiedError if the process ended for another
        reason.
        """
        self._process.kill()
        status = self._process.wait()
        messages = []
        while not self.over:
            messages += self.receive(0.0)
        if status not in (0, -signal.SIGKILL):
            raise DiedError(f"the training process ended by itself with status {status}\n{self._last_words()}")
        return messages

    def end(self, status: int = 0) -> None:
        """Wait for a process that has closed the pipe. Raises DiedError, with the process' log, if its exit status is
        not `status`.
        """
        actual = self._process.wait()
        if actual != status:
            raise DiedError(f"the training process ended with status {actual}\n{self._last_words()}")

    @property
    def killed(self) -> bool:
        """Whether SIGKILL has ended the process."""
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
    """Environment variables for bit-identical arithmetic in every process, fast steps on a busy machine, and tracebacks
    of crashes.

    MKL could otherwise change its number of threads, and so the bits. The threads of GNU OpenMP spin while they wait.
    Measured on two cores beside one busy process, a step took 1 to 9 s by default, 1.0 s with 10,000 spins, and 0.6 s
    with OMP_WAIT_POLICY=PASSIVE. Without the busy process, it took 0.33, 0.36 and 0.45 s.
    """
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "MKL_DYNAMIC": "FALSE", "OMP_DYNAMIC": "FALSE",
        "GOMP_SPINCOUNT": "10000", "PYTHONFAULTHANDLER": "1",
    }
