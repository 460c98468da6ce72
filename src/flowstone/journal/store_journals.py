"""The journals of one store, for its catalogue, its writer and its loads. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from flowstone.errors import StorageError
from flowstone.format.manifest import Manifest
from flowstone.journal import journals, verify_journals
from flowstone.journal.journals import Chain, JournalComposition
from flowstone.journal.verify_journals import VerifiedJournals
from flowstone.store.base import Names, Store


class StoreJournals:
    """The journals of a store. `cut` and `remove_older` are for its writer, which has the lock."""

    def __init__(self, store: Names) -> None:
        self._store = store

    def newest_step(self) -> int | None:
        return journals.newest_step(self._store)

    def newest_chain(self) -> Chain | None:
        return journals.newest_chain(self._store)

    def chain_to(self, step: int | None) -> Chain | None:
        return journals.journal_chain(self._store, step)

    def explain_lost_steps(self, chain: Chain | None) -> str:
        return verify_journals.explain_lost_steps(self._store, chain)

    def verify(self) -> VerifiedJournals | None:
        return verify_journals.verify_journals(self._store)

    def composition_after(self, manifest: Manifest) -> tuple[JournalComposition, ...]:
        return journals.journals_after(self._store, manifest)

    def cut(self, step: int) -> None:
        journals.cut_journals(cast("Store", self._store), step)

    def remove_older(
        self, committed: int, on_removed: Callable[[str, str, StorageError | None], None],
        run_later: Callable[[Callable[[], None]], None],
    ) -> None:
        journals.remove_older_journals(cast("Store", self._store), committed, on_removed, run_later)
