"""A process with a time limit, which ends with all its children."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Done:
    """The output of a process until its end. `status` None: it was still running at its limit, and was ended."""

    status: int | None
    out: str
    error: str


def run(
    command: Sequence[str], limit_s: float, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Done:
    """Run a command for at most `limit_s`; returns its output."""
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, error = process.communicate(timeout=limit_s)
            return Done(process.returncode, out, error)
        except subprocess.TimeoutExpired:
            _end(process)
            return Done(None, *process.communicate())
        except BaseException:  # the stage was ended: this process, in a session of its own, would outlive it
            _end(process)
            raise


def _end(process: subprocess.Popen[str]) -> None:
    """Kill its children too, since they hold the pipes, and perhaps the GPU."""
    os.killpg(process.pid, signal.SIGKILL)
