"""Export: a checkpoint of ours, or of any format that can be read, becomes one that other programs read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from flowstone.arguments import check_work, new_place, store_path, to_section
from flowstone.checkpoint import Checkpoint
from flowstone.cluster import Cluster
from flowstone.config import whole_number
from flowstone.convert.bucket_draft import BucketDraft
from flowstone.convert.cast import cast_target
from flowstone.convert.copy import BUDGET_BYTES_DEFAULT, Job, copy, resumable, window_bytes, windows
from flowstone.convert.documents import documents_of
from flowstone.convert.draft import Draft
from flowstone.convert.followers import Follow
from flowstone.convert.layout import Layout, plan_digest
from flowstone.convert.mapping import (
    Mapped,
    all_names,
    check_objects,
    check_rules,
    choose,
    without_lost,
)
from flowstone.convert.opening import open_source
from flowstone.convert.source import Source
from flowstone.convert.sources.deepspeed_zero import MASTER
from flowstone.convert.store_writes import Unresumed
from flowstone.convert.targets.dcp import lay_out_dcp
from flowstone.convert.targets.deepspeed_universal import lay_out_universal
from flowstone.convert.targets.hf import lay_out_hf
from flowstone.convert.targets.torch_file import lay_out_torch
from flowstone.convert.targets.universal_contents import universal_contents
from flowstone.errors import ArgumentError
from flowstone.layout_rules import GivenRules
from flowstone.store.base import Store
from flowstone.store.objects.urls import ObjectUrl

Format = Literal["hf", "torch", "dcp", "universal"]
FORMATS: tuple[str, ...] = ("hf", "torch", "dcp", "universal")

SHARD_BYTES_DEFAULT = 5 * 10**9


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export did.

    tensors  their names in the target
    aliases  further names of tensors, which are stored once: (name, the name it is stored under)
    cast     names of those whose values were converted
    skipped  names that a rule left out, of tensors and of other values
    resumed_bytes  of `bytes`, what an earlier, unfinished export had written
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
    """Write the tensors of a checkpoint's section for other programs, in bounded memory. Blocks.

    Killed and called again with the same arguments, it goes on where the last durable window ended; the target appears
    under its name once it is whole and durable. In a bucket it begins anew, and each file appears once it is whole; an
    object `.flowstone-export` is beside them until the last one is.

    checkpoint   a store (its newest step, or `step`), a checkpoint, or what `import_checkpoint` reads
    path         a new directory, or file; or the URL of a new prefix, or object, of an object store
    to           "hf": a directory of safetensors files, which `from_pretrained` loads; "torch": a file, which
                 `torch.load` gives back as a state_dict; "dcp": a directory of torch.distributed.checkpoint;
                 "universal": a directory that DeepSpeed loads as a Universal Checkpoint, the optimizer's state included
    section      its tensors, by their names in it; None or "": all tensors, by full names. "universal": of a module
    dtype        floating-point tensors are converted to it: "bfloat16" ("bf16"), "float16", "float32", "float64"
    rules        fs.Skip, fs.Rename, fs.Split, ..., of names as the checkpoint has them; fs.RuleSet, of names below the
                 section
    shard_bytes  of tensors in one file, at most
    documents    a directory whose configuration and tokenizer go beside the tensors; None: those that the checkpoint
                 has, of a model that was imported, or trained by transformers' Trainer
    budget_bytes of memory for bytes on their way
    on_progress  is told the bytes done and the bytes in all
    cluster      does it, in parts of which each has that budget; None: this process does

    raises  MismatchError for values that have no place in the target, StorageError where something else is at `path`,
            DamagedError, UnsupportedFormatError, ArgumentError, ...
    """
    begun = time.monotonic()
    if to not in FORMATS:
        raise ArgumentError(f"to={to!r} is no known format", expected=", ".join(FORMATS), next="give one of them")
    check_work(on_progress=on_progress, cluster=cluster)
    beside, section = _directory_of(documents), None if section is None else to_section(section) or None
    target, most_bytes = new_place(path), whole_number("shard_bytes", shard_bytes)
    source, url = open_source(checkpoint, step), target if isinstance(target, ObjectUrl) else None
    place = os.path.abspath(target) if url is None else url.shown
    if to == "universal":
        mapped, lost, layout, texts = _lay_out_universal(source, section, dtype, rules)
    else:
        mapped, lost = _mapped(source, to, section, dtype, rules)
        layout, texts = _lay_out(to, mapped, os.path.basename(place), most_bytes)
    if to == "hf":
        texts = {**documents_of(source, beside), **texts}
    job = Job(source, layout, Path(place), budget_bytes)
    if url is None:
        digest = plan_digest(source, layout, [to, window_bytes(budget_bytes), texts])
        resumed = _write(job, texts, digest, Draft(Path(place), is_file=to == "torch"), on_progress, cluster)
    else:
        resumed = 0
        with BucketDraft(url, is_file=to == "torch") as draft:
            draft.begin([*(file.name for file in layout.files), *texts])
            copy(replace(job, draft=draft.place), Unresumed(), on_progress=on_progress, cluster=cluster)
            draft.put(texts)
            draft.finish(layout)
    files = (*(file.name for file in layout.files), *texts)
    return _report(place, to, files, mapped, lost, (layout.bytes, resumed, time.monotonic() - begun))


def _directory_of(documents: str | os.PathLike[str] | None) -> Path | None:
    found = None if documents is None else store_path(documents)
    if found is not None and not found.is_dir():
        raise ArgumentError(f"documents: {found} is no directory", next="give the one of config.json and tokenizer")
    return found


def _write(
    job: Job, texts: Mapping[str, bytes], digest: str, draft: Draft,
    on_progress: Callable[[int, int], None] | None, cluster: Cluster | None,
) -> int:
    """Write the files of a target in a directory, by the draft of that plan. Returns what was there already."""
    layout, window = job.layout, window_bytes(job.budget_bytes)
    with draft:
        if draft.begin(digest, len(windows(layout, window))):
            draft.end()
            return layout.bytes
        draft.journal.durable = resumable(layout, draft.journal, draft.directory, window)
        copied = copy(replace(job, draft=draft.directory), draft.journal, on_progress=on_progress, cluster=cluster)
        draft.put(texts)
        draft.finish(layout)
        return copied.resumed_bytes


def _mapped(
    source: Source, to: Format, section: str | None, dtype: str | None, rules: GivenRules
) -> tuple[Mapped, tuple[str, ...]]:
    """The tensors of the section, and the names of values that rules leave out."""
    wanted = None if source.is_flat else section
    known = check_rules(rules, source, wanted)
    with Follow(source, known.steps, known.skip) as follow:
        mapped = choose(source, wanted, known, cast_target(dtype), follow)
    return mapped, check_objects(source, wanted, known, to)


def _lay_out(to: Format, mapped: Mapped, name: str, shard_bytes: int) -> tuple[Layout, Mapping[str, bytes]]:
    """The target's files, and the small ones that are written when those are durable."""
    if to == "hf":
        return lay_out_hf(mapped.outputs, shard_bytes)
    if to == "dcp":
        return lay_out_dcp(mapped.outputs, mapped.aliases, shard_bytes)
    return lay_out_torch(mapped.outputs, mapped.aliases, name), {}


