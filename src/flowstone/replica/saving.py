"""The Checkpointer of a replica: it loads checkpoints, and saves one step that only the journal has."""

from __future__ import annotations

from collections.abc import Mapping

from flowstone.checkpointer import Checkpointer
from flowstone.config import EngineOptions
from flowstone.pipeline.futures import Save
from flowstone.pipeline.load_outcome import LoadReport
from flowstone.pipeline.save import Saves
from flowstone.runtime.turns import one_at_a_time
from flowstone.store.base import Store
from flowstone.trace import Spans


class ReplicaCheckpointer(Checkpointer):
    """Of one rank, and a store in a directory. Removes no checkpoint: what may go is for the next training to say."""

    def __init__(self, location: str, *, engine: EngineOptions) -> None:
        super().__init__(location, engine=engine)
        self.engine = engine

    @property
    def store(self) -> Store:
        return self._store

    def load_checkpoint(self, state: Mapping[str, object], step: int) -> LoadReport:
        """Bring `state` to a checkpoint's step."""
        return self.load(state, step=step)

    def save_journaled(self, step: int, state: Mapping[str, object]) -> None:
        """Save `state` whole as `step`, the newest one of the journal. Returns once that is committed.

        raises  as `save`; LockedError while another job writes there
        """
        self._begin(step, state).committed.result()

    @one_at_a_time
    def _begin(self, step: int, state: Mapping[str, object]) -> Save:
        self._check_open()
        assert isinstance(self._saves, Saves), "it has no journal of its own"
        return self._saves.save_journaled(step, state, Spans("save", step, 0))
