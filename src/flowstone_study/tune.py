"""The tuner: find the fastest I/O settings for a store on its mount, by timed saves and restores.

    pilot, then for each direction:  field -> axes -> sizes -> duel

Measuring all combinations would take hours. So the best combination of request size and queue depth is found by
successive halving. Then engine, workers and other settings are chosen one after the other, also by halving. O_DIRECT
and the page cache are compared at several sizes of saves. At last, a duel with new measurements compares the best
settings with the defaults. The defaults stay unless the gain is certainly not noise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from flowstone._native import has_io_uring
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
# a trial may have this fraction (1/4) of the memory in bytes: its tensors and arena take 1.5 times its bytes
_SHARE_OF_MEMORY = 4
# a trial may have 1/4 of the disk: a file to restore from, one that is being saved, and the same again as reserve
_SHARE_OF_DISK = 4
# fraction of the time for which trials are planned, as settings that are slower than the defaults take longer
_PLANNED_SHARE = 0.9
_EDGE_BYTES = 2 * BLOCK_BYTES  # a read request consists of full chunks, which may begin at any alignment
_SHARES = (0.45, 0.65, 0.85, 1.0)  # where each of the four stages ends, as a fraction of a direction's time

TimeAt = Callable[[int, Tuning], float]
"""Returns the seconds for a save or restore of the given bytes with the given settings."""
OnProgress = Callable[[str, int, int], None]
"""Called with the name of the current stage, trials done, and trials planned."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. `repeats`: measurements in each round of a halving. `sizes`: at which O_DIRECT and the page
    cache are compared.
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
    """O_DIRECT compared with the page cache at one size. `gain`: how many times faster the page cache is; below 1 if
    O_DIRECT is faster.
    """

    bytes: int
    gain: Gain


