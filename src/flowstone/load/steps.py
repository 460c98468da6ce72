"""Which step a load reads: rank 0 reads the store, and all ranks use its result."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from flowstone.commit import catalog
from flowstone.commit.entries import step_directory
from flowstone.commit.locations import check_no_checkpoint, check_store, find_checkpoint, journals_of, stores_below
from flowstone.config import EngineOptions
from flowstone.errors import FlowstoneError, is_absence, is_damage
from flowstone.format.manifest import Manifest
from flowstone.log import log
from flowstone.ranks import RankGroup
from flowstone.reading.checkpoint import Checkpoint
from flowstone.store.base import Store
from flowstone.store.run_concurrently import is_distant, run_concurrently

if TYPE_CHECKING:
    from flowstone.journal.journals import Chain
    from flowstone.store.prefetching import Prefetcher


class PrefetchedStep(msgspec.Struct, frozen=True):
    """A step that is about to be loaded.

    manifest  the manifest of the step; None: it was not read yet
    ahead     the store that prefetches some files of the step; None: nothing is prefetched
    """

    step: int
    manifest: Manifest | None = None
    ahead: Prefetcher | None = None


class LoadCandidates(msgspec.Struct, frozen=True):
    """The steps that a load tries, newest first.

    journaled_step  the newest step in the journals that continue the first of these steps; None: no journal does
    chain           these journals; set on rank 0 only
    notes           remarks on durable steps that cannot be loaded any more; set on rank 0 only
    prefetched      the first of these steps, if it was prefetched; set on rank 0 only
    """

    steps: list[int]
    journaled_step: int | None
    chain: Chain | None
    notes: list[str]
    prefetched: PrefetchedStep | None

    def prefetched_step(self, step: int) -> PrefetchedStep | None:
        return self.prefetched if self.prefetched is not None and self.prefetched.step == step else None


class StepFinder:
    """Finds steps in one store, for a group of N ranks, N at least 1. All ranks get the same answer."""

    def __init__(self, store: Store, options: EngineOptions, group: RankGroup) -> None:
        self._store, self._options, self._group = store, options, group

    def find_newest(self) -> Checkpoint | None:
        """The newest committed checkpoint; None if there is none yet."""
        manifests: dict[int, Manifest] = {}  # read by rank 0, as another writer may remove the step meanwhile

        def find() -> list[int]:
            check_no_checkpoint(self._store)
            newest = catalog.newest_manifest(self._store)
            if newest is None:
                if below := stores_below(self._store):
                    log.warning("there is no checkpoint in %s; stores are in %s", self._store.location, below)
                return []
            manifests[newest.step] = newest
            chain = journal_chain(self._store, None)
            return [newest.step, newest.step if chain is None else chain.newest]

        answer = self._group.decide_on_rank_zero("which step is the newest", find)
        if not answer:
            return None
        step, journaled = answer
        checkpoint = Checkpoint(self._store, step_directory(step), self._options, manifests.get(step))
        return checkpoint.with_journal(journaled)

    def find_candidates(self, step: int | None, *, fallback: bool, resources: ExitStack) -> LoadCandidates:
        """The steps that a load tries: the newest step, or `step`; with `fallback` also all earlier steps.

        resources  closes the prefetching store, if one is opened
        """
        chain: Chain | None = None
        notes: list[str] = []
        prefetched: PrefetchedStep | None = None

        def find() -> list[int]:
            nonlocal chain, notes, prefetched
            if is_distant(self._store) and not fallback:  # distant stores have no journals
                prefetched = self._prefetch(step, resources)
                return [-1, prefetched.step]
            check_store(self._store)
            chain = journal_chain(self._store, step)
            notes = [] if step is not None else self._note_lost_steps(chain)
            newest = find_checkpoint(self._store, step) if chain is None else chain.base
            return [
                -1 if chain is None else chain.newest,
                *([s for s in reversed(catalog.steps(self._store)) if s <= newest] if fallback else [newest]),
            ]

        journaled, *steps = self._group.decide_on_rank_zero("which step to load", find)
        return LoadCandidates(steps, journaled if journaled >= 0 else None, chain, notes, prefetched)

    def _prefetch(self, step: int | None, resources: ExitStack) -> PrefetchedStep:
        from flowstone.load.prefetch_step import open_step  # imported here: most stores are directories

        closing = resources if self._group.size == 1 else None  # with several ranks, each reads only a part
        _, opened = run_concurrently(
            self._store, [lambda: check_store(self._store), lambda: open_step(self._store, step, closing)]
        )
        assert opened is not None, "the second call opens it"
        manifest, ahead = opened
        return PrefetchedStep(manifest.step, manifest, ahead)

    def open_checkpoint(self, prefetched: PrefetchedStep) -> tuple[Checkpoint, Store]:
        """The checkpoint, and the store from which its segment files are read: the prefetching store, if there is one.
        """
        if prefetched.ahead is not None and prefetched.manifest is not None:
            from flowstone.load.prefetch_step import checkpoint_in  # imported here: most stores are directories

            checkpoint = checkpoint_in(prefetched.ahead, prefetched.manifest, self._options)
            if checkpoint is not None:
                return checkpoint, prefetched.ahead
        directory = step_directory(prefetched.step)
        return Checkpoint(self._store, directory, self._options, prefetched.manifest), self._store

    def is_gone(self, step: int, error: FlowstoneError) -> bool:
        """Whether a load of `step` failed because another writer has removed that step; all ranks get the same answer.
        """
        if not (is_damage(error) or is_absence(error)):
            return False
        steps = self._group.decide_on_rank_zero(
            f"whether step {step} is still there", lambda: catalog.steps(self._store)
        )
        return step not in steps and bool(steps)

    def _note_lost_steps(self, chain: Chain | None) -> list[str]:
        """A note on journaled steps that cannot be loaded because an earlier step is damaged."""
        if not self._store.capabilities.appends or (journals := journals_of(self._store)) is None:
            return []
        try:
            lost = journals.explain_lost_steps(chain)
        except FlowstoneError:
            return []  # the load does not depend on this note, and `flowstone verify` reports the error
        if not lost:
            return []
        log.warning(
            "durable steps after the newest loadable step are lost: %s/%s. `flowstone verify` lists all of them; "
            "keep a copy of the journal before the next full checkpoint removes it", self._store.location, lost,
        )
        return [f"durable steps after this one are lost: {lost}"]


def journal_chain(store: Store, step: int | None) -> Chain | None:
    """The journals that must be replayed after a checkpoint to reach `step` (None: the newest step). None if no replay
    is needed, because a checkpoint has that step.
    """
    if not store.capabilities.appends or (step is not None and step in catalog.steps(store)):
        return None
    journals = journals_of(store)
    return None if journals is None else journals.chain_to(step)


def skipped_step_note(step: int, error: FlowstoneError) -> str:
    """The note in a load's report about a damaged newer step that was skipped."""
    return f"step {step} is damaged and was skipped: {error.message}"
