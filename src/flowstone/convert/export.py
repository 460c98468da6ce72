"""Export a checkpoint (Flowstone's, or any other format that can be read) to a format of other programs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from flowstone.cluster import Cluster
from flowstone.config import whole_number
from flowstone.convert.bucket_draft import BucketDraft
from flowstone.convert.cast import cast_target
from flowstone.convert.copy import BUDGET_BYTES_DEFAULT, ConversionJob, copy, drop_unfit_lines, window_bytes, windows
from flowstone.convert.documents import documents_of
from flowstone.convert.draft import TargetDraft
from flowstone.convert.followers import OptimizerMapping
from flowstone.convert.layout import TargetLayout, plan_digest
from flowstone.convert.mapping import (
    TensorMapping,
    all_names,
    check_objects,
    check_rules,
    select_tensors,
    without_missing_refs,
)
from flowstone.convert.opening import open_source
from flowstone.convert.source import SourceCheckpoint
from flowstone.convert.sources.deepspeed_zero import MASTER
from flowstone.convert.targets.dcp import lay_out_dcp
from flowstone.convert.targets.deepspeed_universal import lay_out_universal
from flowstone.convert.targets.hf import lay_out_hf
from flowstone.convert.targets.torch_file import lay_out_torch
from flowstone.convert.targets.universal_contents import universal_contents
from flowstone.convert.window_store_writer import NoJournal
from flowstone.errors import ArgumentError
from flowstone.layouts.layout_rules import GivenRules
from flowstone.reading.checkpoint import Checkpoint
from flowstone.store.base import Store
from flowstone.store.urls import ObjectUrl
from flowstone.stores.arguments import check_work, conversion_target, store_path, to_section

Format = Literal["hf", "torch", "dcp", "universal"]
FORMATS: tuple[str, ...] = ("hf", "torch", "dcp", "universal")

SHARD_BYTES_DEFAULT = 5 * 10**9


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export.

    tensors  names of the tensors in the target
    aliases  further names of tensors that are stored only once: (further name, name under which the tensor is stored)
    cast     names of the tensors that were converted to another dtype
    skipped  names of the tensors and other values that a rule left out
    resumed_bytes  how many of the `bytes` were written by an earlier, unfinished export
    """

    path: str
    format: str
    files: tuple[str, ...]
    tensors: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]
    cast: tuple[str, ...]
    skipped: tuple[str, ...]
    bytes: int
    resumed_bytes: int
    seconds: float


def export(
    checkpoint: str | os.PathLike[str] | Store | Checkpoint, path: str | os.PathLike[str], *, to: Format = "hf",
    step: int | None = None, section: str | None = "model", dtype: str | None = None,
    rules: GivenRules = (), shard_bytes: float = SHARD_BYTES_DEFAULT,
    documents: str | os.PathLike[str] | None = None, budget_bytes: int = BUDGET_BYTES_DEFAULT,
    on_progress: Callable[[int, int], None] | None = None, cluster: Cluster | None = None,
) -> ExportReport:
    """Write the tensors of a checkpoint's section for other programs, in bounded memory. Returns when all is written.

    If an export is killed, a call with the same arguments resumes it. The target appears under its name once it is
    complete and durable. In a bucket, an export cannot be resumed, and starts from the beginning. There each file
    appears once it is complete, and the object `.flowstone-export` exists beside the files until all are complete.

    checkpoint   a store (its newest step, or `step`), a checkpoint, or any format that `import_checkpoint` reads
    path         a new directory or file, or the URL of a new prefix or object in an object store
    to           "hf": a directory of safetensors files, which `from_pretrained` loads; "torch": a file, which
                 `torch.load` gives back as a state_dict; "dcp": a directory of torch.distributed.checkpoint;
                 "universal": a directory that DeepSpeed loads as a Universal Checkpoint, including optimizer state
    section      export this section's tensors; the section is left out of their names. None or "": all tensors. With
                 "universal", the section of the module
    dtype        convert floating-point tensors to this type: "bfloat16" ("bf16"), "float16", "float32" or "float64"
    rules        fs.Skip, fs.Rename, fs.Split, ... Rules match full names in the checkpoint; those in a fs.RuleSet match
                 names below the section
    shard_bytes  the most bytes of tensors in one file
    documents    a directory with config.json and tokenizer to write beside the tensors; None: the documents in the
                 checkpoint, if the model was imported, or trained by transformers' Trainer
    budget_bytes memory for data that is being read and written
    on_progress  called with (bytes done, total bytes)
    cluster      runs the export in parts, each with `budget_bytes` of memory; None: this process exports all

    raises  MismatchError if the target cannot hold a value, StorageError if `path` exists, DamagedError, ...
    """
    begun = time.monotonic()
    if to not in FORMATS:
        raise ArgumentError(f"unknown format: to={to!r}", expected=", ".join(FORMATS), next="give one of them")
    check_work(on_progress=on_progress, cluster=cluster)
    beside, section = _directory_of(documents), None if section is None else to_section(section) or None
    target, most_bytes = conversion_target(path), whole_number("shard_bytes", shard_bytes)
    source, url = open_source(checkpoint, step), target if isinstance(target, ObjectUrl) else None
    place = os.path.abspath(target) if url is None else url.shown
    if to == "universal":
        mapped, lost, layout, texts = _lay_out_universal(source, section, dtype, rules)
    else:
        mapped, lost = _mapped(source, to, section, dtype, rules)
        layout, texts = _lay_out(to, mapped, os.path.basename(place), most_bytes)
    if to == "hf":
        texts = {**documents_of(source, beside), **texts}
    job = ConversionJob(source, layout, Path(place), budget_bytes)
    if url is None:
        digest = plan_digest(source, layout, [to, window_bytes(budget_bytes), texts])
        resumed = _write(job, texts, digest, TargetDraft(Path(place), is_file=to == "torch"), on_progress, cluster)
    else:
        resumed = 0
        with BucketDraft(url, is_file=to == "torch") as draft:
            draft.begin([*(file.name for file in layout.files), *texts])
            copy(replace(job, draft=draft.store_draft), NoJournal(), on_progress=on_progress, cluster=cluster)
            draft.put(texts)
            draft.finish(layout)
    files = (*(file.name for file in layout.files), *texts)
    return _report(place, to, files, mapped, lost, (layout.bytes, resumed, time.monotonic() - begun))


