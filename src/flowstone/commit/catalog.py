"""Which checkpoints exist, and what dead writers have left (docs/ORDERING.md, Retention and sweep, Rewind)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from flowstone.commit import removal
from flowstone.commit.manifests import inside, read_manifest
from flowstone.errors import NoCheckpointError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, step_directory, step_of_directory
from flowstone.store.base import Store
from flowstone.store.lock import LOCK_NAME
from flowstone.store.tuning import TUNING_NAME

SAVING, DELETING, SUPERSEDED, TUNING = ".saving-", ".deleting-", ".superseded-", ".flowstone-tuning-"
LEFT = ".left"  # behind a removed step's name: the directory of what somebody else had put into it
_LEFTOVER_DIRECTORIES = {
    SAVING: "a save that never finished", DELETING: "a deletion that never finished",
    TUNING: "a measurement that never finished",
}
_LEFTOVER_FILES = {
    f".{MARKER_NAME}-": "a marker that was never put in place",
    ".flowstone-probe-": "a probe for direct I/O that never finished",
    f".{TUNING_NAME}-": "a tuning that was never put in place",
    f".{LOCK_NAME}-": "a lock that was never put in place",
}


def steps(store: Store) -> tuple[int, ...]:
    """Steps with a manifest in place, ascending. Says nothing yet about their content."""
    found = ((step_of_directory(name), name) for name in store.names())
    return tuple(sorted(step for step, name in found if step is not None and store.exists(inside(name, MANIFEST_NAME))))


def newest(store: Store) -> Manifest | None:
    """The commit record of the newest step, checked; None in a store without any.

    A damaged one raises: going back silently would lose steps without a word.
    """
    existing = steps(store)
    return read_manifest(store, step_directory(existing[-1])) if existing else None


def find(store: Store, step: int | None) -> int:
    """`step` itself, or the newest one for None. Raises NoCheckpointError with what there is."""
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


def leftover(name: str) -> str | None:
    """Why an entry of a store is what a dead writer left, to be swept; None if it is not."""
    reasons = _LEFTOVER_DIRECTORIES | _LEFTOVER_FILES
    return next((why for prefix, why in reasons.items() if name.startswith(prefix)), None)


def sweep(
    store: Store, on_removed: Callable[[str, str, StorageError | None], None],
    on_left: Callable[[str, str], None] | None = None,
) -> None:
    """Remove what dead writers left: torn saves and unfinished deletions. Needs the lock.

    on_left  is told each entry that stays, as it is not ours, and why
    """
    leftovers = [(name, reason) for name in store.names() if (reason := leftover(name)) is not None]
    if leftovers:
        # The rename that made it a leftover may not be durable: without this sync a power loss
        # could give a half-removed directory its step's name back.
        store.sync_directory()
    for name, reason in leftovers:
        try:
            left = "" if not store.is_link(name) else "is a link, which Flowstone did not make"
            if not left:
                left = _remove(store, name)
        except StorageError as error:
            on_removed(name, reason, error)
            continue
        if not left:
            on_removed(name, reason, None)
        elif on_left is not None:
            on_left(name, left)


def _remove(store: Store, name: str) -> str:
    """Remove a leftover; why it stays, or is somewhere else now, if it does."""
    if name.startswith(tuple(_LEFTOVER_FILES)):
        store.remove(name)
    elif name.startswith(TUNING):
        removal.remove_all(store, name)
    elif name.startswith(DELETING):
        return finish_deletion(store, name)
    elif left := removal.empty(store, name):
        return f"holds {listed(left)}"
    return ""


def finish_deletion(store: Store, directory: str) -> str:
    """Empty a DELETING directory. Where there is more in it than is ours: where that is then, and what it is."""
    left = removal.empty(store, directory)
    if not left:
        return ""
    step = directory.removeprefix(DELETING).partition("-")[0]
    name = removal.set_apart(store, directory, f"step-{step}{LEFT}")
    return f"the checkpoint is removed; {name} keeps {listed(left)}"


def listed(names: Sequence[str]) -> str:
    """What is not ours, in words."""
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, which Flowstone did not write"


def rewind(store: Store, step: int) -> tuple[int, ...]:
    """Set every step above `step` aside, newest first; the steps that were. Needs the lock.

    Newest first, so that a crash in between leaves a shorter tail of whole checkpoints.
    """
    store.check_lock()
    moved = tuple(s for s in reversed(steps(store)) if s > step)
    for newer in moved:
        store.rename(step_directory(newer), f"{SUPERSEDED}{newer:08d}-{secrets.token_hex(8)}")
    store.sync_directory()  # also when nothing moved: an earlier rewind may have died before its sync
    return moved
