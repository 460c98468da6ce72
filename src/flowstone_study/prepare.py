"""Make a plan from the user's settings, and a study from samples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from flowstone._version import __version__
from flowstone.config import GIB
from flowstone.errors import StorageError
from flowstone_study import machine
from flowstone_study.campaign import suit_bytes
from flowstone_study.planning import Plan, base_cell, full_scope, plan, quick_scope
from flowstone_study.probe import probe
from flowstone_study.records import MixName, Probe, Sample, Study

FULL_BYTES = 1 * GIB
ROUNDS = 3
QUICK_LIMIT_S = 100.0  # seconds for measuring; with start-up and the last cell, a quick study ends within two minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The user's settings.

    bytes   how many bytes a cell moves, in all processes together. None: 1 GiB, or, in a quick study, a size that suits
            the device
    rounds  number of rounds. None: 3, or, in a quick study, as many as its time allows
    """

    quick: bool
    bytes: int | None
    processes: int
    mixes: tuple[MixName, ...]
    rounds: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The plan of a study, and facts from before the measurements. `began_s` is on the monotonic clock."""

    path: Path
    settings: Settings
    probe: Probe
    plan: Plan
    rounds: int
    limit_s: float
    started: str
    began_s: float


def prepare(path: Path, settings: Settings) -> Prepared:
    """Find out which I/O methods work in the directory `path`, and make a plan. Raises StorageError if the directory is
    not writable.
    """
    began_s, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    works = probe_at(path)
    size = settings.bytes
    if size is None:
        size = suit_bytes(path, base_cell(works, FULL_BYTES)) if settings.quick else FULL_BYTES
    scope = (quick_scope if settings.quick else full_scope)(size, settings.processes, settings.mixes)
    return Prepared(
        path=path, settings=settings, probe=works, plan=plan(base_cell(works, size), scope),
        rounds=settings.rounds or ROUNDS, limit_s=QUICK_LIMIT_S if settings.quick else inf, started=started,
        began_s=began_s,
    )


def probe_at(path: Path) -> Probe:
    """Find out which I/O methods work in the directory `path`. Raises StorageError if the directory is not writable."""
    try:
        return probe(path)
    except OSError as error:
        raise StorageError(
            f"cannot write at {path}: {error.strerror}", errno=error.errno or 0,
            next="give a directory that exists and that you may write to",
        ) from error


def finish(prepared: Prepared, samples: Sequence[Sample]) -> Study:
    return Study(
        flowstone=__version__, path=str(prepared.path.absolute()), started=prepared.started,
        seconds=time.monotonic() - prepared.began_s, machine=machine.describe(prepared.path), probe=prepared.probe,
        quick=prepared.settings.quick, rounds=prepared.rounds, bytes=prepared.plan.base.bytes, samples=tuple(samples),
    )