def _lay_out_universal(
    source: Source, section: str | None, dtype: str | None, rules: GivenRules
) -> tuple[Mapped, tuple[str, ...], Layout, Mapping[str, bytes]]:
    """The same of a whole training state: tensors, names that rules leave out, files."""
    if section is None or dtype is not None:
        raise ArgumentError(
            "a Universal Checkpoint has the training state of one module, in the types that DeepSpeed trains with",
            next="leave out --dtype, and name the module's section with --section",
        )
    known = check_rules(rules, source, section)
    with Follow(source, known.steps, known.skip) as follow:
        mapped = choose(source, None, known, None, follow)
        names = {*(one.name for one in mapped.outputs), *(alias.name for alias in mapped.aliases)}
        objects = follow.objects(all_names(source))
    if known.steps:
        objects = {key: without_lost(value, names) for key, value in objects.items()}
    contents = universal_contents(replace(source, objects=objects), mapped, known, section)
    masters = [one for group in contents.groups for one in group.parameters]
    cast = tuple(one.name for one in masters if one.slots[MASTER].dtype is not one.slots[MASTER].tensor.dtype)
    layout, texts = lay_out_universal(contents, source.step)
    return replace(mapped, cast=cast), contents.lost, layout, texts


def _report(
    path: str, to: str, files: tuple[str, ...], mapped: Mapped, lost: tuple[str, ...],
    measured: tuple[int, int, float],
) -> ExportReport:
    total, resumed, seconds = measured
    return ExportReport(
        path=path, format=to, files=files, tensors=tuple(one.name for one in mapped.outputs),
        aliases=tuple((alias.name, alias.target) for alias in mapped.aliases), cast=mapped.cast,
        skipped=(*mapped.skipped, *lost), bytes=total, resumed_bytes=resumed, seconds=seconds,
    )


__all__ = ["ExportReport", "export"]
