"""Find out which I/O methods work in a directory, by trying each with real memory and a real file."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

import numpy as np

from flowstone._native import File, probe_direct, run_requests
from flowstone.config import MIB
from flowstone_study.machine import file_system, kernel
from flowstone_study.memory import Run
from flowstone_study.records import Probe

REGISTERED_BYTES = 64 * MIB  # sixteen requests of 4 MiB: a queue of that depth pins so many bytes
_REQUESTS = 16


def probe(directory: Path) -> Probe:
    """Find out which I/O methods work in `directory`, by writes to an unnamed file of 64 MiB. Raises OSError if the
    directory is not writable.
    """
    run = Run(REGISTERED_BYTES, huge_pages=False)
    ring = _refusal(directory, run, register=False)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Probe(
        file_system=file_system(directory), kernel=kernel(), io_uring_error=ring,
        direct_alignment=probe_direct(str(directory)), registered_bytes=REGISTERED_BYTES,
        registered_error=ring or _refusal(directory, run, register=True),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def _refusal(directory: Path, run: Run, *, register: bool) -> str | None:
    """Why io_uring cannot write from this memory; None if it can."""
    length = np.full(_REQUESTS, REGISTERED_BYTES // _REQUESTS, dtype=np.uint64)
    offset = np.arange(_REQUESTS, dtype=np.uint64) * length
    with tempfile.TemporaryFile(dir=directory) as scratch:
        file = File(fd=scratch.fileno(), path=str(directory), alignment=1)
        try:
            fault = run_requests(
                backend="io_uring", direction="write", queue_depth=_REQUESTS, files=[file],
                columns=(np.zeros(_REQUESTS, dtype=np.uint32), offset, offset + np.uint64(run.address), length),
                register=register,
            )
        except OSError as error:
            return error.strerror or str(error)
    return None if fault is None else os.strerror(fault.errno)
