"""Pack a step: copy a checkpoint that refers to files of earlier checkpoints into one that needs no other files, in
format version 1.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from flowstone.cluster import Cluster
from flowstone.commit import publish
from flowstone.commit.entries import step_of
from flowstone.commit.read import encode_sections, join_objects
from flowstone.convert.bucket_draft import BucketDraft
from flowstone.convert.copy import (
    BUDGET_BYTES_DEFAULT,
    ConversionJob,
    CopyResult,
    copy,
    drop_unfit_lines,
    window_bytes,
    windows,
)
from flowstone.convert.draft import TargetDraft
from flowstone.convert.file_io import QUEUE_DEPTH, REQUEST_BYTES, backend
from flowstone.convert.layout import Output, plan_digest
from flowstone.convert.sources.flowstone import read_flowstone
from flowstone.convert.targets.flowstone import StepLayout, io_record, lay_out_step, publication_of
from flowstone.convert.window_store_writer import NoJournal
from flowstone.errors import ArgumentError
from flowstone.format.manifest import INDEX_NAME, MANIFEST_NAME, OBJECTS_NAME, Manifest
from flowstone.reading.checkpoint import Checkpoint, open_checkpoint
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.urls import ObjectUrl
from flowstone.stores.arguments import check_work, conversion_target


@dataclass(frozen=True, slots=True)
class PackReport:
    """The result of a pack. `resumed_bytes`: how many of the `bytes` were written by an earlier, unfinished pack."""

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
    """Write a step as a checkpoint that needs no other files, in bounded memory. Verifies every chunk. Returns when all
    is written.

    The result uses only format version 1: every tensor is contiguous in a segment (a safetensors file), so any version
    of Flowstone and any safetensors reader can read it. Objects, also per-rank ones, stay the same. If a pack is
    killed, a call with the same arguments resumes it. The directory appears under its name once it is complete and
    durable.

    checkpoint   a store (its newest step, or `step`), or one checkpoint
    path         a new or empty directory; or the URL of a new prefix in an object store, where a killed pack starts
                 from the beginning. If it is named `step-N`, N must be the step
    budget_bytes memory for data that is being read and written
    on_progress  called with (bytes done, total bytes)
    cluster      runs the pack in parts, each with `budget_bytes` of memory; None: this process packs all

    raises  StorageError  `path` exists and is not empty
            DamagedError, NoCheckpointError, ArgumentError, ...
    """
    check_work(on_progress=on_progress, cluster=cluster)
    begun, target = time.monotonic(), conversion_target(path)
    url = target if isinstance(target, ObjectUrl) else None
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint, step)
    place = os.path.abspath(target) if url is None else url.shown
    name = os.path.basename(place)
    if step_of(name) not in (None, opened.step):
        raise ArgumentError(
            f"the checkpoint of step {opened.step} cannot have the name {name}",
            next=f"give the name step-{opened.step:08d}, or a name that does not stand for a step",
        )
    source, objects = read_flowstone(opened), _objects_text(opened)
    laid = lay_out_step([Output(tensor.name, tensor, tensor.dtype) for tensor in source.tensors], source.aliases)
    layout, job = laid.layout, ConversionJob(source, laid.layout, Path(place), budget_bytes)
    names = (*(file.name for file in layout.files), INDEX_NAME, OBJECTS_NAME, MANIFEST_NAME)
    if url is None:
        resumed = _write(
            job, laid, opened.manifest, objects, TargetDraft(Path(place), is_file=False), on_progress, cluster
        )
    else:
        resumed = 0
        with BucketDraft(url, is_file=False) as into:
            into.begin(names)
            job = replace(job, draft=into.store_draft)
            copied = copy(job, NoJournal(), on_progress=on_progress, cluster=cluster)
            _record(opened.manifest, laid, copied, objects, into.store_draft.store)
            into.finish(layout)
    return PackReport(
        place, opened.step, len(source.tensors), names, layout.bytes, resumed, time.monotonic() - begun
    )


def _write(
    job: ConversionJob, laid: StepLayout, manifest: Manifest, objects: bytes, draft: TargetDraft,
    on_progress: Callable[[int, int], None] | None, cluster: Cluster | None,
) -> int:
    """Write the checkpoint into a directory. Returns how many bytes an earlier pack had written."""
    layout, window = job.layout, window_bytes(job.budget_bytes)
    with draft:
        digest = plan_digest(job.source, layout, ["pack", window, manifest.id])
        if draft.begin(digest, len(windows(layout, window))):
            draft.end()
            return layout.bytes
        drop_unfit_lines(layout, draft.journal, draft.directory, window)
        copied = copy(replace(job, draft=draft.directory), draft.journal, on_progress=on_progress, cluster=cluster)
        _record(manifest, laid, copied, objects, LocalStore(draft.directory))
        draft.finish(layout)
        return copied.resumed_bytes


def _objects_text(opened: Checkpoint) -> bytes:
    """The content of objects.json, with the same values as in the original checkpoint."""
    contents = opened.contents
    per_rank = {
        name: [encode_sections({name: value})[name] for value in values] for name, values in contents.per_rank.items()
    }
    return join_objects(encode_sections(contents.replicated), per_rank)


def _record(manifest: Manifest, laid: StepLayout, copied: CopyResult, objects: bytes, store: Store) -> None:
    """Write index, objects and manifest, in this order. Each is durable before the next. Files of an earlier attempt
    are replaced.

    manifest  the manifest of the original checkpoint
    """
    for name in (MANIFEST_NAME, INDEX_NAME, OBJECTS_NAME):
        if store.exists(name):
            store.remove(name)
    io = io_record(backend(), REQUEST_BYTES, QUEUE_DEPTH, copied.bytes)
    made = publication_of(laid, copied.checks, objects, io, ranks=manifest.ranks)
    publish.write_draft(store, publish.Draft(manifest.step, secrets.token_hex(8), ""), manifest.store, made)


__all__ = ["PackReport", "pack"]
