"""Copy the newest checkpoint of a store in memory into another store. The memory agent does this when a job has died.
"""

from __future__ import annotations

from flowstone.commit import catalog
from flowstone.commit.entries import new_rewound_note, step_directory
from flowstone.commit.manifests import read_manifest, read_marker
from flowstone.commit.writer import StoreWriter
from flowstone.config import STEP_MAX
from flowstone.errors import StepExistsError, StorageError, is_damage
from flowstone.format.manifest import Manifest
from flowstone.log import log
from flowstone.store.base import UNPACED, Store
from flowstone.store.memory.agent_wire import FlushResult
from flowstone.store.memory.store import StoreInMemory
from flowstone.tiered import lineage
from flowstone.tiered.copying import SourceFailedError, source_errors
from flowstone.tiered.flush import flush, has_checkpoint
from flowstone.tiered.flusher import apply_rewinds
from flowstone.tiered.restore import check_same_run


def copy_newest(source: StoreInMemory, target: Store, holder: str) -> FlushResult | None:
    """Copy the newest undamaged checkpoint of `source` into `target`, durable on return. Blocks.

    holder   the holder's name in the lock of `target`

    returns  the checkpoint that `target` has now; None if there is none to copy

    First the rewinds of `source` are repeated in `target`: the same steps are set aside, and the notes are written. If
    `target` already has the checkpoint, nothing is copied. A checkpoint that is damaged in `source` is skipped, with a
    warning. All files of a checkpoint are opened before the first is copied, since the memory agent may end meanwhile.
    Before the copy is published, its bytes are read again from `target`, past its cache.

    raises   StepExistsError  `target` has another checkpoint of that step, or a newer step; or `target` was rewound,
                              and `source` still has the steps from before the rewind
             NotAStoreError   `target` is a store of another run
             DamagedError     all checkpoints of `source` are damaged; or `target` returns bytes that differ from the
                              bytes written, and nothing was published
             LockedError, StorageError
    """
    steps = catalog.steps(source)
    if not steps:
        return None
    writer = StoreWriter(target, None, _removed, _left)
    writer.identity = identity = read_marker(source).store
    writer.begin(holder)
    try:
        if writer.store_id != identity:
            # raises an error that says more than the one below
            has_checkpoint(target, read_manifest(source, step_directory(steps[-1])))
            check_same_run(target, writer.store_id or "", identity)
        writer.sweep()
        stale = _follow_rewinds(source, target, steps[-1])
        newest = max(catalog.steps(target), default=-1)
        skipped_reason = ""
        for step in reversed([candidate for candidate in steps if candidate not in stale]):
            try:
                manifest = _copied(source, target, step, newest)
            except SourceFailedError as failure:
                if not is_damage(failure.error):
                    raise failure.error from failure
                log.warning("step %d of %s is not copied: %s", step, source.location, failure.error)
                last = failure.error
                skipped_reason = skipped_reason or f"step {step} of {source.location} is damaged: {last.message}"
            else:
                return FlushResult(manifest.step, manifest.id, skipped_reason)
        raise last
    finally:
        writer.release_lost_lock()


def _follow_rewinds(source: StoreInMemory, target: Store, newest: int) -> tuple[int, ...]:
    """Repeat the rewinds of `source` in `target`. Returns the steps of `source` from before rewinds of `target`. Raises
    StepExistsError if `newest` is one of them.
    """
    ours, theirs = lineage.read_contents(source), lineage.read_contents(target)
    stale = lineage.superseded(ours, [theirs])
    if newest in stale:
        above = min(theirs.notes[note] for note in lineage.missing_notes(ours, [theirs]))
        raise StepExistsError(
            f"{target.location} was rewound to step {above}, but {source.location} still has the old step {newest}",
            next=f"call rewind({above}) on the Checkpointer of {source.location}, too, or give another directory",
        )
    apply_rewinds(target, [ours])
    if not catalog.has_rewind_notes(target):
        # from now on `target` counts as one of several tiers, so later rewinds write notes into it
        catalog.write_rewind_note(target, new_rewound_note(STEP_MAX))
    return stale


def _copied(source: StoreInMemory, target: Store, step: int, newest: int) -> Manifest:
    """Copy `step`, and return its manifest. `newest`: the newest step that `target` had before."""
    with source_errors():
        snapshot = source.snapshot(step_directory(step))
        manifest = read_manifest(snapshot, step_directory(step))
    if newest > step and not has_checkpoint(target, manifest):
        raise StepExistsError(
            f"{target.location} has step {newest}, which is newer than step {step} of {source.location}",
            next="call rewind() to set that step aside, or give another directory",
        )
    return flush(snapshot, target, step, UNPACED, _never_pause, manifest.id, reads_back=True).manifest


def _never_pause() -> None: ...


def _removed(name: str, why: str, error: StorageError | None) -> None:
    log.info("removed %s (%s): %s", name, why, error or "done")


def _left(name: str, why: str) -> None:
    log.info("left %s: %s", name, why)
