"""A job as the one writer of a store, from its first save on: lock, sweep, retention, rewind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowstone.commit import catalog, publish, removal
from flowstone.commit.entries import is_journal, new_rewound_note
from flowstone.commit.locations import find_checkpoint
from flowstone.commit.retention import Retention
from flowstone.config import Keep, KeepRule
from flowstone.errors import LockedError, MemoryAgentError, StorageError
from flowstone.format.manifest import MARKER_NAME
from flowstone.log import log
from flowstone.store.base import FlushesRewinds, Store


class StoreWriter:
    """The writer of one store. Creates and locks nothing before `begin`.

    store_id  identity of the store, while this job is its writer
    before_journals_go  is called before journals are removed
    empty     is given what empties directories that retention has set aside, and what removes what dead writers left,
              to call it in this order; at once, if it is not told otherwise. Not in a store without renames, where the
              same names may be written next, nor in memory, which the next save takes again
    identity  of a store that this writer makes; None: a new one
    """

    def __init__(
        self, store: Store, keep: Keep | KeepRule | None,
        on_removed: Callable[[str, str, StorageError | None], None], on_left: Callable[[str, str], None],
    ) -> None:
        self._store, self._keep, self._on_removed, self._on_left = store, keep, on_removed, on_left
        self._retention: Retention | None = None
        self.store_id: str | None = None
        self.before_journals_go: Callable[[], None] | None = None
        self.empty: Callable[[Sequence[Callable[[], None]]], None] = _now
        self.identity: str | None = None
        self._swept: list[Callable[[], None]] = []  # what removes what dead writers left

    @property
    def _removes_aside(self) -> bool:
        """Whether files may be removed while others are written."""
        return self._store.capabilities.atomic_rename and not self._store.capabilities.volatile

    def begin(self, holder: str) -> int | None:
        """Lock the store, create it if missing, list what there is to `sweep`, which comes next.

        returns  the newest step
        raises   LockedError, StorageError, ...
        """
        store = self._store
        if not store.exists(MARKER_NAME):
            store.make_directory()
        store.lock(holder)
        try:
            store_id = publish.open_store(store, self.identity)
            self._swept = []
            later = self._swept.append if self._removes_aside else removal.at_once
            catalog.sweep(store, self._on_removed, self._stays, later=later)
            newest = newest_step(store)
        except BaseException:
            store.unlock()
            raise
        self._retention = Retention(store, store_id, self._keep, self._on_removed, self._on_left)
        self.store_id = store_id
        return newest

    def sweep(self) -> None:
        """Remove what dead writers had left when this one began, with `empty`."""
        swept, self._swept = self._swept, []
        if swept:
            self.empty(swept)

    def _stays(self, name: str, why: str) -> None:
        log.warning("not removed: %s/%s %s", self._store.location, name, why)
        self._on_left(name, why)

    def has_lost_the_lock(self) -> bool:
        """Whether to begin again. Saves under way have failed, or will; call `give_up` once they have ended."""
        if self.store_id is None:
            return False
        try:
            self._store.check_lock()
        except LockedError as error:
            log.warning("%s (%s); taking it again", error.message, error.facts.get("found"))
            return True
        return False

    def give_up(self) -> None:
        """Release what is left of a lost lock."""
        self._store.unlock()
        self.store_id = None

    def retain(self, committed: int) -> None:
        """Run retention; only call it after a commit is durable. A failure is logged, and the next save tries again.

        On return what goes is no step any more, durably; its files go with `empty`.
        """
        aside: list[Callable[[], None]] = []
        later = aside.append if self._removes_aside else removal.at_once
        try:
            if self._retention is not None:
                self._retention.run(committed, later)
                if any(map(is_journal, self._store.names())):
                    from flowstone.commit import journals  # imported here: most stores have none

                    if self.before_journals_go is not None:
                        self.before_journals_go()
                    journals.remove_older(self._store, committed, self._on_removed, later)
        except (LockedError, MemoryAgentError) as error:
            log.warning("retention stopped: %s", error)
        except Exception:
            log.exception("retention failed")  # on this thread, an exception would be lost
        finally:
            if aside:
                self.empty(aside)

    def find(self, step: int) -> None:
        """Raise NoCheckpointError if there is no `step` to go back to."""
        find_step(self._store, step)

    def drain(self, timeout_s: float | None = None) -> dict[str, tuple[int, ...]]:  # noqa: ARG002  (of several tiers)
        """Wait until farther tiers have what they should. Returns what still waits, by tier."""
        return {}

    def finish(self) -> None:
        """Wait for what goes on after commits and retention: nothing, with a single store."""

    def end(self) -> None:
        """Give back what is held besides the store."""

    def rewind(self, step: int, note: str | None = None) -> tuple[int, ...]:
        """Set every step above `step` aside. Returns those steps.

        note  to put then, for other tiers; None: one, if the store has been one of several
        """
        moved = set_aside(self._store, step, note)
        if isinstance(self._store, FlushesRewinds):
            self._store.flush_rewind()
        return moved


def set_aside(store: Store, step: int, note: str | None = None) -> tuple[int, ...]:
    """Set every step above `step` aside, and note it for other tiers. Returns those steps. Needs the lock.

    note  its name; None: a new one, if the store was one of several tiers, or another process may flush it (memory)
    """
    store.check_lock()
    if note is not None or catalog.is_one_of_several(store) or store.capabilities.volatile:
        # The note first: if a crash interrupts this rewind, other tiers without the note count as rewound, too, and no
        # step from before the rewind comes back from them.
        catalog.put_note(store, note or new_rewound_note(step))
    moved = catalog.rewind(store, step)
    if any(map(is_journal, store.names())):
        from flowstone.commit import journals  # as above

        journals.cut(store, step)
    return moved


def _now(acts: Sequence[Callable[[], None]]) -> None:
    for act in acts:
        act()


def newest_step(store: Store) -> int | None:
    """The newest durable step, in a journal or not; None in an empty store."""
    if any(map(is_journal, store.names())):
        from flowstone.commit import journals  # as above

        return journals.newest_step(store)
    existing = catalog.steps(store)
    return existing[-1] if existing else None


def find_step(store: Store, step: int) -> None:
    """Raise NoCheckpointError if no checkpoint, and no journal that leads on from the newest, has `step`."""
    if any(map(is_journal, store.names())):
        from flowstone.commit import journals  # as above

        if journals.leads_to(store, step) is not None:
            return
    find_checkpoint(store, step)
