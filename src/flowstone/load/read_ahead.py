"""Read-ahead: a checkpoint of small tensors is read while the state is described and compared with it.

For small tensors, finding the memory into which they are loaded takes as long as reading them. So the bytes are read
and verified into staging memory, and stay there until state and checkpoint are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flowstone._native import VERIFY_ONLY, Arena, ReadExtents
from flowstone.config import PACKED_BELOW_BYTES, READ_AHEAD_BYTES_MIN, READ_ARENA_BYTES
from flowstone.errors import FlowstoneError
from flowstone.format.index import Index
from flowstone.plan.match import section_of
from flowstone.plan.read import ReadPlan, select_runs
from flowstone.reading.checkpoint import Checkpoint
from flowstone.stage.arena import open_read_arena
from flowstone.stage.scatter import ReadResult, ReadTargets, StoredChunkRuns, TargetRows, read_rows, scatter_by
from flowstone.store.base import ReadHandle, Store, stop_reading

_NAMES_LOOKED_AT = 64


class ReadAhead:
    """Reads all tensor bytes of a checkpoint into the staging memory `arena`, which this object owns."""

    def __init__(self, arena: Arena, runs: StoredChunkRuns, reading: ReadHandle) -> None:
        self.arena, self._runs, self._reading = arena, runs, reading
        self._ended = False

    def in_read_order(self, index: Index, plan: ReadPlan) -> ReadPlan | None:
        """The plan with its rows in the order in which the bytes were read ahead; None if the plan needs other bytes.
        """
        asked, reads = (plan.piece, plan.first, plan.last), (self._runs.piece, self._runs.first, self._runs.last)
        if all(map(np.array_equal, asked, reads)):
            return plan
        if len(plan.piece) != len(self._runs.piece):
            return None
        order = np.argsort(plan.piece, kind="stable")
        first, last = plan.first[order], plan.last[order]
        if not all(map(np.array_equal, (plan.piece[order], first, last), reads)):
            return None
        return select_runs(plan, index, order, first, last)

    def scatter(
        self, fill: ReadTargets, on_progress: Callable[[int], None], meanwhile: Callable[[], None]
    ) -> ReadResult:
        """Copy the bytes that were read ahead into the state's tensors. `fill`: the memory to fill, for a plan that
        `in_read_order` returned.
        """

        def aim(rows: ReadExtents) -> ReadHandle:
            self._reading.aim(rows)
            self._ended = True  # true in any case when `scatter_by` returns
            return self._reading

        return scatter_by(aim, fill, self._runs, on_progress, meanwhile)

    def stop(self) -> None:
        """Stop reading, and wait until no thread uses the arena any more."""
        if not self._ended:
            self._ended = True
            stop_reading(self._reading)

    def close(self) -> None:
        self.stop()
        self.arena.close()


def read_ahead(
    checkpoint: Checkpoint, state: Mapping[str, object], rules: Sequence[object], store: Store
) -> ReadAhead | None:
    """Begin to read a full checkpoint, if its tensors are small and the state seems to need all of them.

    If the load then needs other bytes, the read was wasted: at most as many bytes as the arena holds. Returns None if
    read-ahead is not worthwhile.

    raises  DamagedError, StorageError, as `Checkpoint.check` does before it decodes objects
    """
    manifest = checkpoint.manifest
    if rules or not READ_AHEAD_BYTES_MIN <= manifest.data_bytes < manifest.pieces * PACKED_BELOW_BYTES:
        return None
    try:
        arena = open_read_arena(store)
    except FlowstoneError:
        return None
    try:
        arena.grow(min(manifest.data_bytes, READ_ARENA_BYTES))  # meanwhile the index is read
        checkpoint.fetch()
        if _wants_all(checkpoint.index, state):
            return _begun(checkpoint, store, arena)
    except BaseException:
        arena.close()
        raise
    arena.close()
    return None


def _wants_all(index: Index, state: Mapping[str, object]) -> bool:
    """Whether the state seems to need all tensors: a sample of names from all parts of the index belongs to sections of
    the state.
    """
    names = index.tensors.names
    if not names:  # the index may have no tensors although the manifest says that there are some
        return False
    looked_at = [names[number * (len(names) - 1) // _NAMES_LOOKED_AT] for number in range(_NAMES_LOOKED_AT + 1)]
    return isinstance(state, Mapping) and all(section_of(name, state) in state for name in looked_at)


def _begun(checkpoint: Checkpoint, store: Store, arena: Arena) -> ReadAhead | None:
    index = checkpoint.index
    last = np.diff(index.chunks.first)
    piece = np.flatnonzero(last)
    runs = StoredChunkRuns(piece, np.zeros(len(piece), np.int64), last[piece])
    nowhere = TargetRows.dense(np.full(len(piece), VERIFY_ONLY, np.uint64))
    try:
        rows = read_rows(index, runs, nowhere)
        reading = store.read_extents(
            checkpoint.segment_paths, rows, arena, wanted_bytes=int(index.chunks.length.sum()), ahead=True
        )
    except FlowstoneError:  # the load will meet the same fault, and raise an error with more details
        arena.close()
        return None
    return ReadAhead(arena, runs, reading)
