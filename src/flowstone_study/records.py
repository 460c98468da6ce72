"""Measurements and their settings: frozen records, and texts about them."""

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

    coalesced      True: requests span tensors; False: each request has bytes of one tensor only
    direct         True: O_DIRECT; False: through the page cache
    queue_depth    how many requests io_uring has in flight, or how many threads `posix` has; 1 for `sync`
    memory         "fresh": mapped for this run, and first touched while the timer runs (a write fills it then, as when
                   a state is staged into new memory). "reused": touched before. "registered": touched before, and
                   pinned for io_uring while the timer runs
    huge_pages     whether the memory requests transparent huge pages (madvise)
    reserved       whether a written file first gets its blocks (fallocate), while the timer runs; True for restores
    bytes          how many bytes all processes together should move; the real number differs by at most a block for
                   each tensor
    chunk_bytes    the largest size of a file in the layout `chunk`; 0 in every other layout
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
        for value, allowed in (
            (self.direction, DIRECTIONS), (self.layout, LAYOUTS), (self.engine, ENGINES), (self.memory, MEMORIES),
            (self.mix, MIXES),
        ):
            if value not in allowed:
                raise ValueError(f"{value!r} is not one of {allowed}")
        if self.request_bytes % BLOCK_BYTES or not REQUEST_BYTES_MIN <= self.request_bytes <= REQUEST_BYTES_MAX:
            raise ValueError(f"request_bytes {self.request_bytes} is not a multiple of 4096 within 4 KiB..64 MiB")
        if not 1 <= self.queue_depth <= QUEUE_DEPTH_MAX or not 1 <= self.processes <= PROCESSES_MAX:
            raise ValueError(
                f"queue_depth {self.queue_depth} is not from 1 to {QUEUE_DEPTH_MAX}, or processes {self.processes} is "
                f"not from 1 to {PROCESSES_MAX}",
            )
        if self.chunk_bytes % BLOCK_BYTES or (self.chunk_bytes > 0) != (self.layout == "chunk"):
            raise ValueError(
                f"chunk_bytes {self.chunk_bytes} is not valid for layout {self.layout!r}: only the layout 'chunk' has "
                f"chunks, and they are multiples of {BLOCK_BYTES}",
            )
        if self.bytes < self.processes * BLOCK_BYTES:
            raise ValueError(f"{self.bytes} bytes are less than one block for each of {self.processes} processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of one cell. Either all values are measured, or `error` has the reason.

    seconds        from the common start until the last process has finished. Includes open, reserve, requests, fsync of
                   files and directory, and close
    gb_per_s       10^9 bytes of tensors (without padding) per second
    cpu_s_per_gb   seconds of processor time for 10^9 bytes: user and system time of all processes, without the kernel's
                   writeback threads
    cold           for a restore: whether the kernel reports that no page of the files was cached at the start. None: it
                   cannot tell, or the sample is of a write
    engine         the engine that moved the bytes
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
    """Which I/O methods work in a directory. They were found by trying them.

    direct_alignment    the alignment that O_DIRECT needs, in bytes; 0: O_DIRECT does not work
    io_uring_error      why io_uring does not work; None: it works
    registered_error    why io_uring cannot pin `registered_bytes` of memory; None: it can
    memlock_bytes       the soft limit on locked memory, in bytes; None: no limit
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
    """A study: directory, machine, options, and all samples in the order of measurement."""

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
