"""Measurements and their inputs: frozen records, and text for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from flowstone.config import BLOCK_BYTES, KIB, MIB

Direction = Literal["write", "restore"]
Layout = Literal["tensor", "chunk", "rank", "pair", "shared"]
EngineName = Literal["io_uring", "posix", "sync"]
Memory = Literal["fresh", "reused", "registered"]
MixName = Literal["synthetic", "3B", "7B", "13B"]

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
MEMORIES: tuple[Memory, ...] = get_args(Memory)
MIXES: tuple[MixName, ...] = get_args(MixName)

LAYOUT_LABELS: Mapping[Layout, str] = {
    "tensor": "file per tensor", "chunk": "file per chunk", "rank": "file per rank",
    "pair": "two ranks per file", "shared": "one shared file",
}
ENGINE_LABELS: Mapping[EngineName, str] = {"io_uring": "io_uring", "posix": "POSIX threads", "sync": "synchronous"}

PROCESSES_MAX = 4
REQUEST_BYTES_MIN, REQUEST_BYTES_MAX = 4 * KIB, 64 * MIB
QUEUE_DEPTH_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of all varied settings.

    coalesced      requests span tensors; otherwise each request has bytes of one tensor only
    direct         O_DIRECT; otherwise through the page cache
    queue_depth    requests in flight: of the ring, or threads of `posix`; 1 for `sync`
    memory         fresh: mapped for this run, its pages untouched before the timer starts (a write fills them inside
                   the timer, as staging into new memory does); reused: touched before; registered: also pinned
                   with the ring, inside the timer
    huge_pages     the memory asks for transparent huge pages (madvise)
    reserved       a written file gets its blocks (fallocate) first, inside the timer; always true for restores
    bytes          requested, of all processes; the mix's real total differs by at most a block per tensor
    chunk_bytes    the longest file of layout `chunk`; 0 in every other layout
    """

    direction: Direction
    layout: Layout = "rank"
    coalesced: bool = True
    direct: bool = True
    engine: EngineName = "io_uring"
    request_bytes: int = 4 * MIB
    queue_depth: int = 16
    memory: Memory = "reused"
    huge_pages: bool = True
    reserved: bool = True
    processes: int = 1
    mix: MixName = "synthetic"
    bytes: int = 128 * MIB
    chunk_bytes: int = 0

    def __post_init__(self) -> None:
        for value, known in (
            (self.direction, DIRECTIONS), (self.layout, LAYOUTS), (self.engine, ENGINES), (self.memory, MEMORIES),
            (self.mix, MIXES),
        ):
            if value not in known:
                raise ValueError(f"{value!r} is not one of {known}")
        if self.request_bytes % BLOCK_BYTES or not REQUEST_BYTES_MIN <= self.request_bytes <= REQUEST_BYTES_MAX:
            raise ValueError(f"request_bytes {self.request_bytes} is not a multiple of 4096 within 4 KiB..64 MiB")
        if not 1 <= self.queue_depth <= QUEUE_DEPTH_MAX or not 1 <= self.processes <= PROCESSES_MAX:
            raise ValueError(f"queue_depth {self.queue_depth} or processes {self.processes} is out of range")
        if self.chunk_bytes % BLOCK_BYTES or (self.chunk_bytes > 0) != (self.layout == "chunk"):
            raise ValueError(f"chunk_bytes {self.chunk_bytes} does not suit layout {self.layout!r}")
        if self.bytes < self.processes * BLOCK_BYTES:
            raise ValueError(f"{self.bytes} bytes are less than a block for each of {self.processes} processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of one cell. Either everything is measured, or `error` has the reason why nothing is.

    seconds        from the start barrier until the last process is done: open, reserve, requests, fsync of files and
                   directory, close
    gb_per_s       tensors' bytes (not padding) over seconds, in 10^9
    cpu_s_per_gb   user and system time of all processes; without kernel threads that write back
    cold           restores: whether the kernel says that no page of the files was cached when the timer started (None:
                   it cannot tell); None for writes
    engine         that moved the requests
    """

    cell: Cell
    round: int
    seconds: float | None = None
    gb_per_s: float | None = None
    cpu_s_per_gb: float | None = None
    requests: int | None = None
    files: int | None = None
    cold: bool | None = None
    engine: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Which methods work in a directory, found by trying them.

    direct_alignment    alignment that O_DIRECT needs there; 0: refused
    io_uring_error      why a ring does not start or move bytes; None: it works
    registered_error    why `registered_bytes` of memory cannot be pinned with a ring; None: they can
    memlock_bytes       the soft limit on locked memory; None: no limit
    """

    file_system: str
    kernel: str
    io_uring_error: str | None
    direct_alignment: int
    registered_bytes: int
    registered_error: str | None
    memlock_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A whole study: place, machine, options, and every sample in the order of measuring."""

    flowstone: str
    path: str
    started: str
    seconds: float
    machine: Mapping[str, str]
    probe: Probe
    quick: bool
    rounds: int
    bytes: int
    samples: tuple[Sample, ...]
