"""Flowstone's goals, and whether they are met: a line for each goal that this run has measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench import figures
from bench.figures import Spread
from bench.records import Run
from bench.rivals import ALONE, CONDITIONS, OURS, REPLICAS, SHARED, entry, replica_load

OF_DEVICE, FLOOR_OF_DEVICE = 0.95, 0.90
OF_JOBS = 0.90  # saves, which four ranks agree on and commit once
TIMES_FASTER = (
    ("torchsnapshot", 4.5), ("dcp-async", 7.0), ("torch", 6.0),
    ("torchsnapshot-each", 7.6), ("datastates", 3.9),  # the setting of Gossman et al., 2512.24511
)
THROUGH_DCP, BLOCKED_OF_DCP = (("dcp-1", 4.0), ("dcp-2", 2.5)), 0.1
CPU_IN_PLACE, CPU_THROUGH_ARENA = 0.15, 0.30  # seconds for each GB, digests on
ARENA_BYTES = (256 + 64) << 20  # the budget of "flowstone-arena-256", and other memory that may grow
OF_UNBOUNDED_ARENA, OF_BULK, OF_URING = 0.90, 0.5, 0.90
OF_ALONE = 1.0  # reads that bypass the page cache are shared, which must not be slower
READ_ONCE = 1.02  # of the state's bytes; the rest is index, manifest, objects


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal; `reached` is None if it could not be measured.

    target   at least, or at most
    floor    the least acceptable value of a missed goal
    """

    text: str
    reached: Spread | None
    target: float
    floor: float | None = None
    at_most: bool = False
    digits: int = 2

    @property
    def is_met(self) -> bool:
        if self.reached is None:
            return False
        return self.reached.median <= self.target if self.at_most else self.reached.median >= self.target

    def __str__(self) -> str:
        verdict = "pass" if self.is_met else "miss"
        bound = "at most" if self.at_most else "at least"
        floor = "" if self.floor is None else f" ({self.floor:.{self.digits}f} is tolerated)"
        target = f"{bound} {self.target:.{self.digits}f}{floor}"
        return f"{verdict}  {self.text}: {cell(self.reached, self.digits)}, goal {target}"


def cell(spread: Spread | None, digits: int = 2) -> str:
    """Median (lowest-highest)."""
    if spread is None:
        return "-"
    if spread.low == spread.high:
        return f"{spread.median:.{digits}f}"
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def goals(run: Run) -> tuple[Goal, ...]:
    """In the order of the goals' table. A goal about a row that was not requested is left out."""
    goals = [*_against_device(run), *_against_rivals(run), *_through_dcp(run), *_cpu(run), *_arena(run), *_small(run)]
    return (*goals, *_of_ranks(run), *_of_replicas(run), *_without_uring(run))


def _took_part(run: Run, *names: str) -> bool:
    """Whether all were requested; one that failed was."""
    present = {measured.rival for measured in run.measured}
    return all(name in present for name in names)


def _when() -> Iterator[tuple[bool, str]]:
    yield True, "first save of a process"
    yield False, "later saves"


def _how(name: str) -> str:
    return entry(name).loads[0]


def _against_device(run: Run) -> Iterator[Goal]:
    if not _took_part(run, OURS):
        return
    write, read = figures.device_rates(run, "write"), figures.device_rates(run, "read")
    for first, title in _when():
        reached = figures.ratios(figures.save_rates(run, OURS, first=first), write)
        text = f"durable save, {title}, relative to fio's write rate"
        yield Goal(text, figures.spread(reached), OF_DEVICE, FLOOR_OF_DEVICE)
    reached = figures.ratios(figures.load_rates(run, OURS, _how(OURS)), read)
    text = "cold load into existing tensors, fresh process, relative to fio's read rate"
    yield Goal(text, figures.spread(reached), OF_DEVICE, FLOOR_OF_DEVICE)


def _against_rivals(run: Run) -> Iterator[Goal]:
    for name, expected in TIMES_FASTER:
        if not _took_part(run, OURS, name):
            continue
        for first, title in _when():
            ours, theirs = (figures.save_rates(run, who, first=first) for who in (OURS, name))
            text = f"durable save, {title}, rate relative to {entry(name).title}"
            yield Goal(text, figures.spread(figures.ratios(ours, theirs)), expected, digits=1)


def _through_dcp(run: Run) -> Iterator[Goal]:
    """The gain of dcp.save and dcp.async_save with Flowstone's writer."""
    for name, expected in THROUGH_DCP:
        if _took_part(run, "dcp-flowstone", name):
            ours, theirs = (figures.save_rates(run, who, first=False) for who in ("dcp-flowstone", name))
            text = f"dcp.save through Flowstone, later saves, rate relative to {entry(name).title}"
            yield Goal(text, figures.spread(figures.ratios(ours, theirs)), expected, digits=1)
    if _took_part(run, "dcp-flowstone-async", "dcp-async"):
        theirs, ours = (
            figures.by_round(figures.saves(run, who, first=False), lambda sample: sample.blocked_s)
            for who in ("dcp-async", "dcp-flowstone-async")
        )
        reached = figures.spread(figures.ratios(ours, theirs))
        text = "dcp.async_save through Flowstone, later saves, blocked time relative to DCP's own"
        yield Goal(text, reached, BLOCKED_OF_DCP, at_most=True)


