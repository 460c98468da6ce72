"""What the benchmark's processes tell each other, and what `--json` holds. Seconds, bytes; a GB is 10^9 bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveSample:
    """One timed save. The timer stops when every file and its directory have been synced.

    number      1 for the first save of its process, then 2, ...
    blocked_s   until the state may change again
    durable_s   until the checkpoint survives a power loss
    cpu_s       of all threads and children, user and system, until durable
    extra_peak_bytes  the highest resident memory during the save, above that of the process before
                      its first save (state built, everything imported)
    files, file_bytes  what lies on disk
    """

    number: int
    blocked_s: float
    durable_s: float
    cpu_s: float
    extra_peak_bytes: int
    files: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One timed load, in a fresh process, of files that are not in the page cache, into touched tensors.

    how         which of the rival's ways to load
    cold        whether the kernel confirmed that no page of the files was cached; None: it could not say
    exact       whether every byte of every tensor is what was saved
    """

    how: str
    load_s: float
    cpu_s: float
    extra_peak_bytes: int
    cold: bool | None
    exact: bool


@dataclass(frozen=True, slots=True)
class FioSample:
    """One fio job: its own runtime, which contains the fsync of a write."""

    direction: str  # "write" or "read"
    memory: str  # where fio's buffers lie, see bench/fio.py
    request_bytes: int
    depth: int
    bytes: int
    seconds: float
    cpu_s: float

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker process is to do."""

    rival: str
    what: str  # "save" or "load"
    how: str  # of a load
    saves: int
    state_bytes: int
    directory: str
    settle_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker process did. `payload_bytes` are the state's own."""

    payload_bytes: int
    saves: tuple[SaveSample, ...] = ()
    loads: tuple[LoadSample, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """An outcome and where it belongs; `error` where the worker failed."""

    rival: str
    round: int
    outcome: Outcome | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """fio's part of a run: the candidates that chose its settings, and one sample for each round.

    writes, reads              with the best settings of all
    plain_writes, plain_reads  with the best settings for plain memory
    """

    candidates: tuple[FioSample, ...]
    writes: tuple[FioSample, ...]
    reads: tuple[FioSample, ...]
    plain_writes: tuple[FioSample, ...]
    plain_reads: tuple[FioSample, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Every raw number of a run. `device` is None where fio is not installed."""

    command: str
    started_utc: str
    machine: dict[str, str]
    layout: str
    state_bytes: int
    rounds: int
    device: Device | None
    measured: tuple[Measured, ...]
