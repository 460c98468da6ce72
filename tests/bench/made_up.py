"""Synthetic runs for tests of the arithmetic, and tasks for real workers."""

from __future__ import annotations

from pathlib import Path

from bench import fio
from bench.records import Device, FioSample, LoadSample, Measured, Outcome, Run, SaveSample, Task, joined
from bench.rivals import ALONE, CACHED, CONDITIONS, REPLICAS, SHARED, Entry, replica_load

GB = 1_000_000_000


def save(number: int, durable_s: float, blocked_s: float = 0.5, peak_bytes: int = 3_000_000) -> SaveSample:
    return SaveSample(number, blocked_s, durable_s, cpu_s=0.2, extra_peak_bytes=peak_bytes, files=4, file_bytes=2 * GB)


def load(
    load_s: float, *, number: int = 1, exact: bool = True, how: str = "Checkpointer.load", device_bytes: int = 2 * GB
) -> LoadSample:
    cold = not how.startswith(CACHED)
    return LoadSample(number, how, load_s, 0.1, extra_peak_bytes=0, cold=cold, exact=exact, device_bytes=device_bytes)


def replicas() -> Run:
    """One round of two ranks: reads shared are twice as fast where nothing is cached, and half as fast elsewhere."""
    loaded = []
    for condition in CONDITIONS:
        seconds = {SHARED: 1.0, ALONE: 2.0 if condition == CONDITIONS[0] else 0.5}
        for how, load_s in seconds.items():
            device_bytes = GB if how == SHARED else 2 * GB
            ranks = [load(load_s, how=replica_load(condition, how), device_bytes=device_bytes)] * 2
            loaded.append(Measured(REPLICAS, 1, joined([Outcome(GB, loads=(rank,)) for rank in ranks])))
    return run(loaded, rounds=1)


def device(direction: str, seconds: float, jobs: int = 1) -> FioSample:
    return FioSample(direction, fio.PLAIN, 4 << 20, 16, 2 * GB, seconds, cpu_s=0.2, jobs=jobs)


def devices(writes: tuple[float, ...], jobs: int = 1) -> Device:
    """Reads take as long as writes; several jobs at once as long as one."""
    entry = [tuple(device(way, seconds) for seconds in writes) for way in ("write", "read")]
    many = [tuple(device(way, seconds, jobs) for seconds in writes) for way in ("write", "read")] if jobs > 1 else []
    return Device((), *entry, *entry, *many)


def run(measured: list[Measured], rounds: int = 2, devices: Device | None = None) -> Run:
    return Run("bench", "2026-01-01", {"CPU": "x"}, "Llama", 2 * GB, rounds, devices, tuple(measured))


def two_rounds() -> Run:
    """The device is twice as slow in the second, and so are all savers."""
    measured = []
    for position, slow in ((1, 1.0), (2, 2.0)):
        ours = (save(1, 2.0 * slow), save(2, 1.25 * slow), save(3, 1.25 * slow))
        measured += [
            Measured("flowstone", position, Outcome(2 * GB, saves=ours)),
            Measured("flowstone", position, Outcome(2 * GB, loads=(load(1.0 * slow),))),
            Measured("torch", position, Outcome(2 * GB, saves=(save(1, 8.0 * slow, 8.0 * slow), save(2, 5.0 * slow)))),
        ]
    measured.append(Measured("dcp-1", 1, None, "save: OSError: no space"))
    measured.append(Measured("dcp-2", 1, Outcome(2 * GB, saves=(save(1, 4.0), save(2, 4.0)))))
    return run(measured, devices=devices((1.0, 2.0)))


def task(
    entry: Entry, verb: str, how: str, directory: Path, state_bytes: int = 1_500_000, rank: int = 0
) -> Task:
    return Task(
        rival=entry.name, what=verb, how=how, times=2, number=2, shape=entry.shape, state_bytes=state_bytes,
        phase=entry.phases[verb == "load"], directory=str(directory), settle_s=0.0,
        rank=rank, ranks=entry.ranks, gated=entry.ranks > 1, replicas=entry.replicas, cached=how.startswith(CACHED),
    )
