"""Which checkpoints exist, which go, and in what order they do (docs/ORDERING.md, Retention)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flowstone.commit.contents import inside, read_manifest
from flowstone.config import Keep
from flowstone.errors import NoCheckpointError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, step_directory, step_of_directory
from flowstone.store.base import Store
from flowstone.store.lock import LOCK_NAME
from flowstone.store.tuning import TUNING_NAME

SAVING, DELETING, SUPERSEDED, TUNING = ".saving-", ".deleting-", ".superseded-", ".flowstone-tuning-"
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """What retention decides about one step, and why."""

    step: int
    keep: bool
    reason: str


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
            next="check the path; to start fresh where there is none, ask latest() first",
        )
    return existing[-1] if step is None else step


def judge(existing: Sequence[int], keep: Keep | None) -> tuple[Verdict, ...]:
    """Retention as a pure function: a verdict on each of `existing` (committed steps, ascending)."""
    verdicts = []
    for position, step in enumerate(existing):
        rank = len(existing) - position
        if keep is None:
            verdicts.append(Verdict(step, True, "everything is kept"))
        elif rank <= keep.last:
            verdicts.append(Verdict(step, True, f"among the newest {keep.last}"))
        elif keep.every is not None and step % keep.every == 0:
            verdicts.append(Verdict(step, True, f"a multiple of {keep.every}"))
        else:
            verdicts.append(Verdict(step, False, f"older than the newest {keep.last}"))
    return tuple(verdicts)


def prune(
    store: Store, verdicts: Iterable[Verdict], on_removed: Callable[[str, str, StorageError | None], None]
) -> None:
    """Remove each step that its verdict gives up, oldest first. Needs the lock.

    on_removed  is told each directory, the reason, and the error if it could not be removed;
                what is left is swept later
    """
    for verdict in verdicts:
        if verdict.keep:
            continue
        name = step_directory(verdict.step)
        try:
            target = f"{DELETING}{verdict.step:08d}-{secrets.token_hex(8)}"
            store.rename(name, target)
            store.sync_directory()
            _remove(store, target)
        except StorageError as error:
            on_removed(name, verdict.reason, error)
        else:
            on_removed(name, verdict.reason, None)


def leftover(name: str) -> str | None:
    """Why an entry of a store is what a dead writer left, to be swept; None if it is not."""
    reasons = _LEFTOVER_DIRECTORIES | _LEFTOVER_FILES
    return next((why for prefix, why in reasons.items() if name.startswith(prefix)), None)


def sweep(store: Store, on_removed: Callable[[str, str, StorageError | None], None]) -> None:
    """Remove what dead writers left: torn saves and unfinished deletions. Needs the lock."""
    leftovers = [(name, reason) for name in store.names() if (reason := leftover(name)) is not None]
    if leftovers:
        # The rename that made it a leftover may not be durable: without this sync a power loss
        # could give a half-removed directory its step's name back.
        store.sync_directory()
    for name, reason in leftovers:
        try:
            if name.startswith(tuple(_LEFTOVER_FILES)):
                store.remove(name)
            else:
                _remove(store, name)
        except StorageError as error:
            on_removed(name, reason, error)
        else:
            on_removed(name, reason, None)


def rewind(store: Store, step: int) -> tuple[int, ...]:
    """Set every step above `step` aside, newest first; the steps that were. Needs the lock.

    Newest first, so that a crash in between leaves a shorter tail of whole checkpoints.
    """
    moved = tuple(s for s in reversed(steps(store)) if s > step)
    for newer in moved:
        store.rename(step_directory(newer), f"{SUPERSEDED}{newer:08d}-{secrets.token_hex(8)}")
    store.sync_directory()  # also when nothing moved: an earlier rewind may have died before its sync
    return moved


def _remove(store: Store, directory: str) -> None:
    """The manifest first, so that a half-removed directory is no checkpoint under any name."""
    names = sorted(store.names(directory), key=lambda name: name != MANIFEST_NAME)
    for name in names:
        store.remove(inside(directory, name))
    store.remove(directory)
