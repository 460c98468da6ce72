"""One job, planned in a process of its own: `python -m bench.scaling.measure TASK.json OUTCOME.json`.

Every phase runs the product's own code on the messages of thousands of ranks; only the ranks are simulated. The process
keeps to one core.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from bench.meter import Meter, resident_bytes
from bench.scaling.bound import least_largest, ownership
from bench.scaling.records import Outcome, Spent, Task
from bench.scaling.state import MODELS, PARALLELISMS, RANKS_PER_NODE, Job, Sizes, layout_of, pieces_of
from flowstone.coordination.messages import (
    Contribution,
    PackedLayout,
    PlanTerms,
    Proposal,
    ReplicaDigests,
    WriterShare,
    assignment_of,
    compressed,
    pack,
    pack_written,
    packed,
    unpack,
    written_by,
)
from flowstone.coordination.rank_zero import RankZero
from flowstone.format.digest import chunk_digests
from flowstone.format.index import decode_index
from flowstone.format.manifest import (
    INDEX_NAME,
    OBJECTS_NAME,
    FileRow,
    IoRecord,
    Manifest,
    SegmentRow,
    encode_manifest,
)
from flowstone.plan.assign_writers import WriterAssignment
from flowstone.plan.global_index import global_index
from flowstone.plan.match import CheckpointTensors, StateRequest, match
from flowstone.plan.read import plan_reads
from flowstone.plan.write import Writer, data_offsets
from flowstone.ranks import Decision
from flowstone.ranks.exchange import Exchange, ExchangeSide
from flowstone.ranks.failure_detector import FailureDetector
from flowstone.ranks.kv_store import Mailbox
from flowstone.save.plan_cache import plan_save
from flowstone.state import StateDescription, VersionCounters
from flowstone.store.base import Receipt
from flowstone.store.local import LocalStore
from flowstone.table.pieces import Layout, Pieces, Places

CACHED_TIMES = 51
SAMPLE = 1  # the sampled rank: not the leader
SAMPLED = 33  # ranks whose receipts are encoded; those of others are assumed to be as long
FAN = 16
BOUND_WITHIN = 1e-4


class Bench:
    """The phases in order, with their costs."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._model = MODELS[task.model]
        self._job = Job(self._model, PARALLELISMS[task.how], task.ranks)
        self._sizes = Sizes()
        self.spent: dict[str, Spent] = {}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        gc.collect()
        before = resident_bytes()
        meter = Meter()
        yield
        reading = meter.read()
        extra_bytes = max(0, reading.peak_bytes - before)
        self.spent[name] = Spent(reading.seconds, reading.cpu_s, extra_bytes, reading.peak_bytes)

    def run(self) -> Outcome:
        job, task = self._job, self._task
        layouts = [job.held(rank) for rank in range(task.ranks)]
        layout = layout_of(layouts[SAMPLE])
        with self._phase("say"):
            own = pack(layout)
        messages, made = _said(layouts)
        assert made == own, "a made-up rank says what a real one would"
        kv_store = _MemoryStore()
        rank_zero = RankZero(task.ranks)
        with self._phase("first plan"):
            decision = rank_zero.assign([unpack(message, Proposal) for message in messages])
        posted, posted_bytes = _exchanged(messages, decision, kv_store)
        shared = rank_zero._assignment
        assert shared is not None
        loads = np.array([self._sizes(one)[of].sum() for one, of in zip(shared.layouts, shared.writes, strict=True)])
        owned, _ = ownership(layouts)
        bound = least_largest(owned, task.ranks, within=BOUND_WITHIN)
        assert int(loads.sum()) == job.state_bytes, "every byte once"
        cached_s = self._write_plan(layout, decision)
        receipts = self._receipts(shared)
        index, rows, manifest = self._commit(shared, rank_zero)
        reads, read_bytes, chunks = self._load(index, rows)
        return Outcome(
            held_pieces=sum(len(layout.names) for layout in layouts), pieces=sum(map(len, shared.writes)),
            chunks=chunks, state_bytes=job.state_bytes, message_bytes=max(map(len, messages)), posted=posted,
            posted_bytes=posted_bytes, commit_bytes=max(receipts),
            posted_receipts_bytes=round(statistics.fmean(receipts) * _hops(task.ranks)),
            largest=int(loads.max()), mean=float(loads.mean()), bound=bound,
            largest_piece=max(int(self._sizes(layout).max()) for layout in shared.layouts[::RANKS_PER_NODE]),
            cached_s=cached_s, index_bytes=len(index),
            manifest_bytes=len(manifest), segments=len(rows), reads=reads, read_bytes=read_bytes, spent=self.spent,
        )

    def _write_plan(self, layout: Layout, decision: Decision) -> float:
        """The last rank's plan, and the time of a save with a cached one."""
        count = len(layout.pieces)
        nowhere = np.zeros(count, np.uint64)
        uncounted = VersionCounters.empty()
        described = StateDescription(layout, Places(nowhere, {}, [None] * count), {}, {}, (), uncounted, deque())
        part = unpack(decision.each[SAMPLE], WriterShare)
        assignment = assignment_of(unpack(decision.common, PlanTerms), layout, part)
        with self._phase("write plan"):
            planned = plan_save(described, None, assignment, fence="manual", writer=Writer(SAMPLE))
        again = msgspec.structs.replace(assignment, plan="next")

        def cached() -> None:
            known = plan_save(described, planned, again, fence="manual", writer=Writer(SAMPLE))
            data_offsets(known.plan, known.places(described).address)

        return statistics.median(_timed(cached) for _ in range(CACHED_TIMES))

    def _receipts(self, shared: WriterAssignment) -> list[int]:
        """Lengths of the ranks' receipts."""
        chance = np.random.default_rng(1)
        receipts = []
        ranks = sorted(set(np.linspace(0, len(shared.layouts) - 1, SAMPLED).astype(int).tolist()))
        for rank in ranks:
            lengths = self._sizes(shared.layouts[rank])[shared.writes[rank]]
            count = len(lengths)
            chunks = int((-(-lengths // (1 << 20))).sum())
            made = Contribution(
                [SegmentRow(0, None, f"rank-{rank:05d}.safetensors", int(lengths.sum()), 4096, "0" * 16)],
                np.zeros(count, np.uint32), np.cumsum(-(-lengths // 4096) * 4096 + 4096).astype(np.uint64),
                Receipt(None, chance.integers(0, 1 << 64, chunks, np.uint64), _IO),
                {"step": b"1"}, {}, {"step": 1}, ReplicaDigests(None, np.zeros(0, np.uint16)),
            )
            receipts.append(len(pack_written(written_by(made, "p" * 16, "d" * 24, 1))))
        return receipts

    def _commit(self, shared: WriterAssignment, rank_zero: RankZero) -> tuple[bytes, list[SegmentRow], bytes]:
        """The index and manifest of all ranks, as rank 0 makes them in every save."""
        counts = list(map(len, shared.writes))
        segment = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
        lengths = [self._sizes(layout)[writes] for layout, writes in zip(shared.layouts, shared.writes, strict=True)]
        offsets = np.concatenate([4096 + np.cumsum(of) - of for of in lengths]).astype(np.uint64)
        chunks = int(sum((-(-of // (1 << 20))).sum() for of in lengths))
        rows = [
            SegmentRow(rank, None, f"rank-{rank:05d}.safetensors", 4096 + int(of.sum()), 4096, "0" * 16)
            for rank, of in enumerate(lengths)
        ]
        del lengths
        digests = np.arange(chunks, dtype=np.uint64)
        with self._phase("index"):
            frame, piece_order, chunk_order = global_index(
                shared.layouts, shared.writes, rank_zero._all_aliases(), segment
            )
            index = frame.fill(offsets[piece_order], digests[chunk_order])
            totals = frame.totals
            del frame, piece_order, chunk_order
        del segment, offsets, digests
        with self._phase("manifest"):
            manifest = encode_manifest(Manifest(
                step=1, id="0" * 16, store="0" * 32, created="", writer="", ranks=len(counts), segments=tuple(rows),
                index=FileRow(INDEX_NAME, len(index), chunk_digests(index)),
                objects=FileRow(OBJECTS_NAME, 2, chunk_digests(b"{}")), tensors=totals.tensors, pieces=totals.pieces,
                data_bytes=totals.data_bytes, io=_IO,
            ))
        store = LocalStore(self._task.directory)
        with self._phase("write index"):
            store.put(f"index-{os.getpid()}", index)
        store.remove(f"index-{os.getpid()}")
        return index, rows, manifest

    def _load(self, index: bytes, rows: Sequence[SegmentRow]) -> tuple[int, int, int]:
        """The reads of the middle rank of a job with another layout."""
        target = Job(self._model, PARALLELISMS[self._task.target], self._task.ranks)
        pieces = pieces_of(target.held(self._task.ranks // 2))
        with self._phase("open index"):
            table = decode_index(index, segments=rows, path=INDEX_NAME)
        elsewhere = set(table.tensors.names)
        with self._phase("load plan"):
            requested = StateRequest(pieces, (), ("model", "optimizer"))
            matched = match(requested, CheckpointTensors(table, table.rows()), (), other_rank_names=elsewhere)
            plan = plan_reads(table, pieces.take(matched.positions), matched.rows)
        return len(plan.piece), plan.bytes, len(table.chunks.digest)


_IO = IoRecord("io_uring", 4096, 8 << 20, 16, 0, 0)


class _MemoryStore:
    """The job's key-value store, in this process; Mailbox counts its messages."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return int(self._values[key])

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None


def _exchanged(messages: Sequence[bytes], decision: Decision, kv_store: _MemoryStore) -> tuple[int, int]:
    """Run the agreement on a plan through its tree, rank after rank: children before parents, so that none waits."""
    ranks = len(messages)
    mailboxes = [Mailbox(kv_store) for _ in range(ranks)]
    detector = FailureDetector(kv_store)
    sides = [
        Exchange(ExchangeSide(mailbox, detector, rank, ranks, FAN, 600.0, 600.0), "1", "the plan", 1)
        for rank, mailbox in enumerate(mailboxes)
    ]
    for rank in reversed(range(ranks)):
        received = sides[rank].collect_messages(messages[rank])
    assert [len(sent.payload) for sent in sorted(received, key=lambda sent: sent.rank)] == list(map(len, messages))
    assert sides[0].claim_decision()
    sides[0].reach_decision(received, lambda _: decision)
    for side in sides:
        assert side.read_outcome().failure is None
        side.read_own_part()
    return sum(mailbox.sent for mailbox in mailboxes), sum(mailbox.sent_bytes for mailbox in mailboxes)


def _said(layouts: Sequence[Pieces]) -> tuple[list[bytes], PackedLayout | None]:
    """Each rank's message, and the layout in that of SAMPLE. The common parts of ranks are encoded once."""
    known: dict[tuple[int, int, int], PackedLayout] = {}
    messages, made = [], None
    for rank, table in enumerate(layouts):
        key = id(table.tensors), id(table.parts), id(table.kinds)
        if key not in known:
            known[key] = packed(table, [])
        layout = msgspec.structs.replace(known[key], boxes=compressed(table.boxes))
        node = f"node-{rank // RANKS_PER_NODE}"
        messages.append(msgspec.msgpack.encode(Proposal(1, node, None, layout)))
        if rank == SAMPLE:
            made = layout
    return messages, made


def _hops(ranks: int) -> int:
    """How often a message is posted on its way from each rank to rank 0, all ranks together."""
    hops = 0
    for rank in range(1, ranks):
        while rank:
            rank = (rank - 1) // FAN
            hops += 1
    return hops


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main(task_path: str, outcome_path: str) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    task = msgspec.json.decode(Path(task_path).read_bytes(), type=Task)
    Path(outcome_path).write_bytes(msgspec.json.encode(Bench(task).run()))


if __name__ == "__main__":
    main(*sys.argv[1:])
