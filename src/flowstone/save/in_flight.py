"""Saves that were started and not waited for yet, and how failed saves are reported."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from flowstone.commit import catalog
from flowstone.commit.entries import step_directory
from flowstone.commit.retention import describe_step
from flowstone.errors import RankError, SaveFailedError, StepExistsError
from flowstone.log import log
from flowstone.session.futures import Save
from flowstone.store.base import Store


class InFlight:
    """The unfinished saves of one Checkpointer, oldest first, and the newest step known to be committed.

    newest  that step. Set by the first save, by each save that ends, and by `rewind`; None: no step is known
    """

    def __init__(
        self, store: Store, expedite: Callable[[], None], *, on_error: Literal["raise", "continue"],
        max_unsaved_steps: int | None,
    ) -> None:
        """`expedite`: a function that makes captures run at full speed, called when a thread waits for them."""
        self._store, self._expedite_captures = store, expedite
        self._expedite_store: Callable[[], None] = getattr(store, "expedite", _nothing)  # see multi_node.py
        self._on_error, self._max_unsaved_steps = on_error, max_unsaved_steps
        self._saves: deque[Save] = deque()
        self._first_unsaved: int | None = None
        self.newest: int | None = None

    def __iter__(self) -> Iterator[Save]:
        return iter(self._saves)

    def note_newest(self, step: int | None) -> None:
        """Record the newest committed step, read from the store; None: there is none, or it is not known."""
        self.newest = step

    def add(self, save: Save) -> None:
        self._saves.append(save)

    def forget(self, save: Save) -> None:
        """Remove a save from the list of unfinished ones, because it was abandoned before `save` returned it."""
        self._saves = deque(other for other in self._saves if other is not save)

    def check_new(self, step: int, *, looks: bool = True) -> None:
        """Raise StepExistsError unless `step` is above every committed step and every step in flight.

        looks  whether to look into the store for the step, too; in a job of several ranks, only one rank does
        """
        newest = max((save.step for save in self._saves), default=self.newest)
        if newest is not None and step <= newest:
            raise StepExistsError(
                f"cannot save step {step} into {self._store.location}",
                found=f"newest {describe_step(self._store, newest)}",
                next=f"save a later step, or call rewind({step - 1 if step else 0}) first to set newer steps aside",
            )
        directory = step_directory(step)
        # Only in stores that write a save into a directory of another name and rename it at the end. In other stores
        # another rank may have begun to write into this step's directory already.
        looks = looks and self._store.capabilities.atomic_rename
        if looks and self._store.exists(directory):  # not a step: that would have a manifest, and be found above
            raise StepExistsError(
                f"cannot save step {step} into {self._store.location}", found=f"{directory}, which is not a checkpoint",
                next=f"move {directory} away, or save a later step",
            )

    def expedite(self) -> None:
        """Finish all saves begun so far at full speed, because a thread waits for them. Can be called on any thread."""
        self._expedite_captures()
        self._expedite_store()

    def await_all(self) -> None:
        """Wait until all saves have ended, committed or failed."""
        self.expedite()
        for save in tuple(self._saves):
            save.committed.latch.wait()

    def await_saves(self, leave: int = 0, *, below: int | None = None) -> None:
        """Wait until at most `leave` saves are unfinished. Raise the first failure that no call has raised yet.

        below  ignore saves of that step or later, even if they have ended; None: wait for all
        """
        while self._saves and (len(self._saves) > leave or self._saves[0].committed.done()):
            if below is not None and self._saves[0].step >= below:
                return
            self.expedite()
            self._saves[0].committed.latch.wait()
            failure = self._note_end(self._saves[0])
            self._saves.popleft()  # after an interrupt before this line, the next call notes the end of the save again
            if failure is not None:
                raise failure

    def _note_end(self, ended: Save) -> SaveFailedError | None:
        """Record how a save ended. If it failed, and that must be raised, returns the error; otherwise None."""
        if not ended.committed.failed():
            self.newest, self._first_unsaved = ended.step, None
            return None
        self._first_unsaved = ended.step if self._first_unsaved is None else self._first_unsaved
        # The store shows whether the failed save was committed. Newer steps in it are from another process.
        existing = [step for step in catalog.steps(self._store) if step <= ended.step]
        self.newest = existing[-1] if existing else None
        failure = ended.committed.failure()
        if failure is None:
            return None
        behind = ended.step - (self.newest if self.newest is not None else self._first_unsaved or 0)
        limit = self._max_unsaved_steps
        outcome = "may not have been saved" if isinstance(failure, RankError) and failure.undecided else "was not saved"
        if self._on_error == "continue" and (limit is None or behind <= limit):
            log.warning("step %d %s; training continues: %s", ended.step, outcome, failure)
            return None
        failure_report = SaveFailedError(
            f"step {ended.step} {outcome}: {failure}",
            newest="none" if self.newest is None else f"step {self.newest}",
            next="see the cause; earlier checkpoints are untouched, and the next save may succeed",
        )
        failure_report.__cause__ = failure
        return failure_report


def _nothing() -> None: ...
