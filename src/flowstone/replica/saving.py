"""The Checkpointer of a replica: it loads checkpoints, and saves one step that only the journal has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from flowstone.checkpointer import Checkpointer
from flowstone.config import REPLICA_END_S, REPLICA_LOOK_S, REPLICA_REST_S, EngineOptions
from flowstone.errors import LockedError
from flowstone.pipeline.futures import Save
from flowstone.pipeline.load_outcome import LoadReport
from flowstone.pipeline.save import Saves
from flowstone.ranks import Decision
from flowstone.runtime.turns import one_at_a_time
from flowstone.store.base import Store
from flowstone.trace import Spans


class ReplicaCheckpointer(Checkpointer):
    """Of a replica, or of those of all ranks, and a store in a directory. Removes no checkpoint: what may go is for the
    next training to say.
    """

    def __init__(self, location: str, *, engine: EngineOptions) -> None:
        super().__init__(location, engine=engine)
        self.engine = engine

    @property
    def store(self) -> Store:
        return self._store

    @one_at_a_time
    def agree(self, phase: str, mine: bytes, decide: Callable[[Sequence[bytes]], Decision]) -> bytes:
        """What rank 0 decides from what all say. Raises RankError."""
        return self._group.ask(phase, mine, decide)

    def load_checkpoint(self, state: Mapping[str, object], step: int) -> LoadReport:
        """Bring `state` to a checkpoint's step."""
        return self.load(state, step=step)

    def save_journaled(self, step: int, state: Mapping[str, object]) -> None:
        """Save `state` whole as `step`, the newest one of the journal. Returns once that is committed.

        raises  as `save`; LockedError if another job writes there, and goes on. On ranks where nothing is wrong,
                RankError
        """
        self._become_writer(step)
        self._begin(step, state).committed.result()

    @one_at_a_time
    def _become_writer(self, step: int) -> None:
        """On all ranks, or on none."""
        self._check_open()
        failure: Exception | None = None
        # A rank of several that has ended in order, as others died, gives the lock back once it has waited for them.
        deadline = time.monotonic() + (REPLICA_END_S if self._group.size == 1 else REPLICA_REST_S)
        while True:
            try:
                self._whole_saves.check_journaled(step)
            except LockedError as error:
                failure = error
                if time.monotonic() < deadline:
                    time.sleep(REPLICA_LOOK_S)
                    continue
            except Exception as error:
                failure = error
            else:
                failure = None
            break
        self._group.confirm(f"whether step {step} is saved whole", failure)

    @one_at_a_time
    def _begin(self, step: int, state: Mapping[str, object]) -> Save:
        self._check_open()
        return self._whole_saves.save_journaled(step, state, Spans("save", step, self._group.rank))

    @property
    def _whole_saves(self) -> Saves:
        assert isinstance(self._saves, Saves), "it has no journal of its own"
        return self._saves
