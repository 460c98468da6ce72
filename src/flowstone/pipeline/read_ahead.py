"""Reading ahead: a checkpoint of small tensors is read while the state is walked and compared with it.

Where tensors are small, finding the memory that takes them lasts as long as reading them. What is read is verified, and
waits in the arena: nothing of the state changes before everything is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flowstone import _native
from flowstone.checkpoint import Checkpoint
from flowstone.config import PACKED_BELOW_BYTES, READ_AHEAD_BYTES_MIN, READ_ARENA_BYTES
from flowstone.errors import FlowstoneError
from flowstone.format.index import Index
from flowstone.plan.match import section_of
from flowstone.plan.read import ReadPlan, part_of
from flowstone.stage.arena import open_read_arena
from flowstone.stage.scatter import Fill, Runs, Scattered, Targets, read_rows, scatter_by
from flowstone.store.base import Reading, Store, stop_reading

_NAMES_LOOKED_AT = 64


class ReadAhead:
    """All extents of a checkpoint on their way into `arena`, which this owns."""

    def __init__(self, arena: _native.Arena, runs: Runs, reading: Reading) -> None:
        self.arena, self._runs, self._reading = arena, runs, reading
        self._ended = False

    def takes(self, index: Index, plan: ReadPlan) -> ReadPlan | None:
        """The plan in the order of what is read ahead; None if it reads something else."""
        asked, reads = (plan.piece, plan.first, plan.last), (self._runs.piece, self._runs.first, self._runs.last)
        if all(map(np.array_equal, asked, reads)):
            return plan
        if len(plan.piece) != len(self._runs.piece):
            return None
        order = np.argsort(plan.piece, kind="stable")
        first, last = plan.first[order], plan.last[order]
        if not all(map(np.array_equal, (plan.piece[order], first, last), reads)):
            return None
        return part_of(plan, index, order, first, last)

    def scatter(self, fill: Fill, on_progress: Callable[[int], None], meanwhile: Callable[[], None]) -> Scattered:
        """As `scatter` does, what is read ahead; `fill` has a plan that this takes."""

        def aim(rows: _native.ReadExtents) -> Reading:
            self._reading.aim(rows)
            self._ended = True  # or will have, in any case, when `scatter_by` returns
            return self._reading

        return scatter_by(aim, fill, self._runs, on_progress, meanwhile)

    def stop(self) -> None:
        """Return once nothing is read any more. The arena is free then."""
        if not self._ended:
            self._ended = True
            stop_reading(self._reading)

    def close(self) -> None:
        self.stop()
        self.arena.close()


def read_ahead(
    checkpoint: Checkpoint, state: Mapping[str, object], rules: Sequence[object], store: Store
) -> ReadAhead | None:
    """Begin to read a whole checkpoint, if its tensors are small and the state seems to want all of them.

    At most as much as an arena holds is read in vain. None: the load reads what it wants once that is known.

    raises  DamagedError, StorageError: what `Checkpoint.check` finds before it decodes objects
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
    """Whether some of the tensors, from all over the index, are in sections of the state."""
    names = index.tensors.names
    if not names:  # whatever the manifest claims
        return False
    looked_at = [names[at * (len(names) - 1) // _NAMES_LOOKED_AT] for at in range(_NAMES_LOOKED_AT + 1)]
    return isinstance(state, Mapping) and all(section_of(name, state) in state for name in looked_at)


def _begun(checkpoint: Checkpoint, store: Store, arena: _native.Arena) -> ReadAhead | None:
    index = checkpoint.index
    last = np.diff(index.chunks.first)
    piece = np.flatnonzero(last)
    runs = Runs(piece, np.zeros(len(piece), np.int64), last[piece])
    nowhere = Targets.dense(np.full(len(piece), _native.VERIFY_ONLY, np.uint64))
    try:
        rows = read_rows(index, runs, nowhere)
        reading = store.read_extents(
            checkpoint.segment_paths, rows, arena, wanted_bytes=int(index.chunks.length.sum()), ahead=True
        )
    except FlowstoneError:  # the load finds it again, and has more to say
        arena.close()
        return None
    return ReadAhead(arena, runs, reading)
