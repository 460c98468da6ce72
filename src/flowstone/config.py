"""Every option and every limit, in one place, with units in the names."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from flowstone.errors import ArgumentError

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
MARKER_BYTES_MAX = 64 * KIB
MANIFEST_BYTES_MAX = 256 * MIB
INDEX_BYTES_MAX = 16 * GIB  # nine times that of 405 billion parameters on 8,192 ranks, in boxes
OBJECTS_BYTES_MAX = 1 * GIB
OBJECTS_CONTAINERS_MAX = 1 << 22  # lists and dicts: 64 to 232 bytes of memory each, of 3 in the file
TEXT_CHARS_MAX = 1000  # of what a manifest says in words
READ_PART_BYTES = 64 * MIB  # of an index or of objects, each part checked before the next one takes memory
NDIM_MAX = 64  # torch's own limit on dimensions
NAME_BYTES_MAX = 65_535
STEP_MAX = 10**15

NAMES_TOLD = 20  # tensors named in an error message; the error itself holds all names

UNSTACKED_MAX = 1 << 20
"""Tensors that a rule makes of one. A shape costs nothing: one without elements may claim 2^40."""

# How Python waits for the engine: long enough to cost nothing, short enough for Ctrl-C.
POLL_S = 0.1
LOCK_GRACE_S = 10.0  # for a lock whose holder is not known to be alive: a killed process first gives its memory back
INTERRUPTS_MAX = 100  # of the wait until a load that is given up has stopped writing into memory

ARENA_SHARE_OF_AVAILABLE = 4  # the default budget is a quarter of the memory that is available
READ_ARENA_BYTES = 256 * MIB  # loads and checks never need more to reach the device's rate
DEVICE_WINDOW_BYTES = 32 * MIB
"""Of memory on devices, as long as a block of the arena then: 0.6 ms of a bus of 55 GB/s, and one event for it."""
GATHERED_BYTES_MAX = 256 * MIB  # of small pieces of a save; more are copied as larger ones are
DEVICE_BLOCKS_MIN = 16  # an arena of fewer has shorter blocks: some are written while others are filled
COPIED_PART_BYTES = 16 * MIB  # of strided memory of a device that torch copies: it takes as much of the device's
BOUNCE_BYTES = 256 * MIB  # of a load's bounce buffers at once: each further round leaves the device idle for a moment
COPIES_BYTES, COPIES_SHARE = 64 * MIB, 1 / 16  # of the budget, at most, the room for copies of what has no plan yet
FIRST_ARENA_BYTES = 128 * MIB  # of staging memory for a first save: sixteen requests of 8 MiB
RING_HALF_BYTES = 16 * MIB  # of half a ring buffer, which passes bytes to other ranks of the node
READ_AHEAD_BYTES_MIN = 16 * MIB  # less is read faster than a second way to read it is prepared
SHARED_READ_BYTES_MIN = 32 * MIB  # below this each rank reads for itself, which is faster than agreeing on it
READ_FILES_MAX = 256  # open at once in one load or check; at most a quarter of the process's limit
READ_REQUEST_BYTES = 8 * MIB + 2 * BLOCK_BYTES  # eight whole chunks, wherever the first begins in its block


def workers_for(processors: int) -> int:
    """Threads that copy and digest: one in eight processors. On two a second one takes time from the calling thread."""
    return max(1, min(max(2, min(8, processors // 8)), processors - 1))


def read_workers_for(processors: int) -> int:
    """As `workers_for`, for loads, beside which nothing trains: one in four, up to the five that digest 25 GB/s."""
    return max(workers_for(processors), min(5, processors // 4))


WORKERS_DEFAULT = workers_for(len(os.sched_getaffinity(0)))
READ_WORKERS_DEFAULT = read_workers_for(len(os.sched_getaffinity(0)))
# With `compress` there is more to do, and a save's end waits for it: two, even on two processors.
CODING_WORKERS = min(2, len(os.sched_getaffinity(0)))
TOUCHING_THREADS_MAX = 8  # of staging memory that a caller waits for
READ_WORKERS_IN_MEMORY = max(1, min(4, len(os.sched_getaffinity(0))))  # of a load from memory

# Lazy capture aims to be done when this much of the time from `save` to the fence has passed.
CAPTURE_SHARE_OF_OVERLAP = 0.8
FENCE_WAIT_S = 0.005  # a longer wait makes the arena grow
SNAPSHOT_PART_BYTES = 16 * MIB  # a fence copies this much before it asks again whether it still has to copy
COPY_BYTES_PER_S = 4e9  # into touched memory, by two cores that train meanwhile; sizes that growth

# Replicas are split between several writers if that takes this much off the largest writer.
SPLIT_WORTH_BYTES = 16 * MIB
SPLIT_BLOCK_BYTES_MIN = 1 * MIB

# An earlier file that a save refers to is kept by every chunk that is used of it. Chunks of files that are used less
# are written again, so many bytes by each save of a rank, and files that are more are written together.
COMPACT_BELOW = 0.25
COMPACTED_BYTES_MAX = 256 * MIB
REFERRED_FILES_MAX = 64

# How ranks agree. A value in a torch.distributed store may have 8 MiB; smaller ones delay other ranks less.
MESSAGE_BYTES_MAX = 1 * MIB
TREE_FAN = 16  # messages that one rank reads in an agreement: 8,192 ranks are three levels below rank 0
DEADLINE_S = 600.0  # for the slowest rank to come to an agreement
DEADLINE_MARGIN_S = 2.0  # for each level of the tree: a rank further from the cause gives up later
HEARTBEAT_S = 2.0  # between two heartbeats of a rank
SILENCE_S = 60.0  # without a heartbeat, a rank counts as dead: it was killed, or is frozen
PLANS_REMEMBERED = 16  # older plans by which a rank may have begun saves that it is still writing
INDEX_ROWS_KEPT_MAX = 1 << 20  # that rank 0 keeps for the next save by the same plan: about 50 bytes each
FAR_COMPARED_MAX = 256  # replicas in device memory that one save samples; `save` makes the table of their lines
CATCH_UP_CALLS = 16  # that a rank may be behind others, after it failed where they did not
DRAFT_TRIES = 16  # of a rank to create files in the shared draft, which ranks that give up may remove
LEAVE_S = 10.0  # that rank 0 waits for the other ranks to leave first
REMINDER_S = 10.0  # between two log lines about ranks that are waited for
NOTICE_S = 5.0  # until the first such line
REJOIN_S = 2.0  # for other ranks to come to their next call, after they gave up the call that this rank missed
HELD_S = 60.0  # for ranks that live and have not called, while a `save` waits for them; then UNANSWERED_S
UNANSWERED_S = 10.0  # for ranks that have not called, if they are known not to, or others are held up

# The memory agent of a node (store/agent_client.py, agent/).
AGENT_MESSAGE_BYTES_MAX = 64 * KIB
AGENT_CONNECTIONS_MAX = 256
AGENT_NAME_CHARS_MAX = 4096  # of each path or other text in a request
AGENT_ANSWER_S = 60.0  # for an answer: it frees gigabytes of memory in less
AGENT_START_S = 60.0  # for a new agent to listen, on a machine that is busy
AGENT_LINGER_S = 600.0  # that what a job had in memory stays after the job has ended
AGENT_IDLE_S = 10.0  # an agent that holds nothing, and to which nothing is connected, ends after that
AGENT_HEADROOM_BYTES = 256 * MIB  # of available memory that the agent leaves to others
AGENT_POOLED_FROM_BYTES = 1 * MIB  # memory of removed files from this size on is kept for the next ones
FLUSH_TRIES = 5  # of the agent to make a generation durable by itself, after pauses of 1, 2, 4, ... seconds
GENERATIONS = 2  # that memory is for, the one that is being written included

# The memory of several nodes (store/peers/, agent/peers.py).
REPLICAS = 2  # nodes that keep a checkpoint, its owner included
PEER_MESSAGE_BYTES_MAX = 4 * MIB  # without the bytes of files, which come behind a message
PEER_PUT_BYTES_MAX = 4096 * MIB  # of an index, or of objects
PEER_PART_BYTES = 4 * MIB  # of a file that is copied: with one digest
PEER_DESCRIPTION_BYTES_MAX = 4 * MIB  # of what a file with parity is of
PEER_SPREAD = 0.5  # of the time between two saves: what else a commit takes, and a slower network, have the rest
PEER_SPREAD_MAX = 0.9
PEER_SPREAD_S_MAX = 60.0  # a slower copy would spare training little, and a node that is lost costs more steps
PEER_PARTS_UNDER_WAY = 4  # of one copy, before the first one is confirmed
PEER_CONNECTIONS_MAX = 256
PEER_STRANGERS_MAX = 32  # connections that have not shown yet that they know the job's secret
PEER_READS_MAX = 8  # connections of one read
PEER_REBUILD_BYTES = MIB  # of a shard, for each of these that rebuilds: beside the budget
PEER_STRANGER_S = 1.0  # before a newer one may replace it, if all places are taken: a greeting takes milliseconds
PEER_STRANGERS_TOLD_MAX = 20  # log lines on strangers in a burst; one a second on average
PEER_GREETING_S = 10.0  # to connect, and for a whole greeting
PEER_ANSWER_S = 60.0
PEER_SILENCE_S = 5  # a connection whose other side's machine does not answer the system's probes ends after that
PEER_DOWN_S = 5.0  # a node that did not answer is not asked again for so long, where another one can be
PEER_SECRET_BYTES = (16, 1024)

# Journals (every_step).
RECOVERY_S = 60.0  # reading the checkpoint and replaying the journal may take this long, by default
LAG_STEPS = 1  # steps that may not be durable yet when `save` returns, by default
LAG_STEPS_MAX = 64  # each keeps its gradients in memory, and a load digests so many frames at a journal's end
JOURNAL_WINDOWS = 8  # of the state; one is fingerprinted with each step
JOURNAL_ROOM_FRAMES = 5  # that there should be room for when a journal begins: the first one, and what is reserved
JOURNAL_AHEAD_BYTES = 256 * MIB  # of space to have reserved: each time, the file system writes its own journal
JOURNAL_UNSAVED_BYTES_MIN = 64 * MIB  # of gradients since the last save that may be kept; and as many as a state has
JOURNAL_VALUE_BYTES_MAX = 4 * MIB  # of what no optimizer explains, and has changed since the step before
JOURNAL_WHOLE_STEPS_MAX = 64  # saves in a row that are whole because steps before were given up
JOURNAL_RATE_BYTES_PER_S = 500e6  # of reads, until some were measured

# The replica of a state (every_step=Replica(...)): store/replica_wire.py, pipeline/replica_link.py, replica/.
FOLLOWED_AT_ONCE = 16  # steps that a replica makes before it looks at anything else
REPLICA_LOOK_S = 0.2  # after which it looks by itself whether there is something new
REPLICA_BEHIND_STEPS = 100  # a replica that lacks more is told of
REPLICA_END_S = 10.0  # for it to end when training does; then it is killed
REPLICA_ANSWER_S = 10.0  # for it to say what it has come to
REPLICA_PERSIST_S = 600.0  # that the next start waits for what the replica of a dead training makes durable
REPLICA_MEET_S = 120.0  # for the replicas of several ranks to find each other: each imports torch first
REPLICA_ROUND_S = 1.0  # after which those of other ranks than 0 hear of it at the latest
REPLICA_REST_S = 60.0  # from the end of one rank of a training to that of the last one; then its replicas give up
REPLICA_TRIES_MAX = 5  # loads, and steps, that fail one after the other, as training removes what it needs no more
REPLICA_NICE = 10  # its priority is lower than training's by so much

# Tiers.
TIER_LAG = 4  # checkpoints that may wait for a tier: nearer ones keep them, memory no more than its generations
TIER_DRAIN_S = 300.0  # that `close` waits for a tier
TIER_RETRY_S = 1.0  # after a first failure; each later try waits twice as long
TIER_RETRY_S_MAX = 300.0
TIER_ANSWER_S = 10.0  # for farther tiers to answer when the first save begins, or a rewind; then they count as down
FLUSH_YIELD = 4  # a flush waits for a save under way, at most so many times as long as its last batch took

# Paths of a striped store.
PATH_RETRY_S = 1.0  # until a path of a striped store that has failed is tried again; each later try waits twice as long
PATH_RETRY_S_MAX = 300.0
PATH_SAMPLE_BYTES = 32 * MIB  # of which a path's rate is taken; of less, the requests' latency is most of it
PATH_SHARE_MIN = 1 / 64  # of a save: what a slow path gets, so that its rate is known when it is faster again
PATHS_MAX = 64  # of one store

# Memory that is watched page by page is collapsed into huge pages between saves (native/collapse.h).
COLLAPSE_BYTES_MIN = 64 * MIB  # of a state: in a smaller one, `save` protects all small pages in 0.2 ms
COLLAPSE_SHARE = 1 / 8  # of one processor, at most; 2 MiB take about 3 ms of it
COLLAPSE_SKIPS_MAX = 63  # saves without an attempt, after the system refused

# Below this, gathering by windows cannot keep even a slow device busy.
BUDGET_BYTES_MIN = 32 * MIB
REQUEST_BYTES_MIN = 2 * MIB  # a block of the arena holds a request, and any chunk with its block's head and tail
REQUEST_BYTES_MAX = 64 * MIB
QUEUE_DEPTH_MAX = 1024
WORKERS_MAX = 64
TUNING_BYTES_MAX = 64 * KIB  # of a tuning file; a longer file is ignored

Backend = Literal["auto", "io_uring", "posix"]
Direct = Literal["auto", "on", "off"]
Watch = Literal["auto", "digests", "exact", "samples"]
DIGESTED_ON_DEVICES: Collection[Watch] = ("digests", "exact")  # with these, a device digests what it has
Compress = Literal["auto", "off", "derived", "max"]
Direction = Literal["write", "read"]


def whole_number(name: str, value: object) -> int:
    """An option that counts something: any integer except bool, or a float with an integer value (4e9 bytes).

    raises  ArgumentError
    """
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    try:
        if isinstance(whole, bool):
            raise TypeError("a truth value")
        return operator.index(whole)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(
            f"{name} {value!r:.60} is not a whole number", found=type(value).__qualname__, next="give an int"
        ) from None


def _check_engine(backend: str, queue_depth: int | None, request_bytes: int | None, workers: int | None) -> None:
    """Raise ArgumentError for a value that no engine accepts; None is checked when its default is known."""
    if backend not in ("auto", "io_uring", "posix"):
        raise ArgumentError(
            f"backend {backend!r} is not one of 'auto', 'io_uring', 'posix'", next="'auto' is the default"
        )
    if queue_depth is not None and not 1 <= queue_depth <= QUEUE_DEPTH_MAX:
        raise ArgumentError(f"queue_depth {queue_depth} is not within 1..{QUEUE_DEPTH_MAX}", next="16 is the default")
    if request_bytes is not None and (
        request_bytes % BLOCK_BYTES or not REQUEST_BYTES_MIN <= request_bytes <= REQUEST_BYTES_MAX
    ):
        raise ArgumentError(
            f"request_bytes {request_bytes} is not a multiple of 4096 within 2..64 MiB", next="8 << 20 is the default"
        )
    if workers is not None and not 1 <= workers <= WORKERS_MAX:
        raise ArgumentError(
            f"workers {workers} is not within 1..{WORKERS_MAX}", next="the default is one in eight processors"
        )


@dataclass(frozen=True, slots=True)
class Tuning:
    """How one direction moves its bytes on one mount: the defaults, or better settings from `flowstone bench tune`.

    direct_from_bytes  saves and loads of at least this size bypass the page cache, where that works;
                       None: all go through the page cache
    in_place           reads only: EngineOptions.read_in_place; ignored for writes, which go through the arena
                       (docs/decisions/011)
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
            raise ValueError(f"direct_from_bytes {self.direct_from_bytes} is not a size")


