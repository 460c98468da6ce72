"""The task of a process that plans, and its results."""

from __future__ import annotations

import msgspec


class Task(msgspec.Struct, frozen=True):
    """One job: names of bench.scaling.state's tables, how many ranks, and the layout that it is loaded into."""

    model: str
    how: str
    ranks: int
    target: str
    directory: str


class Spent(msgspec.Struct, frozen=True):
    """Of one phase: by the clock, of the processor, and by how much memory's high-water mark was above what was there.
    """

    seconds: float
    cpu_s: float
    peak_bytes: int
    resident_bytes: int


class Outcome(msgspec.Struct, frozen=True):
    """The cost of planning a job of `ranks` ranks.

    held_pieces    of all ranks; replicas count once for each rank
    pieces         that are written
    message_bytes  of the largest layout message of a rank
    posted         values put into the job's store by all ranks, for the first plan
    posted_bytes   of these
    commit_bytes   of the largest receipt of a rank; posted_receipts_bytes of all, on the way through the tree
    spent          by phase
    largest, mean, bound  bytes of the largest writer, of the mean, and the least that ownership allows the largest
    cached_s       the time of `save` on a rank with a cached plan: median of many, by the clock
    reads          rows of the load plan
    """

    held_pieces: int
    pieces: int
    chunks: int
    state_bytes: int
    message_bytes: int
    posted: int
    posted_bytes: int
    commit_bytes: int
    posted_receipts_bytes: int
    largest: int
    mean: float
    bound: int
    largest_piece: int
    cached_s: float
    index_bytes: int
    manifest_bytes: int
    segments: int
    reads: int
    read_bytes: int
    spent: dict[str, Spent]


class Case(msgspec.Struct, frozen=True):
    task: Task
    outcome: Outcome | None
    error: str | None = None


class Run(msgspec.Struct, frozen=True):
    command: str
    started_utc: str
    machine: dict[str, str]
    programme: str
    cases: tuple[Case, ...]
