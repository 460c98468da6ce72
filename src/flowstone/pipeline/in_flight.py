"""Saves that were started and not settled yet, and how failed ones are reported."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from flowstone.commit import catalog
from flowstone.commit.entries import step_directory
from flowstone.commit.retention import foreign_or_own
from flowstone.errors import RankError, SaveFailedError, StepExistsError
from flowstone.log import log
from flowstone.pipeline.futures import Save
from flowstone.store.base import Store


class InFlight:
    """The saves of one Checkpointer, oldest first, and the newest step known to be committed.

    newest  set by the first save, by each save that ends, and by `rewind`; None while no step is known
    """

    def __init__(
        self, store: Store, expedite: Callable[[], None], *, on_error: Literal["raise", "continue"],
        max_unsaved_steps: int | None,
    ) -> None:
        """`expedite` ends the overlap budget of captures that a thread waits for."""
        self._store, self._expedite_captures = store, expedite
        self._expedite_store: Callable[[], None] = getattr(store, "expedite", _nothing)  # see multi_node.py
        self._on_error, self._max_unsaved_steps = on_error, max_unsaved_steps
        self._saves: deque[Save] = deque()
        self._first_unsaved: int | None = None
        self.newest: int | None = None

    def __iter__(self) -> Iterator[Save]:
        return iter(self._saves)

    def add(self, save: Save) -> None:
        self._saves.append(save)

    def forget(self, save: Save) -> None:
        """Drop a save that was given up before the caller had it."""
        self._saves = deque(one for one in self._saves if one is not save)

    def check_new(self, step: int, *, looks: bool = True) -> None:
        """Raise StepExistsError if `step` is not above every step that is committed or under way.

        looks  also look into the store; in a job of several ranks, one rank does
        """
        newest = max((save.step for save in self._saves), default=self.newest)
        if newest is not None and step <= newest:
            raise StepExistsError(
                f"cannot save step {step} into {self._store.location}",
                found=f"newest {foreign_or_own(self._store, newest)}",
                next=f"save a later step, or call rewind({step - 1 if step else 0}) first to set newer steps aside",
            )
        directory = step_directory(step)
        # Only where drafts have names of their own. Else another rank may have begun that step; no file is overwritten.
        looks = looks and self._store.capabilities.atomic_rename
        if looks and self._store.exists(directory):  # with a manifest in it, it would be a step
            raise StepExistsError(
                f"cannot save step {step} into {self._store.location}", found=f"{directory}, which is not a checkpoint",
                next=f"move {directory} away, or save a later step",
            )

    def expedite(self) -> None:
        """A thread waits for the saves so far. Any thread."""
        self._expedite_captures()
        self._expedite_store()

    def await_all(self) -> None:
        """Wait until all saves have ended, committed or failed."""
        self.expedite()
        for save in tuple(self._saves):
            save.committed.latch.wait()

    def settle(self, leave: int = 0, *, below: int | None = None) -> None:
        """Wait until at most `leave` saves are left; raise the first failure that was not reported yet.

        below  look at no save of that step or a later one, though it may have ended; None: at all
        """
        while self._saves and (len(self._saves) > leave or self._saves[0].committed.done()):
            if below is not None and self._saves[0].step >= below:
                return
            self.expedite()
            self._saves[0].committed.latch.wait()
            failure = self._settle_one(self._saves[0])
            self._saves.popleft()  # if interrupted before this line, the next call settles it again
            if failure is not None:
                raise failure

    def _settle_one(self, ended: Save) -> SaveFailedError | None:
        """Note how a save ended. Returns the error to raise, if any."""
        if not ended.committed.failed():
            self.newest, self._first_unsaved = ended.step, None
            return None
        self._first_unsaved = ended.step if self._first_unsaved is None else self._first_unsaved
        # The store knows how far the failed save had come. Newer steps were put there by another process.
        existing = [step for step in catalog.steps(self._store) if step <= ended.step]
        self.newest = existing[-1] if existing else None
        failure = ended.committed.failure()
        if failure is None:
            return None
        behind = ended.step - (self.newest if self.newest is not None else self._first_unsaved or 0)
        limit = self._max_unsaved_steps
        what = "may not have been saved" if isinstance(failure, RankError) and failure.undecided else "was not saved"
        if self._on_error == "continue" and (limit is None or behind <= limit):
            log.warning("step %d %s; training goes on: %s", ended.step, what, failure)
            return None
        told = SaveFailedError(
            f"step {ended.step} {what}: {failure}",
            newest="none" if self.newest is None else f"step {self.newest}",
            next="see the cause; earlier checkpoints are untouched, and the next save may succeed",
        )
        told.__cause__ = failure
        return told


def _nothing() -> None: ...
