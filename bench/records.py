"""The messages between the benchmark's processes, which `--json` stores. Seconds, bytes; a GB is 10^9 bytes."""

from __future__ import annotations

from collections.abc import Sequence
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
    files, file_bytes  on disk; with several ranks, rank 0 reports them
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
    """One timed load into touched tensors.

    number      1 for the first load of its process, then 2, ...
    how         which of the rival's ways to load
    cold        whether no page of the files was in the page cache, as the kernel reports; None: unknown
    exact       whether every byte of every tensor is the saved one
    device_bytes  read from the device meanwhile, as the kernel reports; None: not requested
    """

    number: int
    how: str
    load_s: float
    cpu_s: float
    extra_peak_bytes: int
    cold: bool | None
    exact: bool
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FioSample:
    """Fio jobs that ran at once, each on a file of its own: their own runtime, which includes the fsync of a write.

    bytes   of all jobs together
    seconds of the slowest
    """

    direction: str  # "write" or "read"
    memory: str  # the memory of fio's buffers, see bench/fio.py
    request_bytes: int
    depth: int
    bytes: int
    seconds: float
    cpu_s: float
    jobs: int = 1

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class Task:
    """A task for a worker process.

    times   how many saves, or loads, in this process
    number  the save that a load is of
    phase   offset in its page at which each tensor of the state starts; None: chosen by the allocator
    ranks   of the job; several ranks share a state of `state_bytes`, and connect at `port`
    gated   whether to ask before every timer, so that several processes start at once
    replicas  whether each rank holds the full state instead of its part of every tensor
    cached  whether a load is of files that are in the page cache instead of files dropped from it
    """

    rival: str
    what: str  # "save" or "load"
    how: str  # of a load
    times: int
    number: int
    shape: str  # "llama" or "small", see bench/state.py
    state_bytes: int
    phase: int | None
    directory: str
    settle_s: float
    rank: int = 0
    ranks: int = 1
    port: int = 0
    gated: bool = False
    replicas: bool = False
    cached: bool = False

    @property
    def part(self) -> tuple[int, int]:
        """The number of this rank's part of the state, and the number of parts."""
        return (0, 1) if self.replicas else (self.rank, self.ranks)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a worker process, or of the ranks of a job together.

    payload_bytes  the state's own; of a rank its equal share, also if each rank holds the full state
    note           how the bytes moved, if the rival reports it
    parts          with several ranks, the results of each
    """

    payload_bytes: int
    saves: tuple[SaveSample, ...] = ()
    loads: tuple[LoadSample, ...] = ()
    note: str = ""
    parts: tuple[Outcome, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """An outcome and the task that it belongs to; `error` if the worker failed."""

    rival: str
    round: int
    outcome: Outcome | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """fio's part of a run: the candidates that determined its settings, and one sample for each round.

    writes, reads              with the best settings of all
    plain_writes, plain_reads  with the best settings for plain memory
    many_writes, many_reads    as many jobs at once as a job of the programme has ranks, together
                               as many bytes; empty if it has no such job
    """

    candidates: tuple[FioSample, ...]
    writes: tuple[FioSample, ...]
    reads: tuple[FioSample, ...]
    plain_writes: tuple[FioSample, ...]
    plain_reads: tuple[FioSample, ...]
    many_writes: tuple[FioSample, ...] = ()
    many_reads: tuple[FioSample, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """All raw numbers of a run.

    rounds  number of completed rounds; a rival may have taken part in fewer
    device  None if fio is not installed
    """

    command: str
    started_utc: str
    machine: dict[str, str]
    layout: str
    state_bytes: int
    rounds: int
    device: Device | None
    measured: tuple[Measured, ...]


def joined(parts: Sequence[Outcome]) -> Outcome:
    """The ranks of a job as one: bytes, files, CPU and memory are summed, and the slowest rank's clock counts."""
    if len(parts) == 1:
        return parts[0]
    saves = tuple(
        SaveSample(
            number=samples[0].number, blocked_s=max(s.blocked_s for s in samples),
            durable_s=max(s.durable_s for s in samples), cpu_s=sum(s.cpu_s for s in samples),
            extra_peak_bytes=sum(s.extra_peak_bytes for s in samples), files=sum(s.files for s in samples),
            file_bytes=sum(s.file_bytes for s in samples),
        )
        for samples in zip(*(part.saves for part in parts), strict=True)
    )
    loads = tuple(
        LoadSample(
            number=samples[0].number, how=samples[0].how, load_s=max(s.load_s for s in samples),
            cpu_s=sum(s.cpu_s for s in samples), extra_peak_bytes=sum(s.extra_peak_bytes for s in samples),
            cold=None if any(s.cold is None for s in samples) else all(s.cold for s in samples),
            exact=all(s.exact for s in samples), device_bytes=sum(s.device_bytes or 0 for s in samples),
        )
        for samples in zip(*(part.loads for part in parts), strict=True)
    )
    return Outcome(sum(part.payload_bytes for part in parts), saves, loads, parts[0].note, tuple(parts))
