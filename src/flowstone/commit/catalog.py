"""Which checkpoints exist, and what dead writers left behind (docs/ORDERING.md, Retention and sweep, Rewind)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from flowstone.commit import removal
from flowstone.commit.entries import (
    REWOUND,
    EntryKind,
    StoreEntry,
    new_superseded_directory,
    parse_entry,
    step_directory,
    step_of,
)
from flowstone.commit.manifests import lacks_manifest, path_inside, read_manifest
from flowstone.errors import NoCheckpointError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, Manifest
from flowstone.store.base import Names, Store, sync_names


def steps(store: Names) -> tuple[int, ...]:
    """The steps that have a manifest, and those that have lost it, ascending. The content of manifests is not checked.
    """
    named = ((step_of(name), name) for name in store.names())
    return tuple(sorted(step for step, name in named if step is not None and _is_step(store, name)))


def _is_step(store: Names, directory: str) -> bool:
    return store.exists(path_inside(directory, MANIFEST_NAME)) or lacks_manifest(store, directory)


def newest_manifest(store: Names, on_first: Callable[[str], None] | None = None) -> Manifest | None:
    """The manifest of the newest step, checked; None in a store without checkpoints.

    on_first  called with the first directory to be examined, before anything in it is read

    A damaged or missing manifest raises: returning an older one would silently lose steps. A step that a writer removes
    meanwhile (after it committed a newer step, or by a rewind) does not raise.
    """
    without: set[str] = set()
    while (name := next((other for other in _step_directories(store) if other not in without), None)) is not None:
        try:
            if on_first is not None and not without:
                on_first(name)
            return read_manifest(store, name)
        except NoCheckpointError:
            # The directory has no manifest, or was removed because a newer checkpoint exists by now: try the next
            # directory.
            without.add(name)
    return None


def _step_directories(store: Names) -> list[str]:
    """Names of directories of steps, newest first, whether or not they have a committed checkpoint."""
    named = [(step, name) for name in store.names() if (step := step_of(name)) is not None]
    return [name for _, name in sorted(named, reverse=True)]


def find_committed_step(store: Names, step: int | None) -> int:
    """`step` itself, or the newest step for None. Raises NoCheckpointError, which lists the existing steps."""
    for name in _step_directories(store):
        number = step_of(name)
        if step in (None, number) and number is not None and _is_step(store, name):
            return number
    existing = steps(store)
    if not existing or (step is not None and step not in existing):
        shown = ", ".join(map(str, existing[-10:])) or "none"
        raise NoCheckpointError(
            f"no checkpoint of step {step} in {store.location}" if step is not None
            else f"no checkpoint in {store.location}",
            found=f"steps {shown}" if existing else "none",
            next="check the path; to start without a checkpoint, call latest() first, and skip load() if it is None",
        )
    return existing[-1] if step is None else step


def sweep_leftovers(
    store: Store, on_removed: Callable[[str, str, StorageError | None], None],
    on_left: Callable[[str, str], None] | None = None, spared: Collection[str] = (),
    run_later: Callable[[Callable[[], None]], None] = removal.run_now,
) -> None:
    """Remove the leftovers of dead writers: incomplete saves and unfinished deletions. The caller must hold the store's
    lock.

    on_left    called with each name that is kept because this store did not write it, and the reason
    spared     entries that this writer still uses
    run_later  is called first with a function that syncs the store, then with a function for each leftover, which
               removes it. It must call these functions in this order, on any thread, and stop at the first error
    """
    names = [name for name in store.names() if name not in spared]
    leftovers = [entry for entry in map(parse_entry, names) if entry is not None and _leftover_reason(store, entry)]
    if leftovers:
        # The rename that made the directory a leftover may not be durable. Without this sync, a power loss could give a
        # half-removed directory its step's name back.
        reasons = [(leftover.name, _leftover_reason(store, leftover)) for leftover in leftovers]
        run_later(partial(_sync_before, store, reasons, on_removed))
    for entry in leftovers:
        run_later(partial(_sweep_one, store, entry, _leftover_reason(store, entry), on_removed, on_left))


def _sync_before(
    store: Store, leftovers: Sequence[tuple[str, str]], on_removed: Callable[[str, str, StorageError | None], None]
) -> None:
    """Sync the store. If that fails, no leftover is removed, and `on_removed` is called for each leftover with the
    error.
    """
    try:
        sync_names(store)
    except StorageError as error:
        for name, reason in leftovers:
            on_removed(name, reason, error)
        raise


def _sweep_one(
    store: Store, entry: StoreEntry, reason: str, on_removed: Callable[[str, str, StorageError | None], None],
    on_left: Callable[[str, str], None] | None,
) -> None:
    try:
        left = "" if not store.is_link(entry.name) else "is a link, which Flowstone did not make"
        if not left:
            left = _remove(store, entry)
    except StorageError as error:
        on_removed(entry.name, reason, error)
        return
    if not left:
        on_removed(entry.name, reason, None)
    elif on_left is not None:
        on_left(entry.name, left)


def _leftover_reason(store: Store, entry: StoreEntry) -> str:
    """The reason why the entry is a dead writer's leftover; "" if it is not."""
    if entry.kind is EntryKind.STEP and not store.capabilities.atomic_rename:
        return "" if store.exists(path_inside(entry.name, MANIFEST_NAME)) else EntryKind.SAVING.value
    return entry.leftover or ""


def _remove(store: Store, entry: StoreEntry) -> str:
    """Remove a leftover. Returns "" if it was removed; else the reason why it stays, or its new name."""
    if entry.kind is EntryKind.TEMPORARY:
        store.remove(entry.name)
    elif entry.kind is EntryKind.MEASURING:
        removal.remove_all(store, entry.name)
    elif entry.kind is EntryKind.DELETING:
        return finish_deletion(store, entry)
    elif left := removal.empty_directory(store, entry.name):
        return f"holds {foreign_files_text(left)}"
    return ""


def finish_deletion(store: Store, entry: StoreEntry) -> str:
    """Remove what is left of a step's directory. If the directory has files of other programs, returns a text with the
    directory's new name and these files; else "".
    """
    left = removal.empty_directory(store, entry.name)
    if not left:
        return ""
    name = removal.rename_foreign_directory(store, entry)
    return f"the checkpoint is removed, but {name} remains: it has {foreign_files_text(left)}"


def foreign_files_text(names: Sequence[str]) -> str:
    """A list of files of other programs, for a message."""
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, which Flowstone did not write"


def write_rewind_note(store: Store, note: str) -> None:
    """Write the note of a rewind (an empty file named by `new_rewound_note`), unless it exists. Durable on return. The
    caller must hold the store's lock.
    """
    if not store.exists(note):
        store.put(note, b"steps above this one were set aside\n")
    sync_names(store)


def has_rewind_notes(store: Names) -> bool:
    """Whether the store has notes of rewinds, and thus has been one of several tiers."""
    return any(name.startswith(REWOUND) for name in store.names())


def rewind(store: Store, step: int) -> tuple[int, ...]:
    """Set every step above `step` aside (rename its directory, so that it is no longer a checkpoint), newest first.
    Returns the steps that were set aside. The caller must hold the store's lock.

    A crash in between leaves only complete checkpoints: the older ones.
    """
    store.check_lock()
    moved = tuple(s for s in reversed(steps(store)) if s > step)
    for newer in moved:
        removal.move_directory(store, step_directory(newer), new_superseded_directory(newer))
    sync_names(store)  # even if no directory was renamed: an earlier rewind may have died before its sync
    return moved