class Share(NamedTuple):
    """What part of a save's bytes a path of a striped store is to get: `weight`, above 0, against those of the others.
    """

    path: int
    weight: float


# Measured by `flowstone bench tune`, on ext4 over a virtio disk of 2 to 4 GB/s: no other size or depth is faster
# beyond the noise, and direct is 1.4 to 2 times as fast as buffered from 4 MiB on, and not slower down to 256 KiB.
WRITE_DEFAULTS = Tuning(backend="auto", queue_depth=16, request_bytes=8 * MIB, workers=WORKERS_DEFAULT, in_place=False)
READ_DEFAULTS = Tuning(
    backend="auto", queue_depth=16, request_bytes=READ_REQUEST_BYTES, workers=READ_WORKERS_DEFAULT, in_place=False
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How bytes move, in both directions. Options not given are as tuned for the mount, else a measured default.

    `flowstone bench tune` measures a mount, each direction by itself. An option given here overrides the tuning.

    backend         "auto" takes io_uring where the kernel and the container allow it, else POSIX threads
    direct          bypass the page cache ("auto": where O_DIRECT works, probed with real buffers, and is faster)
    queue_depth     requests in flight; 1 to 1024
    request_bytes   longest request, a multiple of 4096 from 2 MiB; more than 64 MiB gained nothing on any disk measured
    workers         threads that copy, digest and encode; by default one in eight processors, from two to eight, and
                    for loads one in four, up to five; or one on a machine with two, as long as `compress` is "off"
    read_in_place   loads read straight into memory that has the file's alignment. By default off on disks: the heap's
                    small pages make small device requests, and that takes 1.8 times as long; and on where the file's
                    pages are the storage (tmpfs, DAX): there it takes half the time. Anywhere it takes 140 MB less
                    memory (docs/performance/in-place.md)
    write_bytes_per_s  limit for the saves of this process on a shared device or network, also when a caller waits for
    them; None: no limit. Even without it, a lazy save writes only as fast as needed to end before the fence
    compress        "max": tensors of 64 KiB and more are encoded where that makes them shorter, without loss; other
    readers of safetensors do not find those by name (docs/FORMAT.md, Codecs). "off": never.
    "auto": from the second save on, those tensors with which saves end sooner, by what the last one took.
    With each but "off", tensors that follow from others are not stored: copies, and 16-bit weights that are a
    rounded float32 master copy. "derived": nothing else is done
    kept_bytes      host memory of this rank for what chunks were when they were last stored by themselves: with
    `compress`, later saves encode what has changed of them, as long as that is shorter (docs/SMALLER.md). 0: none
    watch           how changes before capture are detected in tensors captured after `save` returned (docs/SAVING.md).
    "auto": every write to host memory that the system can watch is detected; of other memory, some bytes are compared.
    "exact": every write is detected, on a GPU every one that the capture shows, or the save is refused.
    "samples": some bytes are compared.
    "digests": as "auto", and a GPU digests all that is captured later, and all replicas, when `save` is called: it
    reads that at its memory's rate, before what comes next in the current stream
    collapse        what is watched exactly is collapsed into huge pages, in the background between saves, where the
    system allows huge pages: a thread of low priority takes at most an eighth of one processor, and no memory. Off:
    memory is left as it is, and `save` blocks 3 ms longer for each GB of small pages
    share_reads     bytes that several ranks of one node need are read by one of them and passed on through shared
    memory, where reads bypass the page cache. Off: each rank reads for itself
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
                raise ArgumentError(f"{name} {value!r:.60} is neither True nor False", next="give one of them")
        if self.watch not in ("auto", "digests", "exact", "samples"):
            raise ArgumentError(
                f"watch {self.watch!r} is not one of 'auto', 'digests', 'exact', 'samples'",
                next="'auto' is the default",
            )
        if self.compress not in ("auto", "off", "derived", "max"):
            raise ArgumentError(
                f"compress {self.compress!r} is not one of 'auto', 'off', 'derived', 'max'", next="'off' is the default"
            )
        if self.kept_bytes < 0:
            raise ArgumentError(f"kept_bytes {self.kept_bytes} is less than none", next="give 0 to keep nothing")
        if self.write_bytes_per_s is not None and self.write_bytes_per_s < REQUEST_BYTES_MIN:
            raise ArgumentError(
                f"write_bytes_per_s {self.write_bytes_per_s} is less than one request of 2 MiB a second",
                next="give more, or leave it out for the full rate of the device",
            )
        if self.direct not in ("auto", "on", "off"):
            raise ArgumentError(
                f"direct {self.direct!r} is not one of 'auto', 'on', 'off'", next="'auto' is the default"
            )
        _check_engine(self.backend, self.queue_depth, self.request_bytes, self.workers)


@dataclass(frozen=True, slots=True)
class Keep:
    """Which committed checkpoints retention spares; the newest is always spared.

    last   the newest this many; at least 1
    every  also each step that is a multiple of this; None for none
    """

    last: int = 1
    every: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "last", whole_number("Keep: last", self.last))
        if self.every is not None:
            object.__setattr__(self, "every", whole_number("Keep: every", self.every))
        if self.last < 1:
            raise ArgumentError(
                f"Keep(last={self.last}): at least the newest checkpoint is kept",
                next="give 1 or more; keep=None keeps all"
            )
        if self.every is not None and self.every < 1:
            raise ArgumentError(
                f"Keep(every={self.every}) is not a positive number of steps",
                next="leave it out to keep only the newest"
            )


KeepRule = Callable[[Sequence[int]], Collection[int]]
"""A retention policy of the caller's: given the store's own committed steps, ascending, it returns those to keep.

The last step is the one that was just committed; it is kept in any case. Called after each commit, on rank 0, on a
thread of the Checkpointer. If it raises, the log says so, and nothing is removed.
"""
