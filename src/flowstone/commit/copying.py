"""Copy a checkpoint, bit for bit, from a store that maps its files into another one, by the order of a save."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from flowstone import _native
from flowstone.commit import catalog, publish, removal
from flowstone.commit import read as contents
from flowstone.commit.durable import sync
from flowstone.commit.entries import step_directory
from flowstone.commit.manifests import inside, read_manifest, read_marker
from flowstone.commit.verify import Checked, Share, check_share, segment_bytes
from flowstone.commit.writer import StoreWriter
from flowstone.config import READ_ARENA_BYTES
from flowstone.errors import DamagedError, StepExistsError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, Manifest
from flowstone.log import log
from flowstone.store.base import FilePlan, MappedBytes, Maps, Store


class MappingStore(Store, Maps, Protocol):
    """A store with `Capabilities.maps`."""


def copy_newest(source: MappingStore, target: Store, holder: str) -> Manifest | None:
    """Make the newest sound checkpoint of `source` one of `target`, durable on return. Blocks.

    holder   the name under which `target` is locked meanwhile

    returns  the manifest of the newest checkpoint that `target` has then; None: there is none to copy

    Where `target` has that step already, nothing is copied. One that is damaged in `source` is left out, with a
    warning. The bytes are verified in `target`, before the checkpoint exists there.

    raises   StepExistsError  `target` has that step, and it is another checkpoint
             DamagedError     `source` has checkpoints, and none is sound
             LockedError, StorageError
    """
    steps = catalog.steps(source)
    if not steps:
        return None
    writer = StoreWriter(target, None, _removed, _left)
    writer.identity = read_marker(source).store
    newest = writer.begin(holder)
    try:
        for step in reversed(steps):
            if newest is not None and newest >= step:
                return _there(source, target, newest)
            try:
                return _copy(source, target, step)
            except DamagedError as error:
                log.warning("step %d of %s is not copied: %s", step, source.location, error)
                last = error
        raise last
    finally:
        writer.give_up()


def _removed(name: str, why: str, error: StorageError | None) -> None:
    log.info("removed %s (%s): %s", name, why, error or "done")


def _left(name: str, why: str) -> None:
    log.info("left %s: it %s", name, why)


def _there(source: Store, target: Store, newest: int) -> Manifest:
    """The target's newest checkpoint. Raises StepExistsError if the source has another one of that step."""
    found = read_manifest(target, step_directory(newest))
    if newest in catalog.steps(source) and (own := read_manifest(source, step_directory(newest))).id != found.id:
        raise StepExistsError(
            f"{target.location} has another checkpoint of step {newest} than {source.location}",
            expected=f"checkpoint {own.id}", found=f"checkpoint {found.id}",
            next="flush into a directory of its own; or rewind that store to an earlier step",
        )
    return found


def _copy(source: MappingStore, target: Store, step: int) -> Manifest:
    """THE ORDER: as a save, with bytes that come from files. What fails leaves no draft."""
    directory = step_directory(step)
    manifest = read_manifest(source, directory)
    text, *small = (
        source.read(inside(directory, name)) for name in (MANIFEST_NAME, manifest.index.name, manifest.objects.name)
    )
    segments = {row.name: source.mapped(inside(directory, row.name)) for row in manifest.segments}
    # From here on nothing more is asked of the source: it may end.
    draft = publish.begin(target, step, secrets.token_hex(8))
    try:
        _write(segments, target, draft.directory)
        for row, data in zip((manifest.index, manifest.objects), small, strict=True):
            target.put(inside(draft.directory, row.name), data)
        _verify(target, draft.directory, manifest)
        if draft.is_in_place:
            sync(target, draft.directory)
            sync(target)
            target.check_lock()
            target.put(inside(draft.directory, MANIFEST_NAME), text)
            return manifest
        target.put(inside(draft.directory, MANIFEST_NAME), text)
        sync(target, draft.directory)
        target.check_lock()
        target.rename(draft.directory, directory)
        sync(target)
    except BaseException:
        _give_up(target, draft)
        raise
    return manifest


def _write(segments: Mapping[str, MappedBytes | None], target: Store, draft: str) -> None:
    """Write the segments, durably but for their names."""
    found = [(name, mapped) for name, mapped in segments.items() if mapped is not None]
    count = len(found)
    rows = _native.WriteExtents(
        file=np.arange(count, dtype=np.uint32), offset=np.zeros(count, np.uint64),
        length=np.array([mapped.bytes for _, mapped in found], np.uint64),
        address=np.array([mapped.address for _, mapped in found], np.uint64),
        chunk=np.full(count, _native.NO_DIGEST, np.uint64), layout=np.full(count, -1, np.int64), layouts=[], chunks=0,
    )
    arena = _arena(target)
    try:
        plans = [FilePlan(inside(draft, name), mapped.bytes) for name, mapped in found]
        receipt = target.write(plans, rows, arena).receipt()
    finally:
        arena.close()
    if receipt.error is not None:
        raise receipt.error


def _verify(target: Store, draft: str, manifest: Manifest) -> None:
    """Every byte, as the target gives it back. Raises DamagedError."""
    index = contents.read_index(target, draft, manifest)
    contents.read_objects(target, draft, manifest)
    arena = _arena(target)
    try:
        findings = check_share(Checked(target, draft, manifest, index), Share(0, segment_bytes(manifest)), arena)
    finally:
        arena.close()
    if findings:
        found = "; ".join(f"{one.file}: {one.what}" for one in findings[:5])
        raise DamagedError(
            f"step {manifest.step} is not what was saved", found=found, next="an older step may be sound"
        )


def _arena(store: Store) -> _native.Arena:
    requests = [store.settings("write").tuning.request_bytes, store.settings("read").tuning.request_bytes]
    return _native.Arena(budget_bytes=READ_ARENA_BYTES, block_bytes=max(requests), background=True)


def _give_up(target: Store, draft: publish.Draft) -> None:
    """Remove a draft that is certainly not published."""
    try:
        if not (draft.is_in_place and target.exists(inside(draft.directory, MANIFEST_NAME))):
            removal.empty(target, draft.directory)
    except StorageError:
        return  # safe: the next writer sweeps it
