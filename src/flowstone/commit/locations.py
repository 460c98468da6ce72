"""What a path holds, found before its content is trusted: a store, a checkpoint, or something else."""

from __future__ import annotations

import errno
import os

from flowstone.commit import catalog
from flowstone.commit.entries import is_journal, is_leftover, is_ours, step_of
from flowstone.commit.manifests import read_marker
from flowstone.errors import DamagedError, FlowstoneError, FormatError, NoCheckpointError, NotAStoreError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, MARKER_NAME
from flowstone.store.base import Names
from flowstone.store.lock import LOCK_NAME
from flowstone.store.tuning import TUNING_NAME

_LOOKED_AT_MAX = 200  # entries examined in a directory that is not a store
_PART_NAME = "path.json"  # in a further path of a striped store
_OURS = (LOCK_NAME, TUNING_NAME)  # files of ours that do not make a directory a store


def check_store(store: Names) -> None:
    """Raise NotAStoreError if the directory has content, and none of it is a store's.

    Accepted are: a store; checkpoints without a marker; an absent or empty directory; a directory in which a first save
    was interrupted.
    """
    try:
        read_marker(store)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
    else:
        return
    check_no_checkpoint(store)
    check_no_part(store)
    try:
        foreign = [name for name in store.names() if name not in _OURS and not is_leftover(name)]
        checkpoints = catalog.steps(store)
    except StorageError as error:
        if error.errno != errno.ENOTDIR:
            raise
        foreign, checkpoints = ["a file"], ()
    if step_of(os.path.basename(store.location)) is not None and any(map(is_ours, foreign)) and not checkpoints:
        raise DamagedError(
            f"{store.location} has no {MANIFEST_NAME}", found=", ".join(foreign[:5]),
            next="restore it from a copy, or open another step of that store",
        )
    if foreign and not checkpoints:
        from flowstone.commit.foreign import remedy  # imported here: most paths are stores

        below = "" if foreign == ["a file"] else stores_below(store)
        raise NotAStoreError(
            f"{store.location} is neither a store nor a checkpoint", missing=f"{MARKER_NAME}, step-*, {MANIFEST_NAME}",
            found=", ".join(foreign[:5]),
            next=f"give one of the stores in it: {below}" if below else remedy(store.location, foreign),
        )


def check_no_checkpoint(store: Names) -> None:
    """Raise NotAStoreError if the path given to a Checkpointer is a checkpoint: it would create a store inside."""
    if store.exists(MANIFEST_NAME) and not store.exists(MARKER_NAME):
        raise NotAStoreError(
            f"{store.location} is a checkpoint, not a store of checkpoints", found=MANIFEST_NAME,
            next=f"give the directory above it: {os.path.dirname(store.location)}",
        )


def check_no_part(store: Names) -> None:
    """Raise NotAStoreError if the path given is a further path of a striped store: it has segments alone."""
    if not store.exists(_PART_NAME):
        return
    from flowstone.store.striped.records import read_note  # imported here: most stores have one path

    try:
        of = read_note(store, _PART_NAME).location
    except (FormatError, StorageError):
        of = "which its path.json does not say"
    raise NotAStoreError(
        f"{store.location} has nothing but segments of the store at {of}", found=_PART_NAME,
        next=f"open {of}, which finds them here; or `flowstone pack` makes one of its checkpoints whole",
    )


def find_checkpoint(store: Names, step: int | None) -> int:
    """`step` itself, or the newest one for None, of the checkpoints.

    raises  NoCheckpointError, which lists those that there are, and the steps of a journal that leads on
    """
    try:
        return catalog.find(store, step)
    except NoCheckpointError as error:
        if step is None or not any(map(is_journal, store.names())):
            raise
        raise _with_journal(store, step, error) from None


def _with_journal(store: Names, step: int, error: NoCheckpointError) -> NoCheckpointError:
    """The same error, with the steps of the journal."""
    from flowstone.commit import journals  # imported here: most stores have none

    try:
        chain = journals.newest_chain(store)
        steps = [] if chain is None else [place.step for _, place in chain.steps(store, 0)]
    except FlowstoneError:
        return error  # safe: there is no such checkpoint, whatever is wrong with the journal, or has removed it now
    if chain is None or not steps:
        return error
    found = f"{error.facts['found']}; a journal behind step {chain.base}, with steps {steps[0]} to {steps[-1]}"
    if step not in steps:
        return NoCheckpointError(error.message, found=found, next=error.facts["next"])
    return NoCheckpointError(
        f"{error.message}: it is in the journal behind step {chain.base}", found=found,
        next=f"load it into a training: Checkpointer(...).load(state, step={step}) replays the journal up to there; "
        "to have it as a checkpoint, save that into another store",
    )


def stores_below(store: Names) -> str:
    """For a message: the first few subdirectories that are stores themselves; "" if there are none."""
    names = [name for name in store.names()[:_LOOKED_AT_MAX] if store.exists(f"{name}/{MARKER_NAME}")]
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