@dataclass(frozen=True, slots=True)
class Found:
    """The result for writes, or for reads.

    best      the fastest settings
    gain      how many times faster `best` is than the defaults, from the duel. None if these are equal, or the time was
              over before the duel
    kept      the settings that are stored; None: the defaults are used
    complete  whether all stages were finished in time
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
        """A short text that says which settings are used, and why."""
        cut = "" if self.complete else " (time ran out)"
        if self.gain is not None and self.gain.certain:
            return f"the fastest{cut}"
        if self.kept is not None:
            return f"the defaults, buffered where that is faster{cut}"
        return f"the defaults: {'the gain is within the noise' if self.gain else 'nothing was faster'}{cut}"


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The report of a tuning.

    bytes   bytes of each trial
    cold    whether no restored file was in the page cache
    stored  path of the stored result; None in a dry run
    """

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

    where        "store": store the result in tuning.json in the store at `path`, which is created if the directory is
                 empty. "user": store it in the user's file for the mount. None: "store" if `path` is a store, else
                 "user"
    total_bytes  how many bytes each trial saves or restores; None: as many as time, memory and disk allow
    quick        take less than one minute, instead of less than five minutes

    raises  NotAStoreError  `path` does not exist, or `where` is "store" and `path` cannot be a store
            LockedError     a job saves to the store, or another tuner is measuring
            FullError, BudgetError  `total_bytes` does not fit on the disk, or in memory
            StorageError    the system has refused an operation
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
    """The results for writes and for reads. They are measured one after the other; each gets half of the time that is
    left.
    """
    sizes = (*(count for count in effort.sizes if count <= size // 2), size)
    tensors = {count: Tensors(count) for count in sizes}
    direct = trials.direct == "on"
    smaller = 2 * effort.pairs * (len(sizes) - 1) * direct
    progress = _Progress(sum(_planned(d, effort, size) + smaller for d in DEFAULTS), on_progress)
    search = partial(find_best, sizes=sizes, effort=effort, direct=direct, begin=progress.begin)
    now = time.monotonic()
    saves = progress.counted(lambda size_bytes, tuning: trials.save(tensors[size_bytes], tuning))
    write = search("write", saves, ends=now + (ends - now) / 2)
    stored = {count: trials.store(tensors[count], DEFAULTS["write"]) for count in sizes}
    restores = progress.counted(lambda size_bytes, tuning: trials.restore(stored[size_bytes], tuning))
    return write, search("read", restores, ends=ends)


def _trial_bytes(site: Site, trials: Trials, effort: Effort, requested: int | None) -> int:
    """The size of a trial in bytes: the requested one, or one with which all trials end in time. To find the latter, a
    first trial is made with the defaults.
    """
    memory, disk = available_bytes() // _SHARE_OF_MEMORY, site.free_bytes() // _SHARE_OF_DISK
    if requested is None:
        pilot = min(_PILOT_BYTES, memory, disk)
        requested = max(_PILOT_BYTES_MIN, min(memory, disk, effort.bytes_max, _affordable(trials, effort, pilot)))
    if requested < BYTES_MIN:
        raise ValueError(f"{requested} bytes are too few to measure with: give at least {BYTES_MIN}")
    if requested > disk:
        raise FullError(
            f"no space to measure with {requested} bytes", needed=f"{_SHARE_OF_DISK * requested} bytes",
            free=f"{site.free_bytes()} bytes", next="measure with fewer bytes (--bytes), or free some space",
        )
    if requested > memory:
        raise BudgetError(
            f"measuring with {requested} bytes would take too much memory", expected=f"{memory} at most",
            next="measure with fewer bytes (--bytes)",
        )
    return requested


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
    """How many trials of full size one direction needs. All trials of smaller sizes together count as two."""
    field = len(_field(DEFAULTS[direction], direction, effort, size))
    axes = [len(axis(DEFAULTS[direction])) for axis in _axes(direction, effort)]
    return sum(halving_trials(count, effort.repeats) for count in (field, *axes)) + 4 * effort.pairs + 2


def _field(defaults: Tuning, direction: Direction, effort: Effort, size: int) -> list[Tuning]:
    """The candidates: the defaults, and every request size with every queue depth, except combinations that cannot
    differ measurably.
    """
    queue_bytes = size if direction == "write" else min(size, READ_ARENA_BYTES)
    field = [defaults]
    for request in effort.request_bytes:
        request_bytes = request if direction == "write" else request + _EDGE_BYTES
        field += [
            replace(defaults, request_bytes=request_bytes, queue_depth=depth)
            for depth in effort.queue_depths
            if depth == effort.queue_depths[0] or request * depth <= queue_bytes  # otherwise the queue is never full
        ]
    return list(dict.fromkeys(field))


def _axes(direction: Direction, effort: Effort) -> list[Callable[[Tuning], list[Tuning]]]:
    """The other settings, in the order in which they are chosen: engine, workers, and, for reads, in place or through
    the arena. Each function returns the candidates.
    """
    engines: tuple[Backend, ...] = ("posix", "io_uring") if has_io_uring() else ("posix",)
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
    """Find the best settings for one direction. Measures until the monotonic clock reaches `ends`.

    sizes   sizes in bytes, ascending; the last one is the size of a trial
    direct  whether O_DIRECT works here
    begin   called with the name of the next stage
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
    met = {
        count: _time_buffered(best, partial(time_at, count), effort, sizes_end) if direct else None for count in sizes
    }
    complete &= not direct or None not in met.values()
    wins = [gain is not None and gain.certain for gain in met.values()]
    best = replace(best, direct_from_bytes=direct_from(sizes, wins))
    begin(f"{direction}: against the defaults")
    same = best.direct_from_bytes is not None and replace(best, direct_from_bytes=0) == defaults
    gain = None if same else duel(defaults, best, time_s, pairs=effort.pairs, expired=duel_ends)
    complete &= same or (gain is not None and gain.pairs == effort.pairs)
    return Found(
        direction=direction, defaults=defaults, best=best, gain=gain, kept=_judge(defaults, best, gain),
        sizes=tuple(SizeFound(count, gain) for count, gain in met.items() if gain is not None), complete=complete,
    )


def _time_buffered(
    best: Tuning, time_s: Callable[[Tuning], float], effort: Effort, expired: Callable[[], bool]
) -> Gain | None:
    """How many times faster I/O through the page cache is than with O_DIRECT. None if it cannot be measured."""
    return duel(best, replace(best, direct_from_bytes=None), time_s, pairs=effort.pairs, expired=expired)


def _judge(defaults: Tuning, best: Tuning, gain: Gain | None) -> Tuning | None:
    """The settings to store. These are `best`, or only its size from which writes use O_DIRECT; None: the defaults are
    used.
    """
    chosen = defaults
    if gain is not None and gain.certain:
        chosen = best
    elif best.direct_from_bytes is not None:  # without that size, the comparison was inconclusive
        chosen = replace(defaults, direct_from_bytes=best.direct_from_bytes)
    if chosen == defaults:
        return None
    # "auto" stays if it selects this engine anyway, since "auto" still works if the system refuses io_uring later.
    return replace(chosen, backend="auto") if chosen.backend == defaults.backend else chosen


def _clock(ends: float) -> Callable[[], bool]:
    return lambda: time.monotonic() >= ends


class _Progress:
    """Counts trials, and reports their number."""

    def __init__(self, planned: int, tell: OnProgress | None) -> None:
        self._planned, self._tell = planned, tell
        self._what, self._done = "", 0

    def begin(self, stage: str) -> None:
        self._what = stage

    def counted(self, time_at: TimeAt) -> TimeAt:
        def timed(size: int, tuning: Tuning) -> float:
            if self._tell is not None:
                self._tell(self._what, self._done, max(self._planned, self._done + 1))
            self._done += 1
            return time_at(size, tuning)

        return timed