def _cpu(run: Run) -> Iterator[Goal]:
    in_place, arena = "flowstone-in-place", "flowstone-arena"
    if _took_part(run, in_place):
        reached = figures.spread(figures.load_cpu(run, in_place, _how(in_place)))
        text = "CPU-seconds per GB, load into memory that is aligned like the file"
        yield Goal(text, reached, CPU_IN_PLACE, at_most=True)
    if _took_part(run, arena):
        reached = figures.spread(figures.save_cpu(run, arena))
        yield Goal("CPU-seconds per GB, save through the arena, later saves", reached, CPU_THROUGH_ARENA, at_most=True)
        reached = figures.spread(figures.load_cpu(run, arena, _how(arena)))
        text = "CPU-seconds per GB, load into memory that is not aligned like the file"
        yield Goal(text, reached, CPU_THROUGH_ARENA, at_most=True)


def _arena(run: Run) -> Iterator[Goal]:
    bounded, unbounded = "flowstone-arena-256", "flowstone-arena"
    if not _took_part(run, bounded, unbounded):
        return
    rates = [figures.save_rates(run, name, first=False) for name in (bounded, unbounded)]
    text = "arena of 256 MiB, later saves, relative to the rate with an arena as large as the state"
    yield Goal(text, figures.spread(figures.ratios(*rates)), OF_UNBOUNDED_ARENA)
    peaks = [
        peak for first, _ in _when()
        for peak in figures.values(figures.saves(run, bounded, first=first), lambda s: s.extra_peak_bytes / 1e6)
    ]
    text = "arena of 256 MiB, extra peak memory in MB"
    yield Goal(text, figures.spread(peaks), ARENA_BYTES / 1e6, at_most=True, digits=0)


def _small(run: Run) -> Iterator[Goal]:
    name = "flowstone-small"
    if not _took_part(run, name, OURS):
        return
    saves = [figures.save_rates(run, who, first=False) for who in (name, OURS)]
    text = "50,000 tensors of 4 KiB, later saves, relative to the rate with large tensors"
    yield Goal(text, figures.spread(figures.ratios(*saves)), OF_BULK)
    bulk = figures.load_rates(run, OURS, _how(OURS))
    loads = figures.load_rates(run, name, _how(name), first=False)
    text = "50,000 tensors of 4 KiB, second cold load of a process, relative to the rate with large tensors"
    yield Goal(text, figures.spread(figures.ratios(loads, bulk)), OF_BULK)


def _of_ranks(run: Run) -> Iterator[Goal]:
    name = "flowstone-ranks"
    if not _took_part(run, name):
        return
    write, read = figures.many_device_rates(run, "write"), figures.many_device_rates(run, "read")
    for first, title in _when():
        reached = figures.ratios(figures.save_rates(run, name, first=first), write)
        yield Goal(f"one job of four ranks, {title}, relative to four fio jobs", figures.spread(reached), OF_JOBS)
    reached = figures.ratios(figures.load_rates(run, name, _how(name)), read)
    yield Goal("one job of four ranks, cold load, relative to four fio jobs", figures.spread(reached), OF_DEVICE)


def _of_replicas(run: Run) -> Iterator[Goal]:
    if not _took_part(run, REPLICAS):
        return
    own_reads = "loads in which each rank reads for itself"
    text = f"four replicas, {CONDITIONS[0]}: load with reads shared, rate relative to {own_reads}"
    yield Goal(text, figures.spread(sharing_gains(run, CONDITIONS[0])), OF_ALONE)
    cold = replica_load(CONDITIONS[0], SHARED)
    text = f"four replicas, {cold}: bytes read from the device, relative to the state's"
    yield Goal(text, figures.spread(figures.device_shares(run, REPLICAS, cold)), READ_ONCE, at_most=True)


def sharing_gains(run: Run, condition: str) -> list[float]:
    """How many times faster sharing makes a load of replicas, in each round."""
    return figures.ratios(*(figures.load_rates(run, REPLICAS, replica_load(condition, how)) for how in (SHARED, ALONE)))


def _without_uring(run: Run) -> Iterator[Goal]:
    name = "flowstone-posix"
    if not _took_part(run, name, OURS):
        return
    for first, title in _when():
        rates = [figures.save_rates(run, who, first=first) for who in (name, OURS)]
        text = f"io_uring refused, {title}, relative to the rate with io_uring"
        yield Goal(text, figures.spread(figures.ratios(*rates)), OF_URING)
    rates = [figures.load_rates(run, who, _how(who)) for who in (name, OURS)]
    text = "io_uring refused, cold load, relative to the rate with io_uring"
    yield Goal(text, figures.spread(figures.ratios(*rates)), OF_URING)
