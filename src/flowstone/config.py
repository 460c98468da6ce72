"""Every option and every limit, in one place, with units in the names."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from flowstone.errors import ArgumentError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# Facts of the format (docs/FORMAT.md): changing one is a new format version.
FORMAT_VERSION = 1
BLOCK_BYTES = 4 * KIB
CHUNK_BYTES = 1 * MIB
PACKED_BELOW_BYTES = 64 * KIB

# Limits for files that may be damaged or hostile, so that reading them does not exhaust the machine's memory.
HEADER_BYTES_MAX = 90_000_000  # safetensors refuses headers of 100 MB
MARKER_BYTES_MAX = 64 * KIB
MANIFEST_BYTES_MAX = 256 * MIB
INDEX_BYTES_MAX = 16 * GIB  # nine times the index of 405 billion parameters on 8,192 ranks
OBJECTS_BYTES_MAX = 1 * GIB
OBJECTS_CONTAINERS_MAX = 1 << 22  # lists and dicts: each takes 3 bytes in the file, 64 to 232 in memory
TEXT_CHARS_MAX = 1000  # of each text in a manifest
READ_PART_BYTES = 64 * MIB  # an index or objects are read in parts; each is checked before the next one gets memory
NDIM_MAX = 64  # torch's own limit on dimensions
NAME_BYTES_MAX = 65_535
STEP_MAX = 10**15

NAMES_LISTED_MAX = 20  # tensors named in an error message; the error itself holds all names

UNSTACKED_MAX = 1 << 20
"""How many tensors a rule may make of one. Without this limit, an empty tensor of 2^40 rows would exhaust memory."""

# Time between two checks for signals during a wait for the engine: Ctrl-C takes effect soon, and checks cost nothing.
POLL_S = 0.1
LOCK_GRACE_S = 10.0  # wait for a lock whose holder may be dead: a killed process frees its memory before its locks
INTERRUPTS_MAX = 100  # how many Ctrl-C are ignored while an aborted load still writes into memory

ARENA_SHARE_OF_AVAILABLE = 4  # the default budget is a quarter of the memory that is available
READ_ARENA_BYTES = 256 * MIB  # enough for loads and checks to reach the device's rate
DEVICE_WINDOW_BYTES = 32 * MIB
"""Length of the blocks of staging memory (the arena) into which devices copy. Copying one takes 0.6 ms on a bus of
55 GB/s, and one CUDA event.
"""
GATHERED_BYTES_MAX = 256 * MIB  # small pieces of one save that a kernel gathers; further ones are copied one by one
DEVICE_BLOCKS_MIN = 16  # an arena with fewer gets shorter blocks, so that some are written while others are filled
COPIED_PART_BYTES = 16 * MIB  # strided device memory that torch copies at a time; the copy needs as much device memory
BOUNCE_BYTES = 256 * MIB  # a load's buffers for tensors that cannot be read directly; filled and copied repeatedly
COPIES_BYTES, COPIES_SHARE = 64 * MIB, 1 / 16  # limits (bytes, share of the budget) of copies made before a plan exists
FIRST_ARENA_BYTES = 128 * MIB  # staging memory for a first save: sixteen requests of 8 MiB
RING_HALF_BYTES = 16 * MIB  # half of the ring buffer that passes bytes to other ranks of the node
READ_AHEAD_BYTES_MIN = 16 * MIB  # smaller checkpoints are read faster than the read-ahead is prepared
SHARED_READ_BYTES_MIN = 32 * MIB  # smaller loads: each rank reads all it needs, which is faster than an agreement
READ_FILES_MAX = 256  # open files of one load or verification; at most a quarter of the process's limit
READ_REQUEST_BYTES = 8 * MIB + 2 * BLOCK_BYTES  # eight full chunks, even if the first does not begin with a block


def workers_for(processors: int) -> int:
    """How many threads copy and digest in a save: one per eight processors. With two processors a second thread would
    slow down the caller.
    """
    return max(1, min(max(2, min(8, processors // 8)), processors - 1))


def read_workers_for(processors: int) -> int:
    """How many threads copy and digest in a load: one per four processors, as nothing trains meanwhile; at most five,
    which digest 25 GB/s.
    """
    return max(workers_for(processors), min(5, processors // 4))


WORKERS_DEFAULT = workers_for(len(os.sched_getaffinity(0)))
READ_WORKERS_DEFAULT = read_workers_for(len(os.sched_getaffinity(0)))
# Encoding delays the end of a save. So with `compress` there are at least two workers, even on two processors.
CODING_WORKERS = min(2, len(os.sched_getaffinity(0)))
TOUCHING_THREADS_MAX = 8  # threads that touch staging memory while a caller waits for it
READ_WORKERS_IN_MEMORY = max(1, min(4, len(os.sched_getaffinity(0))))  # workers of a load from memory

# Lazy capture is paced to end when this share of the time from `save` to the next optimizer step has passed.
CAPTURE_SHARE_OF_OVERLAP = 0.8
FENCE_WAIT_S = 0.005  # if an optimizer step waits for longer than this, the staging memory (arena) grows
SNAPSHOT_PART_BYTES = 16 * MIB  # copied before an optimizer step between two checks of whether copies are still needed
COPY_BYTES_PER_S = 4e9  # rate of copies by two cores that train meanwhile; determines how much the arena grows

# Replicas are split between several writers if the rank that writes most then writes less by these bytes and share.
SPLIT_WORTH_BYTES = 16 * MIB
SPLIT_BLOCK_BYTES_MIN = 1 * MIB

# Compaction. An earlier file stays on disk while a save refers to any of its chunks. If less than this share of a file
# is in use, its chunks are written again, at most this many bytes per save and rank; so are the chunks of the oldest
# files if there are more files than this number.
COMPACT_BELOW = 0.25
COMPACTED_BYTES_MAX = 256 * MIB
REFERRED_FILES_MAX = 64

# Agreements of ranks. A value in a torch.distributed store may have 8 MiB; smaller values delay other ranks less.
MESSAGE_BYTES_MAX = 1 * MIB
TREE_FAN = 16  # a rank reads the messages of so many ranks in an agreement: 8,192 ranks are three levels below rank 0
DEADLINE_S = 600.0  # wait for the slowest rank to reach an agreement
DEADLINE_MARGIN_S = 2.0  # added for each level of the tree, so that ranks nearer to the cause time out first
HEARTBEAT_S = 2.0  # between two heartbeats of a rank
SILENCE_S = 60.0  # without a heartbeat, a rank counts as dead: it was killed, or is frozen
PLANS_REMEMBERED = 16  # older plans that are kept, as a rank may still be writing saves that it began with them
INDEX_ROWS_KEPT_MAX = 1 << 20  # index rows that rank 0 keeps for the next save with the same plan; 50 bytes each
# replicas in device memory that one save samples
DEVICE_REPLICAS_COMPARED_MAX = 256
CATCH_UP_CALLS = 16  # by how many calls a rank may be behind the other ranks after only its own call failed
DRAFT_ATTEMPTS = 16  # attempts of a rank to create files in the directory of a save, which failing ranks may remove
LEAVE_S = 10.0  # rank 0 waits this long for the other ranks to leave first
REMINDER_S = 10.0  # between two log lines about missing ranks
NOTICE_S = 5.0  # time until the first log line about missing ranks
REJOIN_S = 2.0  # wait for other ranks to make their next call, after the call that this rank missed has timed out
# `save` waits this long for live ranks that have not made the call; later calls wait UNANSWERED_S
BLOCKED_CALLER_WAIT_S = 60.0
UNANSWERED_S = 10.0  # wait for ranks that are known not to have made the call, or that other ranks wait for

# The memory agent of a node (store/memory/agent_client.py, agent/).
AGENT_MESSAGE_BYTES_MAX = 64 * KIB
AGENT_CONNECTIONS_MAX = 256
AGENT_NAME_CHARS_MAX = 4096  # of each path or other text in a request
AGENT_ANSWER_S = 60.0  # longest wait for an answer; freeing gigabytes of memory takes less
AGENT_START_S = 60.0  # wait for a new agent to listen, on a busy machine
AGENT_LINGER_S = 600.0  # a job's checkpoints stay in memory for this long after the job has ended
AGENT_IDLE_S = 10.0  # an agent without checkpoints and connections ends after this time
AGENT_HEADROOM_BYTES = 256 * MIB  # free memory that the agent leaves to other processes
AGENT_POOLED_FROM_BYTES = 1 * MIB  # the memory of a removed file of at least this size is reused for the next files
FLUSH_ATTEMPTS = 5  # attempts of the agent to make a checkpoint durable, after pauses of 1, 2, 4, ... seconds
GENERATIONS = 2  # checkpoints that fit in memory, including the one that is being written

# The memory of several nodes (store/peers/, agent/peers.py).
REPLICAS = 2  # nodes that keep each file of a checkpoint in memory, including the node that wrote it
PEER_MESSAGE_BYTES_MAX = 4 * MIB  # longest message, without the bytes of files that follow it
PEER_PUT_BYTES_MAX = 4096 * MIB  # longest index, or objects file, that is sent
PEER_PART_BYTES = 4 * MIB  # length of the parts in which a file is copied; each part has a digest
PEER_DESCRIPTION_BYTES_MAX = 4 * MIB  # longest text that describes how a file is stored with parity
PEER_SPREAD = 0.5  # copies are spread over this share of the time between two saves; the rest is reserve
PEER_SPREAD_MAX = 0.9
PEER_SPREAD_S_MAX = 60.0  # longest time over which copies are spread: until they end, losing a node costs more steps
PEER_PARTS_UNDER_WAY = 4  # parts of one copy that are sent before the first of them is confirmed
PEER_CONNECTIONS_MAX = 256
PEER_STRANGERS_MAX = 32  # connections that have not yet proved that they know the job's secret
PEER_READS_MAX = 8  # most connections of one read
PEER_REBUILD_BYTES = MIB  # memory per connection to rebuild a lost part of a file; not part of the budget
PEER_STRANGER_S = 1.0  # beyond PEER_STRANGERS_MAX, a new connection replaces one that is unproven for this long
PEER_STRANGERS_LOGGED_MAX = 20  # log lines about strangers in a burst; one per second on average
PEER_GREETING_S = 10.0  # longest time to connect and to exchange the first messages
PEER_ANSWER_S = 60.0
PEER_SILENCE_S = 5  # a connection ends if the other machine does not answer TCP keep-alive probes for this long
PEER_DOWN_S = 5.0  # a node that did not answer is not asked again for this long, if another node can be asked
PEER_SECRET_BYTES = (16, 1024)

# Journals (every_step).
RECOVERY_S = 60.0  # reading the checkpoint and replaying the journal may take this long, by default
LAG_STEPS = 1  # steps that may not be durable yet when `save` returns, by default
LAG_STEPS_MAX = 64  # each of these steps keeps its gradients in memory, and a load must check what was written of it
JOURNAL_WINDOWS = 8  # the state is divided into so many windows; each step fingerprints one
JOURNAL_FREE_FRAMES_MIN = 5  # a journal begins only if the disk has space for so many steps
JOURNAL_AHEAD_BYTES = 256 * MIB  # disk space reserved at a time; each reservation costs writes of the file system
JOURNAL_UNSAVED_BYTES_MIN = 64 * MIB  # limit of gradients kept since the last save: this or the state's size, if larger
JOURNAL_VALUE_BYTES_MAX = 4 * MIB  # limit per step of values that changed without an optimizer step
JOURNAL_FULL_SAVES_MAX = 64  # most full saves in a row because earlier steps could not be journaled
JOURNAL_RATE_BYTES_PER_S = 500e6  # assumed rate of reads, until it is measured

# The replica of a state (every_step=Replica(...)): replica/.
REPLICA_STEPS_AT_ONCE = 16  # steps that a replica replays before it checks for messages
REPLICA_POLL_S = 0.2  # time between two checks for new steps
REPLICA_BEHIND_STEPS = 100  # a replica that is further behind is reported
REPLICA_END_S = 10.0  # a replica that runs for longer after the end of training is killed
REPLICA_ANSWER_S = 10.0  # longest wait for a replica to report its step
REPLICA_PERSIST_S = 600.0  # longest wait of a restarted trainer for the replica that saves the last step
REPLICA_MEET_S = 120.0  # wait for the replicas of several ranks to find each other: each imports torch first
REPLICA_ROUND_S = 1.0  # longest time between two rounds of the replicas of several ranks
# the replicas of several ranks stop if the last rank of a training job ends later than this after the first
REPLICA_LAST_RANK_S = 60.0
REPLICA_ATTEMPTS_MAX = 5  # failures in a row: loads and steps may fail because training removes old files
REPLICA_NICE = 10  # a replica's nice value is higher than training's by this

# Tiers.
TIER_LAG = 4  # checkpoints that may wait for a tier; nearer tiers keep them meanwhile (memory: at most GENERATIONS)
TIER_DRAIN_S = 300.0  # longest wait of `close` for a tier
TIER_RETRY_S = 1.0  # pause after a first failure; it doubles with each attempt
TIER_RETRY_S_MAX = 300.0
TIER_ANSWER_S = 10.0  # wait for farther tiers at the first save and at a rewind; after that they count as unreachable
FLUSH_YIELD = 4  # a flush pauses while a save is captured, for at most so many times the duration of its last batch

# Paths of a striped store.
PATH_RETRY_S = 1.0  # wait before a failed path of a striped store is tried again; it doubles with each attempt
PATH_RETRY_S_MAX = 300.0
PATH_SAMPLE_BYTES = 32 * MIB  # fewest bytes that measure a path's rate; with fewer, request latency would dominate
PATH_SHARE_MIN = 1 / 64  # share of a save that even a slow path gets, so that its rate is measured when it gets faster
PATHS_MAX = 64  # paths of one store

# Memory that is watched page by page is collapsed into huge pages between saves (native/watch/collapse.h).
COLLAPSE_BYTES_MIN = 64 * MIB  # smaller states stay in small pages: `save` write-protects those in 0.2 ms
COLLAPSE_SHARE = 1 / 8  # collapsing takes at most this share of one processor; 2 MiB take about 3 ms of its time
COLLAPSE_SKIPS_MAX = 63  # after the system has refused to collapse, at most so many saves pass before the next attempt

# With less memory, the parts copied at a time would be too short to keep even a slow device busy.
BUDGET_BYTES_MIN = 32 * MIB
REQUEST_BYTES_MIN = 2 * MIB  # a block of staging memory holds one request, or any chunk extended to 4 KiB bounds
REQUEST_BYTES_MAX = 64 * MIB
QUEUE_DEPTH_MAX = 1024
WORKERS_MAX = 64
TUNING_BYTES_MAX = 64 * KIB  # a longer tuning file is ignored

Backend = Literal["auto", "io_uring", "posix"]
Direct = Literal["auto", "on", "off"]
Watch = Literal["auto", "digests", "exact", "samples"]
DIGESTED_ON_DEVICES: Collection[Watch] = ("digests", "exact")  # with these, a device digests its own memory
Compress = Literal["auto", "off", "derived", "max"]
Direction = Literal["write", "read"]


def whole_number(name: str, value: object) -> int:
    """An integer option: any integer except bool, or a float with an integer value (4e9 bytes).

    raises  ArgumentError
    """
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    try:
        if isinstance(whole, bool):
            raise TypeError("a bool is not a number")
        return operator.index(whole)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(
            f"{name} must be an integer, not {value!r:.60}", found=type(value).__qualname__, next="give an int"
        ) from None


def _check_engine(backend: str, queue_depth: int | None, request_bytes: int | None, workers: int | None) -> None:
    """Raise ArgumentError if one of these values is invalid for every engine. A number may be `None`, which stands for
    the default; the default is checked later.
    """
    if backend not in ("auto", "io_uring", "posix"):
        raise ArgumentError(
            f"backend {backend!r} is not one of 'auto', 'io_uring', 'posix'",
            next="give one of these; 'auto' is the default",
        )
    if queue_depth is not None and not 1 <= queue_depth <= QUEUE_DEPTH_MAX:
        raise ArgumentError(
            f"queue_depth {queue_depth} is not between 1 and {QUEUE_DEPTH_MAX}", next="leave it out: the default is 16"
        )
    if request_bytes is not None and (
        request_bytes % BLOCK_BYTES or not REQUEST_BYTES_MIN <= request_bytes <= REQUEST_BYTES_MAX
    ):
        raise ArgumentError(
            f"request_bytes {request_bytes} is not a multiple of 4096 between 2 and 64 MiB",
            next="leave it out: the default is 8 << 20",
        )
    if workers is not None and not 1 <= workers <= WORKERS_MAX:
        raise ArgumentError(
            f"workers {workers} is not between 1 and {WORKERS_MAX}", next="leave it out, or give a number in this range"
        )


class Tuning(msgspec.Struct, frozen=True):
    """I/O settings for reads, or for writes, on one mounted file system: defaults, or from `flowstone bench tune`.

    direct_from_bytes  saves and loads of at least this size bypass the page cache, if that works; None: all use the
                       page cache
    in_place           reads only: EngineOptions.read_in_place; ignored for writes, which go through the arena
                       (staging memory; docs/decisions/011)
    The other fields are those of EngineOptions.
    """

    backend: Backend
    queue_depth: int
    request_bytes: int
    workers: int
    in_place: bool
    direct_from_bytes: int | None = 0

    def __post_init__(self) -> None:
        _check_engine(self.backend, self.queue_depth, self.request_bytes, self.workers)
        if self.direct_from_bytes is not None and not 0 <= self.direct_from_bytes < 1 << 62:
            raise ValueError(f"direct_from_bytes {self.direct_from_bytes} is not from 0 to 2^62 - 1")


class PathShare(NamedTuple):
    """How much of a save goes to one path of a striped store: `weight` (above 0) divided by the sum of all weights."""

    path: int
    weight: float


# Measured by `flowstone bench tune`, on ext4 over a virtio disk of 2 to 4 GB/s. No other request size or queue depth is
# faster beyond the noise. O_DIRECT is 1.4 to 2 times as fast as the page cache for 4 MiB or more, and not slower for
# 256 KiB or more.
WRITE_DEFAULTS = Tuning(backend="auto", queue_depth=16, request_bytes=8 * MIB, workers=WORKERS_DEFAULT, in_place=False)
READ_DEFAULTS = Tuning(
    backend="auto", queue_depth=16, request_bytes=READ_REQUEST_BYTES, workers=READ_WORKERS_DEFAULT, in_place=False
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """I/O options for saves and loads. Options not given come from the file system's tuning file, or are defaults.

    `flowstone bench tune` measures a mounted file system, for writes and for reads, and writes its tuning file. An
    option given here overrides that file.

    backend         "auto": io_uring if the kernel and the container allow it, otherwise POSIX threads
    direct          bypass the page cache. "auto": if O_DIRECT works (tried with real buffers), and is faster
    queue_depth     requests in flight; 1 to 1024
    request_bytes   longest request, a multiple of 4096, at least 2 MiB; more than 64 MiB was not faster on any disk
    workers         threads that copy, digest and encode. Default for saves: one per eight processors, from two to
                    eight; but one on a machine with two processors if `compress` is "off". Default for loads: one per
                    four processors, up to five
    read_in_place   True: loads read directly into tensors whose memory has the file's alignment, without staging
                    memory, which saves 140 MB. Default on disks: False, as the small pages of the heap would make small
                    device requests, and the read would take 1.8 times as long. Default on tmpfs and DAX, where the
                    file's pages are memory: True, which takes half the time (docs/performance/in-place.md)
    write_bytes_per_s  limit for the saves of this process on a shared device or network, even while a caller waits for
                    them; None: no limit. While no caller waits, tensors that are captured after `save` returned are in
                    any case written only as fast as needed to capture all of them before the next optimizer step
    compress        "off": no tensor is encoded, and all are stored.
                    "derived": nothing is encoded, and tensors that can be computed from others are not stored: copies,
                    and 16-bit weights that are a rounded float32 master copy.
                    "max": in addition, tensors of at least 64 KiB are encoded losslessly if that makes them shorter;
                    other readers of safetensors do not find encoded tensors by name (docs/FORMAT.md, Codecs).
                    "auto": like "max", but a tensor is encoded only from the second save on, and only if saves then end
                    sooner, by the times measured in the last save
    kept_bytes      host memory of this rank for the last fully stored version of chunks. With `compress`, later saves
                    store only the difference to that version, if it is shorter than the chunk (docs/SMALLER.md). 0:
                    no version is kept in memory
    watch           how changes are detected in tensors that are captured after `save` returned (docs/SAVING.md).
                    "auto": every write to host memory that the system can watch is detected; other memory is compared
                    by samples.
                    "exact": every write is detected (on a GPU: every write that changes captured bytes), or the save is
                    refused.
                    "samples": memory is compared by samples.
                    "digests": like "auto"; in addition, when `save` is called, each GPU digests its tensors that are
                    captured later, and its replicas (tensors of which other ranks have copies). The digests take as
                    long as reading that memory once; later work in the current stream waits for them
    collapse        True: between saves, a background thread of low priority collapses watched memory into huge pages,
                    if the system allows that. It takes at most an eighth of one processor, and no memory. False: pages
                    stay small, and `save` blocks 3 ms longer for each GB
    share_reads     True: bytes that several ranks of one node need are read by one rank and passed on through shared
                    memory, if reads bypass the page cache. False: each rank reads all that it needs
    """

    backend: Backend = "auto"
    direct: Direct = "auto"
    queue_depth: int | None = None
    request_bytes: int | None = None
    workers: int | None = None
    read_in_place: bool | None = None
    write_bytes_per_s: int | None = None
    share_reads: bool = True
    watch: Watch = "auto"
    compress: Compress = "off"
    kept_bytes: int = 0
    collapse: bool = True

    def __post_init__(self) -> None:
        for name in ("queue_depth", "request_bytes", "workers", "write_bytes_per_s", "kept_bytes"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value))
        for name in ("read_in_place", "share_reads", "collapse"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name != "read_in_place"):
                raise ArgumentError(f"{name} {value!r:.60} is neither True nor False", next="give True or False")
        if self.watch not in ("auto", "digests", "exact", "samples"):
            raise ArgumentError(
                f"watch {self.watch!r} is not one of 'auto', 'digests', 'exact', 'samples'",
                next="give one of these; 'auto' is the default",
            )
        if self.compress not in ("auto", "off", "derived", "max"):
            raise ArgumentError(
                f"compress {self.compress!r} is not one of 'auto', 'off', 'derived', 'max'", next="give one of these"
            )
        if self.kept_bytes < 0:
            raise ArgumentError(f"kept_bytes {self.kept_bytes} must be at least 0", next="give 0 to keep no chunks")
        if self.write_bytes_per_s is not None and self.write_bytes_per_s < REQUEST_BYTES_MIN:
            raise ArgumentError(
                f"write_bytes_per_s {self.write_bytes_per_s} is less than 2 MiB (one request) per second",
                next="give more, or leave it out to use the full rate of the device",
            )
        if self.direct not in ("auto", "on", "off"):
            raise ArgumentError(
                f"direct {self.direct!r} is not one of 'auto', 'on', 'off'",
                next="give one of these; 'auto' is the default",
            )
        _check_engine(self.backend, self.queue_depth, self.request_bytes, self.workers)


@dataclass(frozen=True, slots=True)
class Keep:
    """Which committed checkpoints retention keeps. The newest is always kept.

    last   how many of the newest steps; at least 1
    every  also each step that is a multiple of this number; None: no others
    """

    last: int = 1
    every: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "last", whole_number("Keep: last", self.last))
        if self.every is not None:
            object.__setattr__(self, "every", whole_number("Keep: every", self.every))
        if self.last < 1:
            raise ArgumentError(
                f"Keep(last={self.last}): last must be at least 1", next="give 1 or more; keep=None keeps all steps"
            )
        if self.every is not None and self.every < 1:
            raise ArgumentError(
                f"Keep(every={self.every}): every must be at least 1",
                next="omit the option `every` to keep only the newest steps",
            )


KeepRule = Callable[[Sequence[int]], Collection[int]]
"""A retention policy of the caller: it gets the committed steps of this store, ascending, and returns the steps to
keep.

The last step was just committed and is always kept. Called after each commit, on rank 0, on a thread of the
Checkpointer. If it raises, the error is logged, and nothing is removed.
"""
