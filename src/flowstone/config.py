"""Every option and every limit, in one place, with units in the names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# Facts of the format (docs/FORMAT.md): changing one is a new format version.
FORMAT_VERSION = 1
BLOCK_BYTES = 4 * KIB
CHUNK_BYTES = 1 * MIB
PACKED_BELOW_BYTES = 64 * KIB

# Limits that keep untrusted or unlucky input from taking the machine down.
HEADER_BYTES_MAX = 90_000_000  # safetensors refuses headers of 100 MB
MANIFEST_BYTES_MAX = 256 * MIB
OBJECTS_BYTES_MAX = 1 * GIB
NDIM_MAX = 64  # torch's own limit on dimensions
NAME_BYTES_MAX = 65_535
STEP_MAX = 10**15

# How the conductor waits: long enough to cost nothing, short enough for Ctrl-C.
POLL_S = 0.1

ARENA_SHARE_OF_AVAILABLE = 4  # the default budget is a quarter of the memory that is available
READ_ARENA_BYTES = 256 * MIB  # loads and checks never need more to reach the device's rate
FIRST_ARENA_BYTES = 128 * MIB  # of staging memory for a first save: sixteen requests of 8 MiB
# Four whole chunks at any phase. Measured: 4 MiB and 16 in flight read as fast as 8 MiB, from half the fresh memory.
READ_REQUEST_BYTES = 4 * MIB + 2 * BLOCK_BYTES
# Below this, a gather of windows cannot keep even a slow device busy.
BUDGET_BYTES_MIN = 32 * MIB
REQUEST_BYTES_MIN = 2 * MIB  # a block of the arena holds a request, and any chunk with its block's head and tail


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How bytes move. The defaults were measured (docs/PERFORMANCE.md); tune for your mount.

    backend         "auto" takes io_uring where the kernel and the container allow it, else POSIX threads
    direct          past the page cache ("auto": where O_DIRECT works, probed with real buffers)
    queue_depth     requests in flight; 1 to 1024
    request_bytes   longest request, a multiple of 4096 from 2 MiB; more than 64 MiB gains nothing anywhere we know
    workers         threads that copy and digest; more than two only help above 10 GB/s
    write_in_place  what finds no room in the arena is written from where it lies; off: it waits for room
    read_in_place   loads read straight into memory at the file's phase: a third less CPU time. Off by default:
                    the heap's small pages make small device requests, and the arena's huge ones read faster
    """

    backend: Literal["auto", "io_uring", "posix"] = "auto"
    direct: Literal["auto", "on", "off"] = "auto"
    queue_depth: int = 16
    request_bytes: int = 8 * MIB
    workers: int = 2
    write_in_place: bool = True
    read_in_place: bool = False

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "io_uring", "posix"):
            raise ValueError(f"backend {self.backend!r} is none of 'auto', 'io_uring', 'posix'")
        if self.direct not in ("auto", "on", "off"):
            raise ValueError(f"direct {self.direct!r} is none of 'auto', 'on', 'off'")
        if not 1 <= self.queue_depth <= 1024:
            raise ValueError(f"queue_depth {self.queue_depth} is not within 1..1024")
        if self.request_bytes % BLOCK_BYTES or not REQUEST_BYTES_MIN <= self.request_bytes <= 64 * MIB:
            raise ValueError(f"request_bytes {self.request_bytes} is not a multiple of 4096 within 2..64 MiB")
        if not 1 <= self.workers <= 64:
            raise ValueError(f"workers {self.workers} is not within 1..64")


@dataclass(frozen=True, slots=True)
class Keep:
    """Which committed checkpoints retention spares; the newest is always spared.

    last   the newest this many; at least 1
    every  also each step that is a multiple of this; None for none
    """

    last: int = 1
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"Keep(last={self.last}): at least the newest checkpoint is kept")
        if self.every is not None and self.every < 1:
            raise ValueError(f"Keep(every={self.every}) is not a positive number of steps")
