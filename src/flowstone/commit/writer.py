"""A job is the only writer of a store from its first save on: it locks, sweeps and rewinds it, and runs retention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from flowstone.commit import catalog, publish, removal
from flowstone.commit.entries import new_rewound_note
from flowstone.commit.locations import find_checkpoint, journals_of
from flowstone.commit.retention import Retention
from flowstone.config import Keep, KeepRule
from flowstone.errors import LockedError, MemoryAgentError, StorageError
from flowstone.format.manifest import MARKER_NAME
from flowstone.log import log
from flowstone.store.base import FlushesRewinds, Store


class StoreWriter:
    """The writer of one store. Creates and locks nothing before `begin`.

    store_id  identity of the store, while this job is its writer
    identity  the identity that a store gets if this writer creates it; None: a new identity
    """

    def __init__(
        self, store: Store, keep: Keep | KeepRule | None,
        on_removed: Callable[[str, str, StorageError | None], None], on_left: Callable[[str, str], None],
        on_empty: Callable[[Sequence[Callable[[], None]]], None] | None = None,
        before_journals_removed: Callable[[], None] | None = None,
    ) -> None:
        """`on_empty` is called with functions that remove the files of expired steps, and the leftovers of dead
        writers. It must call these functions in this order, now or later. None: they are called immediately.

        In two kinds of stores, `on_empty` is not used, and the files are always removed immediately: in a store without
        renames, since the next save may create files with the same names, and in a store in memory, since the next save
        needs the memory of these files.
        """
        self._store, self._keep, self._on_removed, self._on_left = store, keep, on_removed, on_left
        self._retention: Retention | None = None
        self.store_id: str | None = None
        self._before_journals_removed = before_journals_removed or _nothing
        self._on_empty = on_empty or _run_now
        self.identity: str | None = None
        self._swept: list[Callable[[], None]] = []  # functions that remove leftovers of dead writers

    @property
    def _removes_aside(self) -> bool:
        """Whether this store allows that files are removed while others are written."""
        return self._store.capabilities.atomic_rename and not self._store.capabilities.volatile

    def begin(self, holder: str) -> int | None:
        """Lock the store, create it if missing, and list the leftovers for `sweep`, which is called next.

        returns  the newest step; None in a store without steps
        raises   LockedError, StorageError, ...
        """
        store = self._store
        if not store.exists(MARKER_NAME):
            store.make_directory()
        store.lock(holder)
        try:
            store_id = publish.open_store(store, self.identity)
            self._swept = []
            later = self._swept.append if self._removes_aside else removal.run_now
            catalog.sweep_leftovers(store, self._on_removed, self._report_kept, run_later=later)
            newest = newest_step(store)
        except BaseException:
            store.unlock()
            raise
        self._retention = Retention(store, store_id, self._keep, self._on_removed, self._on_left)
        self.store_id = store_id
        return newest

    def _awaited(self) -> Collection[int]:
        """The steps that retention keeps because another tier must still copy them."""
        return ()

    def sweep(self) -> None:
        """Remove the leftovers of dead writers that existed at `begin`, by `on_empty`."""
        swept, self._swept = self._swept, []
        if swept:
            self._on_empty(swept)

    def _report_kept(self, name: str, why: str) -> None:
        log.warning("not removed: %s/%s: %s", self._store.location, name, why)
        self._on_left(name, why)

    def has_lost_the_lock(self) -> bool:
        """Whether the store's lock was lost, so that running saves fail. Once they have failed, call
        `release_lost_lock`, then `begin` again.
        """
        if self.store_id is None:
            return False
        try:
            self._store.check_lock()
        except LockedError as error:
            log.warning("%s (%s); this save takes the lock again", error.message, error.facts.get("found"))
            return True
        return False

    def release_lost_lock(self) -> None:
        """Release the resources of a lock that was lost."""
        self._store.unlock()
        self.store_id = None

    def run_retention(self, committed: int) -> None:
        """Run retention; only call it after a commit is durable. A failure is logged, and the next save tries again.

        When this returns, the expired steps are durably no longer steps of the store. `on_empty` removes their files
        later.
        """
        aside: list[Callable[[], None]] = []
        later = aside.append if self._removes_aside else removal.run_now
        try:
            if self._retention is not None:
                self._retention.run(committed, later, self._awaited())
                if (journals := journals_of(self._store)) is not None:
                    self._before_journals_removed()
                    journals.remove_older(committed, self._on_removed, later)
        except (LockedError, MemoryAgentError) as error:
            log.warning("the removal of old checkpoints stopped: %s", error)
        except Exception:
            # otherwise the exception would be lost, since nothing reads this thread's result
            log.exception("retention failed")
        finally:
            if aside:
                self._on_empty(aside)

    def check_step_exists(self, step: int) -> None:
        """Raise NoCheckpointError if `step` does not exist."""
        check_step_exists(self._store, step)

    def drain(self, timeout_s: float | None = None) -> dict[str, tuple[int, ...]]:  # noqa: ARG002  (of several tiers)
        """Wait until the steps are copied to all other tiers. Returns the steps that are not copied yet: location of
        the tier -> steps. (With a single store: nothing.)
        """
        return {}

    def finish(self) -> None:
        """Wait for the work that follows commits and retention. With a single store there is none."""

    def release(self) -> None:
        """Release all resources except the store."""

    def rewind(self, step: int, note: str | None = None) -> tuple[int, ...]:
        """Set every step above `step` aside, so that it is no longer a checkpoint. Returns the steps that were set
        aside.

        note  the name of the note for other tiers; None: see `set_aside`
        """
        moved = set_aside(self._store, step, note)
        if isinstance(self._store, FlushesRewinds):
            self._store.flush_rewind()
        return moved


def set_aside(store: Store, step: int, note: str | None = None) -> tuple[int, ...]:
    """Set every step above `step` aside, and write a note of this for other tiers. Returns the steps that were set
    aside. The caller must hold the store's lock.

    note  name of the note. None: a new name; the note is then written only if the store was one of several tiers, or is
          memory, which another process may flush
    """
    store.check_lock()
    if note is not None or catalog.has_rewind_notes(store) or store.capabilities.volatile:
        # The note is written first. If a crash interrupts this rewind, tiers without the note still count as outdated,
        # so they do not bring back a step that was set aside.
        catalog.write_rewind_note(store, note or new_rewound_note(step))
    moved = catalog.rewind(store, step)
    if (journals := journals_of(store)) is not None:
        journals.cut(step)
    return moved


def _nothing() -> None: ...


def _run_now(acts: Sequence[Callable[[], None]]) -> None:
    for act in acts:
        act()


def newest_step(store: Store) -> int | None:
    """The newest durable step, in a checkpoint or a journal. None in an empty store."""
    if (journals := journals_of(store)) is not None:
        return journals.newest_step()
    existing = catalog.steps(store)
    return existing[-1] if existing else None


def check_step_exists(store: Store, step: int) -> None:
    """Raise NoCheckpointError if neither a checkpoint nor the journal after the newest checkpoint has `step`."""
    if (journals := journals_of(store)) is not None and journals.chain_to(step) is not None:
        return
    find_checkpoint(store, step)
