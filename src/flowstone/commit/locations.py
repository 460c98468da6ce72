"""Checks whether a path is a store, a checkpoint, or something else, before its content is trusted."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from flowstone.commit import catalog
from flowstone.commit.entries import is_checkpoint_file, is_journal, is_leftover, step_of
from flowstone.commit.manifests import read_marker
from flowstone.errors import (
    DamagedError,
    FlowstoneError,
    FormatError,
    FrameworkError,
    NoCheckpointError,
    NotAStoreError,
    StorageError,
)
from flowstone.extensions import extension
from flowstone.format.manifest import MANIFEST_NAME, MARKER_NAME
from flowstone.store.base import Names
from flowstone.store.lock import LOCK_NAME
from flowstone.store.tuning import TUNING_NAME

if TYPE_CHECKING:
    from flowstone.journal.store_journals import StoreJournals

_EXAMINED_MAX = 200  # entries that are examined in a directory that is not a store
_PART_NAME = "path.json"  # name of the file in each path of a striped store except the first
_OURS = (LOCK_NAME, TUNING_NAME)  # files of Flowstone that do not make a directory a store


def check_store(store: Names) -> None:
    """Raise NotAStoreError if the directory has files, but is not a store.

    Does not raise for a store, a directory of checkpoints without a store's marker, an absent or empty directory, or a
    directory in which the first save was interrupted.
    """
    try:
        read_marker(store)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
    else:
        return
    check_no_checkpoint(store)
    check_not_striped_path(store)
    try:
        foreign = [name for name in store.names() if name not in _OURS and not is_leftover(name)]
        checkpoints = catalog.steps(store)
    except StorageError as error:
        if error.errno != errno.ENOTDIR:
            raise
        foreign, checkpoints = ["a file"], ()
    if step_of(
        os.path.basename(store.location)
    ) is not None and any(map(is_checkpoint_file, foreign)) and not checkpoints:
        raise DamagedError(
            f"{store.location} has no {MANIFEST_NAME}", found=", ".join(foreign[:5]),
            next="restore this file from a copy, or open another step of the store",
        )
    if foreign and not checkpoints:
        from flowstone.commit.recognize_format import import_hint  # imported here: most paths are stores

        below = "" if foreign == ["a file"] else stores_below(store)
        raise NotAStoreError(
            f"{store.location} is neither a store nor a checkpoint", missing=f"{MARKER_NAME}, step-*, {MANIFEST_NAME}",
            found=", ".join(foreign[:5]),
            next=f"give one of the stores in it: {below}" if below else import_hint(store.location, foreign),
        )


def check_no_checkpoint(store: Names) -> None:
    """Raise NotAStoreError if the path given to a Checkpointer is a checkpoint, since the Checkpointer would create a
    store inside it.
    """
    if store.exists(MANIFEST_NAME) and not store.exists(MARKER_NAME):
        raise NotAStoreError(
            f"{store.location} is a checkpoint, not a store of checkpoints", found=MANIFEST_NAME,
            next=f"give the directory above it: {os.path.dirname(store.location)}",
        )


def check_not_striped_path(store: Names) -> None:
    """Raise NotAStoreError if the path is one of a striped store (a store spread over several paths), but not its first
    one. The other paths have only segments.
    """
    if not store.exists(_PART_NAME):
        return
    try:
        of = extension("striped.note")(store, _PART_NAME).location
    except (FormatError, StorageError):
        of = ""
    raise NotAStoreError(
        f"{store.location} has only some files of a striped store{f', {of}' if of else ''}",
        found=_PART_NAME,
        next=f"open {of or 'that store'}; or copy a checkpoint into one directory with `flowstone pack`",
    )


def find_checkpoint(store: Names, step: int | None) -> int:
    """`step` itself, or the newest checkpoint's step for None.

    raises  NoCheckpointError, which lists the existing checkpoints, and the steps of the journal after them
    """
    try:
        return catalog.find_committed_step(store, step)
    except NoCheckpointError as error:
        if step is None:
            raise
        raise _with_journal(store, step, error) from None


def journals_of(store: Names) -> StoreJournals | None:
    """The journals of a store; None if it has none.

    raises  FrameworkError  it has some, and this installation lacks the optional part of Flowstone that reads them.
                            Their steps may be newer than every checkpoint, so they must not be ignored
    """
    if not any(map(is_journal, store.names())):
        return None
    try:
        journals: Callable[[Names], StoreJournals] = extension("journal.of_store")
    except FrameworkError as error:
        raise FrameworkError(
            f"cannot read the steps in the journal of {store.location}: {error.message}",
            next=str(error.facts.get("next")),
        ) from error
    return journals(store)


def _with_journal(store: Names, step: int, error: NoCheckpointError) -> NoCheckpointError:
    """The error with the steps of the journal added."""
    try:
        journals = journals_of(store)
        chain = None if journals is None else journals.newest_chain()
        steps = [] if chain is None else [place.step for _, place in chain.steps(store, 0)]
    except FlowstoneError:
        return error  # the checkpoint does not exist, whether the journal is damaged, was removed, or is intact
    if chain is None or not steps:
        return error
    existing = f"{error.facts['found']}; a journal after step {chain.base}, with steps {steps[0]} to {steps[-1]}"
    if step not in steps:
        return NoCheckpointError(error.message, found=existing, next=error.facts["next"])
    return NoCheckpointError(
        f"{error.message}: it is in the journal after step {chain.base}", found=existing,
        next=f"in a training script, Checkpointer(...).load(state, step={step}) replays the journal up to that step; "
        "to make a checkpoint of it, save the loaded state into another store",
    )


def stores_below(store: Names) -> str:
    """A text for a message that names the first few subdirectories that are stores; "" if no subdirectory is a store.
    """
    names = [name for name in store.names()[:_EXAMINED_MAX] if store.exists(f"{name}/{MARKER_NAME}")]
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
