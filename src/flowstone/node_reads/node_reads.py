"""Node reads: chunks that several ranks of a node need are divided between these ranks. Each rank reads some of the
chunks into a ring buffer in shared memory, and all ranks copy from these buffers.

    Each rank reads batch k+1 into one half of its ring buffer, while all ranks copy batch k from the other halves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import BLOCK_BYTES, CHUNK_BYTES, READ_REQUEST_BYTES, RING_HALF_BYTES, WORKERS_DEFAULT
from flowstone.errors import FlowstoneError, RankError
from flowstone.format.index import Index
from flowstone.node_reads.assign_readers import ReaderAssignment, assign_readers
from flowstone.node_reads.shared_ring import PeerRing, RingAnnouncement, RingCounter, RingReadHandle, SharedRing
from flowstone.plan.read import ReadPlan, select_runs
from flowstone.stage.scatter import (
    ReadResult,
    ReadTargets,
    StoredChunkRuns,
    TargetRows,
    locate_chunks,
    merge_results,
    nothing_read,
    read_rows,
    scatter,
    scatter_by,
)
from flowstone.store.base import ReadHandle, Store, finish_reading, stop_reading

_POLL_S = 0.0005  # time between two checks of the other ranks' counters; a batch takes about a hundred times as long
_LOOK_S = 1.0  # time between two checks of whether the other ranks are alive


class LocalPeer(msgspec.Struct, frozen=True):
    """A rank of this node, and where other processes find its ring buffer."""

    rank: int
    announcement: RingAnnouncement


class ReadRequest:
    """This rank's ring buffer. It begins with a message: the list of the chunks that this rank needs."""

    def __init__(self, index: Index, plan: ReadPlan) -> None:
        """Allocate the ring buffer. Raises OSError if the system refuses."""
        message = np.stack([plan.piece, plan.first, plan.last], axis=1).astype("<i8").tobytes()
        # Reads are given the offset of a piece's first byte, even if only later chunks of the piece are in the ring
        # buffer. The space before the ring is as long as the longest piece, so that no such offset is negative.
        ring_bytes = max(BLOCK_BYTES + len(message), int(index.chunks.length.max(initial=0)))
        ring_at = -(-ring_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self.ring = SharedRing(message, ring_at=ring_at, ring_bytes=2 * RING_HALF_BYTES)

    def close(self) -> None:
        self.ring.close()


class NodeReads:
    """Performs the shared reads of this rank: reads its chunks for all ranks, and copies the chunks that it needs."""

    def __init__(
        self, request: ReadRequest, peers: Sequence[LocalPeer], me: int, index: Index, plan: ReadPlan, *,
        deadline_s: float
    ) -> None:
        """Open the ring buffers of all `peers`; this rank is number `me` of them.

        raises  OSError if the system refuses
        """
        self._request, self._peers, self._me, self._index, self._plan = request, peers, me, index, plan
        self._deadline_s = deadline_s
        self._open: list[PeerRing] = []
        with ExitStack() as stack:
            for peer in peers:
                opened = PeerRing(peer.announcement)
                stack.callback(opened.close)
                self._open.append(opened)
            self._engine = _native.Engine(
                backend="posix", queue_depth=4, request_bytes=READ_REQUEST_BYTES, workers=WORKERS_DEFAULT,
                background=True,
            )
            stack.callback(self._engine.close)
            requests = [np.frombuffer(ring.message, "<i8").reshape(-1, 3).astype(np.int64) for ring in self._open]
            self._filled_bytes = 0  # bytes read from the store into the ring buffer so far
            self._filled_spans: list[_native.SpanColumns] = []  # spans of these reads
            self.assigned: ReaderAssignment = assign_readers(
                requests, me, index.chunks, half_bytes=RING_HALF_BYTES
            )
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def run(
        self, store: Store, paths: Sequence[str], fill: ReadTargets, arena: _native.Arena,
        on_progress: Callable[[int], None],
    ) -> ReadResult:
        """Read all chunks that `fill` lists into its targets: first the shared chunks, then those that only this rank
        needs. Returns when all is read; see `scatter`.

        If this rank or a peer has failed, the result contains that failure, which ends the load on all peers.
        """
        parts: list[ReadResult] = []
        filling: ReadHandle | None = None
        done, culprit = 0, self._peers[self._me].rank

        def report(now: int) -> None:
            on_progress(done + now)

        try:
            for batch in range(self.assigned.batches):
                if filling is None:
                    filling = self._begin_filling(batch, store, paths, arena)
                self._end_filling(batch, filling, parts)
                filling = None
                self._await(RingCounter.TAKEN, batch)  # peers have copied what was in the half that is filled next
                if batch + 1 < self.assigned.batches:
                    filling = self._begin_filling(batch + 1, store, paths, arena)
                self._await(RingCounter.FILLED, batch + 1)
                part, runs = self._part(batch)
                parts.append(self._take(replace(fill, plan=part), runs, arena, report))
                _check(parts[-1])
                done += part.bytes
                self._request.ring.set_counter(RingCounter.TAKEN, batch + 1)
            culprit = -1
        except (FlowstoneError, _EndedError) as error:
            if isinstance(error, RankError):
                culprit = error.rank
            if isinstance(error, FlowstoneError):
                parts.append(ReadResult(nothing_read(error), (), ()))
            return self._joined(parts)
        finally:
            self._request.ring.set_counter(RingCounter.FAILED, culprit + 1)
            if filling is not None:
                stop_reading(filling)
        alone = self.assigned.unshared
        rest = select_runs(self._plan, self._index, alone, self._plan.first[alone], self._plan.last[alone])
        parts.append(scatter(store, paths, replace(fill, plan=rest), arena, report))
        return self._joined(parts)

    def _begin_filling(self, batch: int, store: Store, paths: Sequence[str], arena: _native.Arena) -> ReadHandle:
        """Start reading this rank's part of a batch into its ring buffer."""
        assigned, index = self.assigned, self._index
        runs = np.flatnonzero((assigned.batch == batch) & (assigned.reader == self._me))
        piece, first, last = assigned.piece[runs], assigned.first[runs], assigned.last[runs]
        half = self._request.ring.address + (batch % 2) * RING_HALF_BYTES
        address = half + assigned.position[runs] - first * CHUNK_BYTES
        rows = read_rows(index, StoredChunkRuns(piece, first, last), TargetRows.dense(address.astype(np.uint64)))
        self._filled_bytes += int(index.chunks.stored_bytes(piece, first, last).sum())
        return store.read_extents(paths, rows, arena, wanted_bytes=self._plan.bytes)

    def _end_filling(self, batch: int, filling: ReadHandle, parts: list[ReadResult]) -> None:
        receipt = finish_reading(filling)
        self._filled_spans += receipt.spans
        result = ReadResult(receipt, (), locate_chunks(self._index, receipt))
        if result.failed:
            parts.append(result)
        _check(result)
        self._request.ring.set_counter(RingCounter.FILLED, batch + 1)

    def _part(self, batch: int) -> tuple[ReadPlan, NDArray[np.int64]]:
        """The rows of this rank's read plan that it copies from a batch, and the runs that contain their chunks."""
        rows, runs = self.assigned.needed
        now = self.assigned.batch[runs] == batch
        rows, runs = rows[now], runs[now]
        return select_runs(self._plan, self._index, rows, self.assigned.first[runs], self.assigned.last[runs]), runs

    def _take(
        self, fill: ReadTargets, runs: NDArray[np.int64], arena: _native.Arena, report: Callable[[int], None]
    ) -> ReadResult:
        """Copy runs of chunks out of the ring buffers into the state's memory, and verify them."""
        assigned, part = self.assigned, fill.plan
        half = (assigned.batch[runs] % 2) * RING_HALF_BYTES
        ring_at = np.array([peer.announcement.ring_at for peer in self._peers], np.int64)[assigned.reader[runs]]
        offset = ring_at + half + assigned.position[runs] - assigned.first[runs] * CHUNK_BYTES
        files = [ring.file for ring in self._open]

        def read(rows: _native.ReadExtents) -> ReadHandle:
            request_bytes = min(arena.block_bytes, READ_REQUEST_BYTES)
            options = _native.ReadOptions(in_place=False, request_bytes=request_bytes)
            return RingReadHandle(self._engine.read(arena, files, rows, options))

        copies = StoredChunkRuns(part.piece, part.first, part.last, assigned.reader[runs], offset)
        result = scatter_by(read, fill, copies, report)
        return replace(result, bytes=0, shared_bytes=part.bytes)

    def _joined(self, parts: Sequence[ReadResult]) -> ReadResult:
        """The combined result of several reads."""
        result = merge_results(parts)
        receipt = replace(result.receipt, spans=[*self._filled_spans, *result.receipt.spans])
        return replace(result, receipt=receipt, bytes=self._filled_bytes + result.bytes)

    def _await(self, counter: RingCounter, count: int) -> None:
        """Wait until all peers' counters reach `count`. Raises RankError for a peer that fails, dies or is late."""
        since = looked = time.monotonic()
        while True:
            behind = [number for number, ring in enumerate(self._open) if ring.count(counter) < count]
            if not behind:
                return
            now = time.monotonic()
            failed = [of for ring in self._open if (of := ring.count(RingCounter.FAILED))]
            if failed:
                raise self._blamed(failed[0] - 1, "cannot continue the load")
            if now - looked > _LOOK_S:
                looked = now
                gone = [number for number in behind if not self._open[number].is_alive()]
                if gone:
                    raise self._blamed(self._peers[gone[0]].rank, "disappeared during the load")
            if now - since > self._deadline_s:
                late = self._peers[behind[0]].rank
                raise self._blamed(late, f"has read nothing for {now - since:.0f} s during the load")
            time.sleep(_POLL_S)

    def _blamed(self, rank: int, act: str) -> RankError:
        return RankError(
            f"rank {rank} {act}", rank=rank, phase="load", next="look at that rank's log, and load again before saving"
        )


class _EndedError(Exception):
    """Ends the loop over batches after a failure. The failure itself is in the result of one of the reads."""


def _check(result: ReadResult) -> None:
    if result.failed:
        raise _EndedError