def _directory_of(documents: str | os.PathLike[str] | None) -> Path | None:
    directory = None if documents is None else store_path(documents)
    if directory is not None and not directory.is_dir():
        raise ArgumentError(f"documents={directory} is not a directory", next="give the directory with config.json")
    return directory


def _write(
    job: ConversionJob, texts: Mapping[str, bytes], digest: str, draft: TargetDraft,
    on_progress: Callable[[int, int], None] | None, cluster: Cluster | None,
) -> int:
    """Write the target's files into its draft. Returns how many bytes an earlier export had written."""
    layout, window = job.layout, window_bytes(job.budget_bytes)
    with draft:
        if draft.begin(digest, len(windows(layout, window))):
            draft.end()
            return layout.bytes
        drop_unfit_lines(layout, draft.journal, draft.directory, window)
        copied = copy(replace(job, draft=draft.directory), draft.journal, on_progress=on_progress, cluster=cluster)
        draft.put(texts)
        draft.finish(layout)
        return copied.resumed_bytes


def _mapped(
    source: SourceCheckpoint, to: Format, section: str | None, dtype: str | None, rules: GivenRules
) -> tuple[TensorMapping, tuple[str, ...]]:
    """The tensors of the section as they will be in the target, and the names of the values that rules leave out."""
    source_section = None if source.is_flat else section
    checked_rules = check_rules(rules, source, source_section)
    with OptimizerMapping(source, checked_rules.steps, checked_rules.skip) as follow:
        mapped = select_tensors(source, source_section, checked_rules, cast_target(dtype), follow)
    return mapped, check_objects(source, source_section, checked_rules, to)


def _lay_out(
    to: Format, mapped: TensorMapping, name: str, shard_bytes: int
) -> tuple[TargetLayout, Mapping[str, bytes]]:
    """The layout of the target's files, and the small files that are written once these are durable."""
    if to == "hf":
        return lay_out_hf(mapped.outputs, shard_bytes)
    if to == "dcp":
        return lay_out_dcp(mapped.outputs, mapped.aliases, shard_bytes)
    return lay_out_torch(mapped.outputs, mapped.aliases, name), {}


def _lay_out_universal(
    source: SourceCheckpoint, section: str | None, dtype: str | None, rules: GivenRules
) -> tuple[TensorMapping, tuple[str, ...], TargetLayout, Mapping[str, bytes]]:
    """Map and lay out a Universal Checkpoint. Returns its tensors, the names of the values that rules leave out, the
    layout of its files, and its small files.
    """
    if section is None or dtype is not None:
        raise ArgumentError(
            "an export to a Universal Checkpoint needs the section of one module, and cannot change dtypes",
            next="leave out --dtype, and name the module's section with --section",
        )
    checked_rules = check_rules(rules, source, section)
    with OptimizerMapping(source, checked_rules.steps, checked_rules.skip) as follow:
        mapped = select_tensors(source, None, checked_rules, None, follow)
        names = {*(output.name for output in mapped.outputs), *(alias.name for alias in mapped.aliases)}
        objects = follow.objects(all_names(source))
    if checked_rules.steps:
        objects = {key: without_missing_refs(value, names) for key, value in objects.items()}
    contents = universal_contents(replace(source, objects=objects), mapped, checked_rules, section)
    masters = [parameter for group in contents.groups for parameter in group.parameters]
    slots = [(parameter.name, parameter.slots[MASTER]) for parameter in masters]
    cast = tuple(name for name, slot in slots if slot.dtype is not slot.tensor.dtype)
    layout, texts = lay_out_universal(contents, source.step)
    return replace(mapped, cast=cast), contents.lost, layout, texts


def _report(
    path: str, to: str, files: tuple[str, ...], mapped: TensorMapping, lost: tuple[str, ...],
    measured: tuple[int, int, float],
) -> ExportReport:
    total, resumed, seconds = measured
    return ExportReport(
        path=path, format=to, files=files, tensors=tuple(output.name for output in mapped.outputs),
        aliases=tuple((alias.name, alias.target) for alias in mapped.aliases), cast=mapped.cast,
        skipped=(*mapped.skipped, *lost), bytes=total, resumed_bytes=resumed, seconds=seconds,
    )


__all__ = ["ExportReport", "export"]
