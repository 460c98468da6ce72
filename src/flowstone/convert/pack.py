"""Pack: a step that refers to files of earlier ones becomes an ordinary checkpoint of format version 1."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from flowstone.arguments import check_work, new_place
from flowstone.checkpoint import Checkpoint, open_checkpoint
from flowstone.cluster import Cluster
from flowstone.commit import publish
from flowstone.commit.entries import step_of
from flowstone.commit.read import encode_sections, join_objects
from flowstone.convert.bucket_draft import BucketDraft
from flowstone.convert.copy import BUDGET_BYTES_DEFAULT, Copied, Job, copy, resumable, window_bytes, windows
from flowstone.convert.draft import Draft
from flowstone.convert.file_io import QUEUE_DEPTH, REQUEST_BYTES, backend
from flowstone.convert.layout import Output, plan_digest
from flowstone.convert.sources.flowstone import read_flowstone
from flowstone.convert.store_writes import Unresumed
from flowstone.convert.targets.flowstone import StepLayout, io_record, lay_out_step, publication_of
from flowstone.errors import ArgumentError
from flowstone.format.manifest import INDEX_NAME, MANIFEST_NAME, OBJECTS_NAME, Manifest
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.objects.urls import ObjectUrl


@dataclass(frozen=True, slots=True)
class PackReport:
    """What a pack did. `resumed_bytes`: of `bytes`, what an earlier, unfinished one had written."""

    path: str
    step: int
    tensors: int
    files: tuple[str, ...]
    bytes: int
    resumed_bytes: int
    seconds: float


def pack(
    checkpoint: str | os.PathLike[str] | Store | Checkpoint, path: str | os.PathLike[str], *, step: int | None = None,
    budget_bytes: int = BUDGET_BYTES_DEFAULT, on_progress: Callable[[int, int], None] | None = None,
    cluster: Cluster | None = None,
) -> PackReport:
    """Make a step an ordinary checkpoint in a directory of its own, in bounded memory; every chunk is verified. Blocks.

    What comes out needs no feature beyond version 1: every tensor lies as a whole in a segment that lists it, and any
    version of Flowstone, and any reader of safetensors, reads it. Objects are the same, those of each rank too. Killed
    and called again with the same arguments, it goes on where the last durable window ended; the directory appears
    under its name once it is whole and durable.

    checkpoint   a store (its newest step, or `step`), or one checkpoint
    path         a new directory, or an empty one; or the URL of a new prefix of an object store, in which a pack that
                 was killed begins anew. If it is called `step-N`, N has to be the step
    budget_bytes of memory for bytes on their way
    on_progress  is told the bytes done and the bytes in all
    cluster      does it, in parts of which each has that budget; None: this process does

    raises  StorageError where something else is at `path`, DamagedError, NoCheckpointError, ArgumentError, ...
    """
    check_work(on_progress=on_progress, cluster=cluster)
    begun, target = time.monotonic(), new_place(path)
    url = target if isinstance(target, ObjectUrl) else None
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint, step)
    place = os.path.abspath(target) if url is None else url.shown
    name = os.path.basename(place)
    if step_of(name) not in (None, opened.step):
        raise ArgumentError(
            f"{name} cannot be the name of step {opened.step}", next=f"call it step-{opened.step:08d}, or anything else"
        )
    source, objects = read_flowstone(opened), _objects_text(opened)
    laid = lay_out_step([Output(one.name, one, one.dtype) for one in source.tensors], source.aliases)
    layout, job = laid.layout, Job(source, laid.layout, Path(place), budget_bytes)
    names = (*(file.name for file in layout.files), INDEX_NAME, OBJECTS_NAME, MANIFEST_NAME)
    if url is None:
        resumed = _write(job, laid, opened.manifest, objects, Draft(Path(place), is_file=False), on_progress, cluster)
    else:
        resumed = 0
        with BucketDraft(url, is_file=False) as into:
            into.begin(names)
            job = replace(job, draft=into.place)
            copied = copy(job, Unresumed(), on_progress=on_progress, cluster=cluster)
            _record(opened.manifest, laid, copied, objects, into.place.store)
            into.finish(layout)
    return PackReport(
        place, opened.step, len(source.tensors), names, layout.bytes, resumed, time.monotonic() - begun
    )


def _write(
    job: Job, laid: StepLayout, manifest: Manifest, objects: bytes, draft: Draft,
    on_progress: Callable[[int, int], None] | None, cluster: Cluster | None,
) -> int:
    """Write the checkpoint into a directory. Returns how many bytes were there already."""
    layout, window = job.layout, window_bytes(job.budget_bytes)
    with draft:
        digest = plan_digest(job.source, layout, ["pack", window, manifest.id])
        if draft.begin(digest, len(windows(layout, window))):
            draft.end()
            return layout.bytes
        draft.journal.durable = resumable(layout, draft.journal, draft.directory, window)
        copied = copy(replace(job, draft=draft.directory), draft.journal, on_progress=on_progress, cluster=cluster)
        _record(manifest, laid, copied, objects, LocalStore(draft.directory))
        draft.finish(layout)
        return copied.resumed_bytes


def _objects_text(opened: Checkpoint) -> bytes:
    """What objects.json will be: the same values, those of each rank too."""
    found = opened.contents
    per_rank = {name: [encode_sections({name: one})[name] for one in each] for name, each in found.per_rank.items()}
    return join_objects(encode_sections(found.replicated), per_rank)


def _record(manifest: Manifest, laid: StepLayout, copied: Copied, objects: bytes, store: Store) -> None:
    """Write index, objects and manifest, in this order, each durably; those of an earlier try that ended here go.

    manifest  of the checkpoint that is packed
    """
    for name in (MANIFEST_NAME, INDEX_NAME, OBJECTS_NAME):
        if store.exists(name):
            store.remove(name)
    io = io_record(backend(), REQUEST_BYTES, QUEUE_DEPTH, copied.bytes)
    made = publication_of(laid, copied.checks, objects, io, ranks=manifest.ranks)
    publish.record(store, publish.Draft(manifest.step, secrets.token_hex(8), ""), manifest.store, made)


__all__ = ["PackReport", "pack"]
