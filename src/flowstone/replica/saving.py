"""The Checkpointer of a replica: it loads checkpoints, and saves a step that only the journal has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from flowstone.checkpointer import Checkpointer
from flowstone.config import REPLICA_END_S, REPLICA_LAST_RANK_S, REPLICA_POLL_S, EngineOptions
from flowstone.errors import LockedError
from flowstone.ranks import Decision
from flowstone.runtime.verb_lock import exclusive_verb
from flowstone.save.saves import Saves
from flowstone.session.futures import Save
from flowstone.session.load_outcome import LoadReport
from flowstone.store.base import Store
from flowstone.trace import Spans


class FollowerCheckpointer(Checkpointer):
    """The Checkpointer of a replica, in a job of one or more replicas. Its store is a directory. It removes no
    checkpoints: the next training does that.
    """

    def __init__(self, location: str, *, engine: EngineOptions) -> None:
        super().__init__(location, engine=engine)
        self.engine = engine

    @property
    def store(self) -> Store:
        return self._store

    @exclusive_verb
    def agree(self, phase: str, mine: bytes, decide: Callable[[Sequence[bytes]], Decision]) -> bytes:
        """Send `mine` to rank 0, and return its decision from all messages. Raises RankError."""
        return self._group.decide_from_all(phase, mine, decide)

    def load_checkpoint(self, state: Mapping[str, object], step: int) -> LoadReport:
        """Load a checkpoint into `state`."""
        return self.load(state, step=step)

    def save_journaled(self, step: int, state: Mapping[str, object]) -> None:
        """Save `state` in full as `step`, the newest step of the journal. Returns once it is committed.

        raises  the errors of `save`; LockedError if another job keeps writing to the store; RankError if another rank
                has failed
        """
        self._become_writer(step)
        self._begin(step, state).committed.result()

    @exclusive_verb
    def _become_writer(self, step: int) -> None:
        """Become the writer of the store. Either all replicas succeed, or none."""
        self._check_open()
        failure: Exception | None = None
        # If some ranks of the training job were killed, a rank that ends normally keeps the store's lock while it waits
        # for the killed ones.
        deadline = time.monotonic() + (REPLICA_END_S if self._group.size == 1 else REPLICA_LAST_RANK_S)
        while True:
            try:
                self._full_saves.check_journaled(step)
            except LockedError as error:
                failure = error
                if time.monotonic() < deadline:
                    time.sleep(REPLICA_POLL_S)
                    continue
            except Exception as error:
                failure = error
            else:
                failure = None
            break
        self._group.confirm_all(f"whether step {step} can be saved in full", failure)

    @exclusive_verb
    def _begin(self, step: int, state: Mapping[str, object]) -> Save:
        self._check_open()
        return self._full_saves.save_journaled(step, state, Spans("save", step, self._group.rank))

    @property
    def _full_saves(self) -> Saves:
        assert isinstance(self._saves, Saves), "a replica writes no journal"
        return self._saves
