"""The tuner: finds the settings that move a store's bytes fastest on its mount, by timed saves and restores.

    pilot, then for each direction:  field -> axes -> sizes -> duel

Crossing all settings would take hours. So request size and queue depth form a field that is halved; then engine,
workers and others are chosen one after the other, also by halving; direct and buffered are compared at each size;
last, the best so far meets the defaults in a duel with new timings, and the defaults stay unless it beats them beyond
the noise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flowstone import _native
from flowstone.config import BLOCK_BYTES, KIB, MIB, READ_ARENA_BYTES, Backend, Direction, Tuning
from flowstone.errors import BudgetError, FullError
from flowstone.store.mount import available_bytes
from flowstone.store.settings import DEFAULTS
from flowstone_study.search import Gain, direct_from, duel, halve, halving_trials
from flowstone_study.site import Site, Where, open_site
from flowstone_study.trials import Tensors, Trials, concrete

BYTES_MIN = 2 * MIB
_PILOT_BYTES = 64 * MIB
_PILOT_BYTES_MIN = 16 * MIB
_SHARE_OF_MEMORY = 4  # tensors and arena take half of that again
_SHARE_OF_DISK = 4  # one file to restore from, one being saved, and the same again as reserve
_PLANNED_SHARE = 0.9  # of the time: settings slower than the defaults take longer
_EDGE_BYTES = 2 * BLOCK_BYTES  # a read request takes whole chunks at any alignment
_SHARES = (0.45, 0.65, 0.85, 1.0)  # of a direction's time: the end of each of its four stages

TimeAt = Callable[[int, Tuning], float]
"""Seconds for a save or restore of that many bytes with these settings."""
OnProgress = Callable[[str, int, int], None]
"""Called with the name of what is being timed, trials done, and trials planned."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of measuring. `repeats` in each round of a halving; `sizes` at which direct and buffered are compared.
    """

    budget_s: float
    bytes_max: int
    request_bytes: tuple[int, ...]
    queue_depths: tuple[int, ...]
    workers: tuple[int, ...]
    sizes: tuple[int, ...]
    repeats: int
    pairs: int


QUICK = Effort(
    budget_s=45, bytes_max=1024 * MIB, request_bytes=(2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB), queue_depths=(4, 16, 64),
    workers=(1, 2, 4), sizes=(MIB, 16 * MIB), repeats=1, pairs=8,
)
FULL = Effort(
    budget_s=270, bytes_max=4096 * MIB, request_bytes=tuple(size * MIB for size in (2, 4, 8, 16, 32)),
    queue_depths=(2, 4, 8, 16, 32, 64, 128), workers=(1, 2, 4, 8),
    sizes=(256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB), repeats=2, pairs=12,
)


@dataclass(frozen=True, slots=True)
class SizeFound:
    """Direct against buffered at one size: `gain` is that of buffered, below 1 if direct is faster."""

    bytes: int
    gain: Gain


@dataclass(frozen=True, slots=True)
class Found:
    """The result for one direction.

    best      the fastest settings
    gain      of `best` over the defaults, in the duel; None if they are equal, or time ran out before it
    kept      settings to use; None: the defaults
    complete  whether no stage was cut short
    """

    direction: Direction
    defaults: Tuning
    best: Tuning
    gain: Gain | None
    kept: Tuning | None
    sizes: tuple[SizeFound, ...]
    complete: bool

    @property
    def verdict(self) -> str:
        """What is kept, and why, as a short text."""
        cut = "" if self.complete else " (time ran out)"
        if self.gain is not None and self.gain.certain:
            return f"the fastest{cut}"
        if self.kept is not None:
            return f"the defaults, buffered where that is faster{cut}"
        return f"the defaults: {'the gain is within the noise' if self.gain else 'nothing was faster'}{cut}"


@dataclass(frozen=True, slots=True)
class TuneReport:
    """bytes: per trial. cold: every restore found its file uncached. stored: where; None in a dry run."""

    path: str
    place: str
    bytes: int
    seconds: float
    direct: bool
    cold: bool
    write: Found
    read: Found
    stored: str | None


def tune(
    path: str | os.PathLike[str],
    *,
    where: Where | None = None,
    total_bytes: int | None = None,
    quick: bool = False,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> TuneReport:
    """Measure the mount of the directory `path`, and store settings that are better than the defaults. Blocks.

    where        "store": tuning.json in the store at `path`, which is created if the directory is empty; "user": the
                 user's file for the mount; None: the store's if `path` is one
    total_bytes  per trial; None: as many as time, memory and disk allow
    quick        in less than a minute, else in less than five

    raises  NotAStoreError  `path` does not exist, or `where` is "store" and it cannot be one
            LockedError     a job saves there, or another tuner is measuring
            FullError, BudgetError  `total_bytes` does not fit
            StorageError    the system refused
    """
    started = time.monotonic()
    effort = QUICK if quick else FULL
    with open_site(Path(path), where) as site:
        trials = Trials(site.scratch)
        try:
            size = _trial_bytes(site, trials, effort, total_bytes)
            write, read = _measure(trials, effort, size, started + effort.budget_s, on_progress)
        finally:
            trials.close()
        stored = None if dry_run else site.put(size, write=write.kept, read=read.kept)
        return TuneReport(
            path=str(path), place=str(site.mount), bytes=size, seconds=time.monotonic() - started,
            direct=trials.direct == "on", cold=trials.cold, write=write, read=read, stored=stored,
        )


def _measure(
    trials: Trials, effort: Effort, size: int, ends: float, on_progress: OnProgress | None
) -> tuple[Found, Found]:
    """Both directions, one after the other, each with half of the remaining time."""
    sizes = (*(at for at in effort.sizes if at <= size // 2), size)
    tensors = {at: Tensors(at) for at in sizes}
    direct = trials.direct == "on"
    smaller = 2 * effort.pairs * (len(sizes) - 1) * direct
    progress = _Progress(sum(_planned(d, effort, size) + smaller for d in DEFAULTS), on_progress)
    search = partial(find_best, sizes=sizes, effort=effort, direct=direct, begin=progress.begin)
    now = time.monotonic()
    saves = progress.counted(lambda at, tuning: trials.save(tensors[at], tuning))
    write = search("write", saves, ends=now + (ends - now) / 2)
    stored = {at: trials.store(tensors[at], DEFAULTS["write"]) for at in sizes}
    restores = progress.counted(lambda at, tuning: trials.restore(stored[at], tuning))
    return write, search("read", restores, ends=ends)


def _trial_bytes(site: Site, trials: Trials, effort: Effort, wanted: int | None) -> int:
    """As requested, or a size with which all trials end in time, from a pilot with the defaults."""
    memory, disk = available_bytes() // _SHARE_OF_MEMORY, site.free_bytes() // _SHARE_OF_DISK
    if wanted is None:
        pilot = min(_PILOT_BYTES, memory, disk)
        wanted = max(_PILOT_BYTES_MIN, min(memory, disk, effort.bytes_max, _affordable(trials, effort, pilot)))
    if wanted < BYTES_MIN:
        raise ValueError(f"{wanted} bytes are too few to measure with: give {BYTES_MIN} at least")
    if wanted > disk:
        raise FullError(
            f"no space to measure with {wanted} bytes", needed=f"{_SHARE_OF_DISK * wanted} bytes",
            free=f"{site.free_bytes()} bytes", next="measure with fewer bytes (--bytes), or free some space",
        )
    if wanted > memory:
        raise BudgetError(
            f"measuring with {wanted} bytes would take too much memory", expected=f"{memory} at most",
            next="measure with fewer bytes (--bytes)",
        )
    return wanted


def _affordable(trials: Trials, effort: Effort, pilot_bytes: int) -> int:
    tensors = Tensors(max(BLOCK_BYTES, pilot_bytes))
    stored = trials.store(tensors, DEFAULTS["write"])
    started = time.monotonic()
    for _ in range(2):
        trials.save(tensors, DEFAULTS["write"])
        trials.restore(stored, DEFAULTS["read"])
    bytes_s = 4 * tensors.bytes / (time.monotonic() - started)
    trials.remove(stored)
    planned = sum(_planned(direction, effort, effort.bytes_max) for direction in DEFAULTS)
    return int(bytes_s * effort.budget_s * _PLANNED_SHARE / planned) // MIB * MIB


def _planned(direction: Direction, effort: Effort, size: int) -> int:
    """Trials of full size; those at smaller sizes count as two more."""
    field = len(_field(DEFAULTS[direction], direction, effort, size))
    axes = [len(axis(DEFAULTS[direction])) for axis in _axes(direction, effort)]
    return sum(halving_trials(count, effort.repeats) for count in (field, *axes)) + 4 * effort.pairs + 2


def _field(defaults: Tuning, direction: Direction, effort: Effort, size: int) -> list[Tuning]:
    """The defaults, and every request size with every depth, except combinations that cannot differ measurably."""
    room = size if direction == "write" else min(size, READ_ARENA_BYTES)
    field = [defaults]
    for request in effort.request_bytes:
        request_bytes = request if direction == "write" else request + _EDGE_BYTES
        field += [
            replace(defaults, request_bytes=request_bytes, queue_depth=depth)
            for depth in effort.queue_depths
            if depth == effort.queue_depths[0] or request * depth <= room  # else the queue is never full
        ]
    return list(dict.fromkeys(field))


def _axes(direction: Direction, effort: Effort) -> list[Callable[[Tuning], list[Tuning]]]:
    """The other settings, in order: engine, workers, and whether reads go straight into the tensors."""
    engines: tuple[Backend, ...] = ("posix", "io_uring") if _native.has_io_uring() else ("posix",)
    workers = [count for count in effort.workers if count <= 2 * len(os.sched_getaffinity(0))]
    axes: list[Callable[[Tuning], list[Tuning]]] = [
        lambda best: [replace(best, backend=backend) for backend in engines],
        lambda best: [replace(best, workers=count) for count in workers],
    ]
    if direction == "read":
        axes.append(lambda best: [replace(best, in_place=in_place) for in_place in (False, True)])
    return axes


def find_best(
    direction: Direction, time_at: TimeAt, sizes: Sequence[int], effort: Effort, *, direct: bool, ends: float,
    begin: Callable[[str], None],
) -> Found:
    """The result for one direction, measured until the monotonic clock reaches `ends`.

    sizes   ascending; the last one is that of a trial
    direct  whether the page cache can be bypassed here
    begin   called with the name of what is timed next
    """
    began, size = time.monotonic(), sizes[-1]
    field_ends, axes_end, sizes_end, duel_ends = (_clock(began + share * (ends - began)) for share in _SHARES)
    time_s = partial(time_at, size)
    defaults = best = concrete(DEFAULTS[direction])
    begin(f"{direction}: request size and depth")
    best = halve(_field(best, direction, effort, size), time_s, repeats=effort.repeats, expired=field_ends)
    complete = not field_ends()
    begin(f"{direction}: engine and workers")
    for axis in _axes(direction, effort):
        field = list(dict.fromkeys([best, *axis(best)]))
        best = halve(field, time_s, repeats=effort.repeats, expired=axes_end)
    complete &= not axes_end()
    begin(f"{direction}: direct or buffered")
    met = {at: _meet(best, partial(time_at, at), effort, sizes_end) if direct else None for at in sizes}
    complete &= not direct or None not in met.values()
    wins = [gain is not None and gain.certain for gain in met.values()]
    best = replace(best, direct_from_bytes=direct_from(sizes, wins))
    begin(f"{direction}: against the defaults")
    same = best.direct_from_bytes is not None and replace(best, direct_from_bytes=0) == defaults
    gain = None if same else duel(defaults, best, time_s, pairs=effort.pairs, expired=duel_ends)
    complete &= same or (gain is not None and gain.pairs == effort.pairs)
    return Found(
        direction=direction, defaults=defaults, best=best, gain=gain, kept=_judge(defaults, best, gain),
        sizes=tuple(SizeFound(at, gain) for at, gain in met.items() if gain is not None), complete=complete,
    )


def _meet(best: Tuning, time_s: Callable[[Tuning], float], effort: Effort, expired: Callable[[], bool]) -> Gain | None:
    """Buffered against direct."""
    return duel(best, replace(best, direct_from_bytes=None), time_s, pairs=effort.pairs, expired=expired)


def _judge(defaults: Tuning, best: Tuning, gain: Gain | None) -> Tuning | None:
    """The settings worth keeping: all of `best`, or only the size from which writes bypass the page cache."""
    kept = defaults
    if gain is not None and gain.certain:
        kept = best
    elif best.direct_from_bytes is not None:  # else the duel itself was inconclusive
        kept = replace(defaults, direct_from_bytes=best.direct_from_bytes)
    if kept == defaults:
        return None
    # Keep "auto" if it selects this engine anyway: then it still works if io_uring is refused one day.
    return replace(kept, backend="auto") if kept.backend == defaults.backend else kept


def _clock(ends: float) -> Callable[[], bool]:
    return lambda: time.monotonic() >= ends


class _Progress:
    """Counts trials, and reports them."""

    def __init__(self, planned: int, tell: OnProgress | None) -> None:
        self._planned, self._tell = planned, tell
        self._what, self._done = "", 0

    def begin(self, what: str) -> None:
        self._what = what

    def counted(self, time_at: TimeAt) -> TimeAt:
        def timed(size: int, tuning: Tuning) -> float:
            if self._tell is not None:
                self._tell(self._what, self._done, max(self._planned, self._done + 1))
            self._done += 1
            return time_at(size, tuning)

        return timed
