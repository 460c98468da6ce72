"""Which checkpoints exist, and what dead writers left behind (docs/ORDERING.md, Retention and sweep, Rewind)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from flowstone.commit import removal
from flowstone.commit.durable import sync
from flowstone.commit.entries import (
    REWOUND,
    Entry,
    Kind,
    new_superseded_directory,
    parse,
    step_directory,
    step_of,
)
from flowstone.commit.manifests import inside, lacks_manifest, read_manifest
from flowstone.errors import NoCheckpointError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, Manifest
from flowstone.store.base import Names, Store


def steps(store: Names) -> tuple[int, ...]:
    """Steps with a manifest, and those that have lost theirs, ascending. Their content is not checked."""
    found = ((step_of(name), name) for name in store.names())
    return tuple(sorted(step for step, name in found if step is not None and _is_step(store, name)))


def _is_step(store: Names, directory: str) -> bool:
    return store.exists(inside(directory, MANIFEST_NAME)) or lacks_manifest(store, directory)


def newest(store: Names, on_first: Callable[[str], None] | None = None) -> Manifest | None:
    """The manifest of the newest step, checked; None in a store without checkpoints.

    on_first  called with the directory that is looked into first, before anything in it is asked for

    A manifest that is damaged or missing raises: silently taking an older one would lose steps. A step that a writer
    removes meanwhile (it has committed a newer step, or rewound) does not raise.
    """
    without: set[str] = set()
    while (name := next((one for one in _step_directories(store) if one not in without), None)) is not None:
        try:
            if on_first is not None and not without:
                on_first(name)
            return read_manifest(store, name)
        except NoCheckpointError:
            # Nothing is committed in it, or it has gone because there is a newer one by now: so look again.
            without.add(name)
    return None


def _step_directories(store: Names) -> list[str]:
    """Names of directories of steps, newest first, whether or not anything is committed in them."""
    found = [(step, name) for name in store.names() if (step := step_of(name)) is not None]
    return [name for _, name in sorted(found, reverse=True)]


def find(store: Names, step: int | None) -> int:
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
            next="check the path; to start fresh when there is no checkpoint, call latest() first",
        )
    return existing[-1] if step is None else step


def sweep(
    store: Store, on_removed: Callable[[str, str, StorageError | None], None],
    on_left: Callable[[str, str], None] | None = None, spared: Collection[str] = (),
    later: Callable[[Callable[[], None]], None] = removal.at_once,
) -> None:
    """Remove what dead writers left: torn saves and unfinished deletions. Needs the lock.

    on_left  called with each name that is kept because this store did not write it, and the reason
    spared   entries that this writer goes on with
    later    is given what syncs the store, and then what removes each leftover that is there now, to call them in this
             order, and none after one that raises. Any thread
    """
    names = [name for name in store.names() if name not in spared]
    leftovers = [entry for entry in map(parse, names) if entry is not None and _leftover(store, entry)]
    if leftovers:
        # The rename that made it a leftover may not be durable: without this sync a power loss
        # could give a half-removed directory its step's name back.
        later(partial(_sync_before, store, [(one.name, _leftover(store, one)) for one in leftovers], on_removed))
    for entry in leftovers:
        later(partial(_sweep_one, store, entry, _leftover(store, entry), on_removed, on_left))


def _sync_before(
    store: Store, leftovers: Sequence[tuple[str, str]], on_removed: Callable[[str, str, StorageError | None], None]
) -> None:
    """Sync the store. If that fails, none of the leftovers is removed, and each is told: the error is logged alone."""
    try:
        sync(store)
    except StorageError as error:
        for name, reason in leftovers:
            on_removed(name, reason, error)
        raise


def _sweep_one(
    store: Store, entry: Entry, reason: str, on_removed: Callable[[str, str, StorageError | None], None],
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


def _leftover(store: Store, entry: Entry) -> str:
    """The reason why the entry is a dead writer's leftover; "" if it is not."""
    if entry.kind is Kind.STEP and not store.capabilities.atomic_rename:
        return "" if store.exists(inside(entry.name, MANIFEST_NAME)) else Kind.SAVING.value
    return entry.leftover or ""


def _remove(store: Store, entry: Entry) -> str:
    """Remove a leftover. Returns why it stays, or where it was moved to, if it was not removed; else ""."""
    if entry.kind is Kind.TEMPORARY:
        store.remove(entry.name)
    elif entry.kind is Kind.MEASURING:
        removal.remove_all(store, entry.name)
    elif entry.kind is Kind.DELETING:
        return finish_deletion(store, entry)
    elif left := removal.empty(store, entry.name):
        return f"holds {listed(left)}"
    return ""


def finish_deletion(store: Store, entry: Entry) -> str:
    """Remove the rest of a step. If foreign files are in it: returns the new name of the directory, and the files."""
    left = removal.empty(store, entry.name)
    if not left:
        return ""
    name = removal.set_apart(store, entry)
    return f"the checkpoint is removed; {name} keeps {listed(left)}"


def listed(names: Sequence[str]) -> str:
    """Foreign files, as text for a message."""
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, which Flowstone did not write"


def put_note(store: Store, note: str) -> None:
    """Note a rewind (`new_rewound_note`), unless that is done. Durable on return. Needs the lock."""
    if not store.exists(note):
        store.put(note, b"steps above this one were set aside\n")
    sync(store)


def is_one_of_several(store: Names) -> bool:
    """Whether the store has been one of several tiers: it has notes of rewinds."""
    return any(name.startswith(REWOUND) for name in store.names())


def rewind(store: Store, step: int) -> tuple[int, ...]:
    """Set every step above `step` aside, newest first. Returns those steps. Needs the lock.

    Newest first, so that a crash in between leaves a shorter tail of whole checkpoints.
    """
    store.check_lock()
    moved = tuple(s for s in reversed(steps(store)) if s > step)
    for newer in moved:
        removal.move(store, step_directory(newer), new_superseded_directory(newer))
    sync(store)  # even if nothing moved: an earlier rewind may have died before its sync
    return moved
