"""The newest checkpoint of a store in memory becomes one of another store: what the memory agent's flush does."""

from __future__ import annotations

from flowstone.commit import catalog
from flowstone.commit.entries import step_directory
from flowstone.commit.manifests import read_manifest, read_marker
from flowstone.commit.writer import StoreWriter
from flowstone.errors import StorageError, is_damage
from flowstone.format.manifest import Manifest
from flowstone.log import log
from flowstone.store.base import UNPACED, Store
from flowstone.store.memory import StoreInMemory
from flowstone.tiers.copying import SourceFailedError
from flowstone.tiers.flush import flush, is_there


def copy_newest(source: StoreInMemory, target: Store, holder: str) -> Manifest | None:
    """Make the newest sound checkpoint of `source` one of `target`, durable on return. Blocks.

    holder   the name under which `target` is locked meanwhile

    returns  the manifest of the newest checkpoint that `target` has then; None: there is none to copy

    Where `target` has that step already, nothing is copied. One that is damaged in `source` is left out, with a
    warning. All files of one are opened before the first is copied: what names them may end. The bytes are read again
    from `target`, past its cache, before the checkpoint exists there.

    raises   StepExistsError  `target` has that step, and it is another checkpoint
             DamagedError     `source` has checkpoints, and none is sound; or `target` gives back other bytes than
                              were written: nothing is published then
             LockedError, StorageError
    """
    steps = catalog.steps(source)
    if not steps:
        return None
    writer = StoreWriter(target, None, _removed, _left)
    writer.identity = read_marker(source).store
    newest = writer.begin(holder)
    try:
        writer.sweep()
        for step in reversed(steps):
            if newest is not None and newest >= step:
                return _there(source, target, newest)
            try:
                held = source.held(step_directory(step))
                return flush(held, target, step, UNPACED, _never_rest, reads_back=True).manifest
            except SourceFailedError as failure:
                if not is_damage(failure.error):
                    raise failure.error from failure
                log.warning("step %d of %s is not copied: %s", step, source.location, failure.error)
                last = failure.error
        raise last
    finally:
        writer.give_up()


def _there(source: Store, target: Store, newest: int) -> Manifest:
    """The target's newest checkpoint. Raises StepExistsError if the source has another one of that step."""
    if newest in catalog.steps(source):
        is_there(target, read_manifest(source, step_directory(newest)))
    return read_manifest(target, step_directory(newest))


def _never_rest() -> None: ...


def _removed(name: str, why: str, error: StorageError | None) -> None:
    log.info("removed %s (%s): %s", name, why, error or "done")


def _left(name: str, why: str) -> None:
    log.info("left %s: it %s", name, why)
