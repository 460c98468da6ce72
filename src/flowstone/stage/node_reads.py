"""Node reads: of chunks that several ranks of a node need, each rank reads a part; all copy them from shared rings.

    each rank reads batch k+1 into one half of its ring buffer, while all copy batch k from the other halves
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
from flowstone.plan.assign_readers import ReaderAssignment, assign_readers
from flowstone.plan.read import ReadPlan, part_of
from flowstone.stage.scatter import (
    Fill,
    Runs,
    Scattered,
    Targets,
    joined,
    locate_chunks,
    nothing_read,
    read_rows,
    scatter,
    scatter_by,
)
from flowstone.store.base import Reading, Store, finish_reading, stop_reading
from flowstone.store.shared_ring import Announcement, Counter, PeerRing, RingReading, SharedRing

_POLL_S = 0.0005  # a batch takes a hundred times as long
_LOOK_S = 1.0  # between two checks whether the other ranks are alive


class LocalPeer(msgspec.Struct, frozen=True):
    """A rank on this node, and the location of its ring buffer."""

    rank: int
    announcement: Announcement


class ReadRequest:
    """This rank's ring buffer, announcing the chunks that the rank needs."""

    def __init__(self, index: Index, plan: ReadPlan) -> None:
        """Raises OSError if there can be no ring buffer."""
        message = np.stack([plan.piece, plan.first, plan.last], axis=1).astype("<i8").tobytes()
        # An extent's offset refers to its first byte, even if only later chunks of it are in the ring buffer.
        room = max(BLOCK_BYTES + len(message), int(index.chunks.length.max(initial=0)))
        ring_at = -(-room // BLOCK_BYTES) * BLOCK_BYTES
        self.ring = SharedRing(message, ring_at=ring_at, ring_bytes=2 * RING_HALF_BYTES)

    def close(self) -> None:
        self.ring.close()


class NodeReads:
    """One rank's side of the shared reads."""

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
            for one in peers:
                opened = PeerRing(one.announcement)
                stack.callback(opened.close)
                self._open.append(opened)
            self._engine = _native.Engine(
                backend="posix", queue_depth=4, request_bytes=READ_REQUEST_BYTES, workers=WORKERS_DEFAULT,
                background=True,
            )
            stack.callback(self._engine.close)
            wanted = [np.frombuffer(one.message, "<i8").reshape(-1, 3).astype(np.int64) for one in self._open]
            self._filled_bytes = 0  # read from the store into ring buffers, so far
            self._filled_spans: list[_native.SpanColumns] = []  # of those reads
            self.assigned: ReaderAssignment = assign_readers(
                wanted, me, index.chunks, half_bytes=RING_HALF_BYTES
            )
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def run(
        self, store: Store, paths: Sequence[str], fill: Fill, arena: _native.Arena,
        on_progress: Callable[[int], None],
    ) -> Scattered:
        """Read all of `fill`: first the shared chunks, then those that only this rank needs. Blocks; see `scatter`.

        A failure here or on a peer is in the result, and ends the load on all peers.
        """
        parts: list[Scattered] = []
        filling: Reading | None = None
        done, culprit = 0, self._peers[self._me].rank

        def report(now: int) -> None:
            on_progress(done + now)

        try:
            for batch in range(self.assigned.batches):
                if filling is None:
                    filling = self._begin_filling(batch, store, paths, arena)
                self._end_filling(batch, filling, parts)
                filling = None
                self._await(Counter.TAKEN, batch)  # done with the batch before, which was in the half to be filled
                if batch + 1 < self.assigned.batches:
                    filling = self._begin_filling(batch + 1, store, paths, arena)
                self._await(Counter.FILLED, batch + 1)
                part, runs = self._part(batch)
                parts.append(self._take(replace(fill, plan=part), runs, arena, report))
                _check(parts[-1])
                done += part.bytes
                self._request.ring.tell(Counter.TAKEN, batch + 1)
            culprit = -1
        except (FlowstoneError, _EndedError) as error:
            if isinstance(error, RankError):
                culprit = error.rank
            if isinstance(error, FlowstoneError):
                parts.append(Scattered(nothing_read(error), (), ()))
            return self._joined(parts)
        finally:
            self._request.ring.tell(Counter.FAILED, culprit + 1)
            if filling is not None:
                stop_reading(filling)
        alone = self.assigned.alone
        rest = part_of(self._plan, self._index, alone, self._plan.first[alone], self._plan.last[alone])
        parts.append(scatter(store, paths, replace(fill, plan=rest), arena, report))
        return self._joined(parts)

    def _begin_filling(self, batch: int, store: Store, paths: Sequence[str], arena: _native.Arena) -> Reading:
        """Start reading this rank's part of a batch into its ring buffer."""
        assigned, index = self.assigned, self._index
        runs = np.flatnonzero((assigned.batch == batch) & (assigned.reader == self._me))
        piece, first, last = assigned.piece[runs], assigned.first[runs], assigned.last[runs]
        at = self._request.ring.address + (batch % 2) * RING_HALF_BYTES + assigned.position[runs] - first * CHUNK_BYTES
        rows = read_rows(index, Runs(piece, first, last), Targets.dense(at.astype(np.uint64)))
        self._filled_bytes += int(index.chunks.stored_bytes(piece, first, last).sum())
        return store.read_extents(paths, rows, arena, wanted_bytes=self._plan.bytes)

    def _end_filling(self, batch: int, filling: Reading, parts: list[Scattered]) -> None:
        receipt = finish_reading(filling)
        self._filled_spans += receipt.spans
        found = Scattered(receipt, (), locate_chunks(self._index, receipt))
        if found.failed:
            parts.append(found)
        _check(found)
        self._request.ring.tell(Counter.FILLED, batch + 1)

    def _part(self, batch: int) -> tuple[ReadPlan, NDArray[np.int64]]:
        """The part of the plan that this rank copies from a batch, and the runs that contain it."""
        rows, runs = self.assigned.wants
        now = self.assigned.batch[runs] == batch
        rows, runs = rows[now], runs[now]
        return part_of(self._plan, self._index, rows, self.assigned.first[runs], self.assigned.last[runs]), runs

    def _take(
        self, fill: Fill, runs: NDArray[np.int64], arena: _native.Arena, report: Callable[[int], None]
    ) -> Scattered:
        """Copy runs out of the ring buffers."""
        assigned, part = self.assigned, fill.plan
        half = (assigned.batch[runs] % 2) * RING_HALF_BYTES
        ring_at = np.array([one.announcement.ring_at for one in self._peers], np.int64)[assigned.reader[runs]]
        offset = ring_at + half + assigned.position[runs] - assigned.first[runs] * CHUNK_BYTES
        files = [one.file for one in self._open]

        def read(rows: _native.ReadExtents) -> Reading:
            request_bytes = min(arena.block_bytes, READ_REQUEST_BYTES)
            return RingReading(self._engine.read(arena, files, rows, in_place=False, request_bytes=request_bytes))

        copies = Runs(part.piece, part.first, part.last, assigned.reader[runs], offset)
        found = scatter_by(read, fill, copies, report)
        return replace(found, bytes=0, shared_bytes=part.bytes)

    def _joined(self, parts: Sequence[Scattered]) -> Scattered:
        """The results of several reads, as one."""
        found = joined(parts)
        receipt = replace(found.receipt, spans=[*self._filled_spans, *found.receipt.spans])
        return replace(found, receipt=receipt, bytes=self._filled_bytes + found.bytes)

    def _await(self, counter: Counter, count: int) -> None:
        """Wait until all peers have counted so far. Raises RankError for a peer that fails, is gone, or is late."""
        since = looked = time.monotonic()
        while True:
            behind = [at for at, one in enumerate(self._open) if one.count(counter) < count]
            if not behind:
                return
            now = time.monotonic()
            failed = [of for one in self._open if (of := one.count(Counter.FAILED))]
            if failed:
                raise self._blamed(failed[0] - 1, "cannot go on with the load")
            if now - looked > _LOOK_S:
                looked = now
                gone = [at for at in behind if not self._open[at].is_alive()]
                if gone:
                    raise self._blamed(self._peers[gone[0]].rank, "disappeared during the load")
            if now - since > self._deadline_s:
                late = self._peers[behind[0]].rank
                raise self._blamed(late, f"has read nothing for {now - since:.0f} s during the load")
            time.sleep(_POLL_S)

    def _blamed(self, rank: int, what: str) -> RankError:
        return RankError(
            f"rank {rank} {what}", rank=rank, phase="load", next="look at that rank's log, and load again before saving"
        )


class _EndedError(Exception):
    """Ends the loop; the failure itself is among the parts."""


def _check(found: Scattered) -> None:
    if found.failed:
        raise _EndedError
