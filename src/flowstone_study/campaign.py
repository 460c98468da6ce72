"""Measure cells (combinations of settings) in a directory, one after the other, in several rounds."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path

from flowstone.config import MIB
from flowstone.errors import BudgetError, FullError
from flowstone_study.cache import drop_cached
from flowstone_study.machine import available_bytes
from flowstone_study.placing import files, payload_bytes
from flowstone_study.planning import fill_cell
from flowstone_study.processes import Outcome, Processes
from flowstone_study.records import Cell, Sample
from flowstone_study.worker import Failed

SCRATCH_PREFIX = ".flowstone-study-"
_SUITABLE_S = 0.1  # seconds that the base cell of a quick study should take on this device, with its best settings
_SUITABLE_BYTES = (32 * MIB, 256 * MIB)
_SUITABLE_TRIES = 3  # the fastest attempt counts, as other users of the device can only slow it down


def measure(
    path: Path, cells: Sequence[Cell], base: Cell, *, rounds: int, limit_s: float = inf
) -> Generator[Sample, None, None]:
    """Yields `rounds` samples of each cell. Each round measures all cells, in another order.

    The order is random because devices serve the first cells faster (burst credits, empty caches). The seed is the
    number of the round, so that all studies have the same orders.

    base     the settings with which the files for restores are written
    limit_s  no cell is started after so many seconds. A cell that was not reached in the first round yields a Sample
             with an error

    A cell that cannot run on this machine yields a Sample with the error. All files are in a new directory in `path`,
    which is removed at the end, also after an error, Ctrl-C or `close`. Raises FullError or BudgetError if disk or
    memory is too small for the largest cell, and OSError if `path` is not writable.
    """
    _check_room(path, max(cell.bytes for cell in cells))
    end_s = time.monotonic() + limit_s
    with _scratch(path) as scratch, Processes() as processes:
        for number in range(1, rounds + 1):
            for group in _groups(cells, random.Random(number)):
                reached = 0
                for sample in _measure_group(processes, scratch, group, base, number, end_s):
                    reached += 1
                    yield sample
                if number == 1:
                    reason = f"not reached within {limit_s} s"
                    yield from (Sample(cell=cell, round=number, error=reason) for cell in group[reached:])


def suit_bytes(path: Path, base: Cell) -> int:
    """How many bytes this device writes in about 0.1 s, as a power of two from 32 to 256 MiB."""
    low, high = _SUITABLE_BYTES
    probe = replace(base, bytes=low)
    seconds = [s.seconds for s in measure(path, [probe], probe, rounds=_SUITABLE_TRIES) if s.seconds is not None]
    size = low
    while seconds and size < high and size * 2 <= low / min(seconds) * _SUITABLE_S:
        size *= 2
    return size


def _groups(cells: Sequence[Cell], order: random.Random) -> list[list[Cell]]:
    """Group the cells. Each write is a group of its own; restores of the same files form a group, so that the files are
    written only once.
    """
    groups: dict[object, list[Cell]] = {}
    for cell in order.sample(cells, len(cells)):
        places = (cell.layout, cell.mix, cell.processes, cell.bytes, cell.chunk_bytes)
        groups.setdefault(cell if cell.direction == "write" else places, []).append(cell)
    return order.sample(list(groups.values()), len(groups))


def _measure_group(
    processes: Processes, scratch: Path, group: Sequence[Cell], base: Cell, number: int, end_s: float
) -> Iterator[Sample]:
    """Samples of the group's cells, in order, until the time `end_s`."""
    try:
        if group[0].direction == "restore" and time.monotonic() < end_s:
            written = _run(processes, scratch, fill_cell(group[0], base), number)
            if written.error is not None:
                reason = f"no files to restore: {written.error}"
                yield from (Sample(cell=cell, round=number, error=reason) for cell in group)
                return
        for cell in group:
            if time.monotonic() >= end_s:
                return
            yield _run(processes, scratch, cell, number)
    finally:
        _empty(scratch)


def _run(processes: Processes, scratch: Path, cell: Cell, number: int) -> Sample:
    failed = processes.prepare(cell, scratch)
    if failed is not None:
        return Sample(cell=cell, round=number, error=failed.reason)
    names = files(cell)
    cold = drop_cached(scratch / name for name in names) if cell.direction == "restore" else None
    outcome = processes.run()
    if isinstance(outcome, Failed):
        return Sample(cell=cell, round=number, error=outcome.reason)
    return _sample(cell, number, outcome, len(names), cold)


def _sample(cell: Cell, number: int, outcome: Outcome, file_count: int, cold: bool | None) -> Sample:
    gb = payload_bytes(cell) / 1e9
    return Sample(
        cell=cell, round=number, seconds=outcome.seconds, gb_per_s=gb / outcome.seconds,
        cpu_s_per_gb=outcome.cpu_s / gb, requests=outcome.requests, files=file_count, cold=cold, engine=cell.engine,
    )


def _empty(scratch: Path) -> None:
    """Remove all files, and sync, so that the file system has finished this work before the next measurement."""
    for path in scratch.iterdir():
        path.unlink()
    fd = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_room(path: Path, cell_bytes: int) -> None:
    disk = shutil.disk_usage(path)
    if disk.total and cell_bytes * 2 > disk.free:  # a file system in memory may report no size
        raise FullError(
            f"a study with {cell_bytes:,} bytes per cell needs twice that on disk", path=path, free_bytes=disk.free,
            next="give a smaller --bytes, or another path",
        )
    available = available_bytes()
    if cell_bytes * 2 > available:
        raise BudgetError(
            f"a study with {cell_bytes:,} bytes per cell needs twice that memory, half of it for the page cache",
            available_bytes=available, next="give a smaller --bytes",
        )


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=path))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)
