"""The newest checkpoint of a store in memory becomes one of another store: what the memory agent's flush does."""

from __future__ import annotations

from flowstone.commit import catalog
from flowstone.commit.entries import new_rewound_note, step_directory
from flowstone.commit.manifests import read_manifest, read_marker
from flowstone.commit.writer import StoreWriter
from flowstone.config import STEP_MAX
from flowstone.errors import StepExistsError, StorageError, is_damage
from flowstone.format.manifest import Manifest
from flowstone.log import log
from flowstone.store.agent_wire import Copied
from flowstone.store.base import UNPACED, Store
from flowstone.store.memory import StoreInMemory
from flowstone.tiers import lineage
from flowstone.tiers.copying import SourceFailedError, reading
from flowstone.tiers.flush import flush, is_there
from flowstone.tiers.flusher import align
from flowstone.tiers.restore import check_same_run


def copy_newest(source: StoreInMemory, target: Store, holder: str) -> Copied | None:
    """Make the newest sound checkpoint of `source` one of `target`, durable on return. Blocks.

    holder   the name under which `target` is locked meanwhile

    returns  which checkpoint `target` has; None: there is none to copy

    First the rewinds of `source` are repeated in `target`: the same steps are set aside there, and the notes are put.
    If `target` has the checkpoint already, nothing is copied. A checkpoint that is damaged in `source` is skipped, with
    a warning. All files of a checkpoint are opened before the first is copied, as the memory agent may end meanwhile.
    The bytes are read again from `target`, past its cache, before the checkpoint exists there.

    raises   StepExistsError  `target` has another checkpoint of that step, or a newer one; or it was rewound, and what
                              is in `source` is from before that
             NotAStoreError   `target` is a store of another run
             DamagedError     `source` has checkpoints, and none is sound; or `target` gives back other bytes than
                              were written: nothing is published then
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
            is_there(target, read_manifest(source, step_directory(steps[-1])))  # says more, if both have that step
            check_same_run(target, writer.store_id or "", identity)
        writer.sweep()
        stale = _follow_rewinds(source, target, steps[-1])
        newest = max(catalog.steps(target), default=-1)
        skipped_reason = ""
        for step in reversed([one for one in steps if one not in stale]):
            try:
                made = _copied(source, target, step, newest)
            except SourceFailedError as failure:
                if not is_damage(failure.error):
                    raise failure.error from failure
                log.warning("step %d of %s is not copied: %s", step, source.location, failure.error)
                last = failure.error
                skipped_reason = skipped_reason or f"step {step} of {source.location} is damaged: {last.message}"
            else:
                return Copied(made.step, made.id, skipped_reason)
        raise last
    finally:
        writer.give_up()


def _follow_rewinds(source: StoreInMemory, target: Store, newest: int) -> tuple[int, ...]:
    """Set aside in `target` the steps that rewinds have set aside in `source`. Returns the steps of `source` that a
    rewind in `target` has set aside; raises StepExistsError if `newest` is one of these.
    """
    ours, theirs = lineage.look(source), lineage.look(target)
    stale = lineage.superseded(ours, [theirs])
    if newest in stale:
        above = min(theirs.notes[note] for note in lineage.missing_notes(ours, [theirs]))
        raise StepExistsError(
            f"{target.location} was rewound to step {above}; step {newest} of {source.location} is from before that",
            next=f"call rewind({above}) of {source.location} as well, or give another directory",
        )
    align(target, [ours])
    if not catalog.is_one_of_several(target):
        catalog.put_note(target, new_rewound_note(STEP_MAX))  # later rewinds are noted there, even without this source
    return stale


def _copied(source: StoreInMemory, target: Store, step: int, newest: int) -> Manifest:
    """The manifest of `step`, once `target` has it. `newest`: the newest step there."""
    with reading():
        held = source.held(step_directory(step))
        manifest = read_manifest(held, step_directory(step))
    if newest > step and not is_there(target, manifest):
        raise StepExistsError(
            f"{target.location} has step {newest}, which is newer than step {step} of {source.location}",
            next="call rewind() to set it aside there, or give another directory",
        )
    return flush(held, target, step, UNPACED, _never_rest, manifest.id, reads_back=True).manifest


def _never_rest() -> None: ...


def _removed(name: str, why: str, error: StorageError | None) -> None:
    log.info("removed %s (%s): %s", name, why, error or "done")


def _left(name: str, why: str) -> None:
    log.info("left %s: it %s", name, why)
