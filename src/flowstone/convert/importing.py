"""Import a checkpoint of another program: convert it to an ordinary checkpoint in a Flowstone store."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flowstone.cluster import Cluster
from flowstone.commit import catalog, publish
from flowstone.commit.entries import import_journal, saving_directory, step_directory
from flowstone.commit.locations import check_no_checkpoint
from flowstone.commit.manifests import path_inside, read_manifest
from flowstone.convert.cast import cast_target
from flowstone.convert.copy import BUDGET_BYTES_DEFAULT, ConversionJob, CopyResult, copy, drop_unfit_lines, window_bytes
from flowstone.convert.file_io import QUEUE_DEPTH, REQUEST_BYTES, backend
from flowstone.convert.followers import OptimizerMapping
from flowstone.convert.journal import ConversionJournal
from flowstone.convert.layout import plan_digest
from flowstone.convert.mapping import (
    ConversionRules,
    TensorMapping,
    all_names,
    check_rules,
    select_tensors,
    without_missing_refs,
)
from flowstone.convert.opening import open_source
from flowstone.convert.source import SourceCheckpoint
from flowstone.convert.sources.tree import check_sections
from flowstone.convert.targets.flowstone import StepLayout, io_record, lay_out_step, publish_step
from flowstone.convert.window_store_writer import NoJournal, StoreDraft
from flowstone.errors import ArgumentError, CollisionError, DamagedError, StepExistsError, StorageError
from flowstone.format.documents import DOCUMENTS_SECTION
from flowstone.format.manifest import INDEX_NAME, MANIFEST_NAME, MARKER_NAME, OBJECTS_NAME
from flowstone.format.objects import TensorRef
from flowstone.layouts.layout_rules import GivenRules
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.stores.arguments import check_work, step_number, store_at, to_section, to_store
from flowstone.table.pieces import Alias


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of an import.

    kind     the format of the source: "safetensors", ...
    tensors  names of the tensors in the new checkpoint
    aliases  further names of tensors that are stored only once: (further name, name under which the tensor is stored)
    cast     names of the tensors that were converted to another dtype
    skipped  names of the values that a rule left out
    resumed_bytes  how many of the `bytes` were written by an earlier, unfinished import
    """

    path: str
    step: int
    kind: str
    tensors: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]
    cast: tuple[str, ...]
    skipped: tuple[str, ...]
    bytes: int
    resumed_bytes: int
    seconds: float


def import_checkpoint(
    source: str | os.PathLike[str] | Store, store: str | os.PathLike[str] | Store, *, step: int = 0,
    section: str = "model",
    dtype: str | None = None, rules: GivenRules = (),
    budget_bytes: int = BUDGET_BYTES_DEFAULT,
    on_progress: Callable[[int, int], None] | None = None, cluster: Cluster | None = None,
) -> ImportReport:
    """Convert a checkpoint of another program to a checkpoint in a store, in bounded memory. Returns when all is
    written.

    If an import into a directory is killed, a call with the same arguments resumes it. In other stores, which cannot
    continue a file, it starts from the beginning. The checkpoint appears once it is complete and durable.

    source   safetensors (a file, or a directory with its index), a file of torch.save, a directory of DCP,
             Megatron-core, DeepSpeed, TorchSnapshot or Orbax; or a Flowstone checkpoint, also in a bucket or a Store
    store    a directory, which is created if it does not exist; the URL of an object store; or a Store
    step     the step of the new checkpoint, greater than every step in the store
    section  for a file without sections: the section of its tensors, which get names `<section>.<name>`. "": the names
             already begin with sections, as in the files of `export(..., section=None)`
    dtype    convert floating-point tensors to this type: "bfloat16" ("bf16"), "float16", "float32" or "float64"
    rules    fs.Skip, fs.Rename, fs.Split, ... Rules match full names in the source; those in a fs.RuleSet match names
             below the section
    budget_bytes  memory for data that is being read and written
    on_progress   called with (bytes done, total bytes)
    cluster       runs the import in parts, each with `budget_bytes` of memory; None: this process imports all

    raises  StepExistsError, LockedError, DamagedError, UnsupportedFormatError, NotAStoreError, ArgumentError, ...
    """
    begun = time.monotonic()
    check_work(on_progress=on_progress, cluster=cluster)
    place = to_store(store)
    new_step, section = step_number(step, verb="import"), to_section(section)
    opened = open_source(source)
    if "@" in section or section.startswith("__") or "\0" in section:
        raise ArgumentError(f"invalid section name {section!r:.60}", next="leave out '@', NUL and leading '__'")
    checked_rules = check_rules(rules, opened, section)
    with OptimizerMapping(opened, checked_rules.steps, checked_rules.skip) as follow:
        mapped = _in_sections(opened, select_tensors(opened, None, checked_rules, cast_target(dtype), follow), section)
        opened = msgspec.structs.replace(opened, objects=follow.objects(all_names(opened)))
    if opened.kind != "flowstone" and isinstance(place, Path) and _is_same(place, source):
        raise ArgumentError(
            f"cannot import {opened.location} into its own directory",
            next="give another directory",
        )
    layout = lay_out_step(mapped.outputs, mapped.aliases)
    objects = _objects(opened, section, checked_rules, mapped)
    target = store_at(place)
    parts = new_step, opened, layout, objects
    into = _DirectoryImport(target, *parts) if isinstance(target, LocalStore) else _StoreImport(target, *parts)
    try:
        copied = into.run(budget_bytes, on_progress, cluster)
    finally:
        if target is not store:
            target.close()
    return ImportReport(
        path=f"{target.location}/{step_directory(new_step)}", step=new_step, kind=opened.kind,
        tensors=tuple(output.name for output in mapped.outputs),
        aliases=tuple((alias.name, alias.target) for alias in mapped.aliases), cast=mapped.cast, skipped=mapped.skipped,
        bytes=layout.layout.bytes, resumed_bytes=copied.resumed_bytes, seconds=time.monotonic() - begun,
    )


def _is_same(place: Path, source: str | os.PathLike[str] | Store) -> bool:
    return isinstance(source, str | os.PathLike) and (
        os.path.realpath(place) == os.path.realpath(Path(source).expanduser())
    )


def _in_sections(source: SourceCheckpoint, mapped: TensorMapping, section: str) -> TensorMapping:
    """If the source has no sections, put its tensors below `section`."""
    if not source.is_flat or not section:
        return mapped
    outputs = tuple(msgspec.structs.replace(output, name=f"{section}.{output.name}") for output in mapped.outputs)
    aliases = tuple(Alias(f"{section}.{alias.name}", f"{section}.{alias.target}") for alias in mapped.aliases)
    cast = tuple(f"{section}.{name}" for name in mapped.cast)
    return TensorMapping(outputs, aliases, mapped.skipped, cast)


def _objects(
    source: SourceCheckpoint, section: str, rules: ConversionRules, mapped: TensorMapping
) -> Mapping[str, object]:
    """The objects of the new checkpoint: all values that are not tensors."""
    names = {*(output.name for output in mapped.outputs), *(alias.name for alias in mapped.aliases)}
    objects = {
        name: without_missing_refs(value, names) for name, value in source.objects.items() if not rules.skip(name)
    }
    if source.is_flat and not section:
        check_sections({name.partition(".")[0]: None for name in names}, source.location)
        for name in sorted(names):
            of, dot, _ = name.partition(".")
            objects.setdefault(of, {} if dot else TensorRef(name, "tensor"))
    elif source.is_flat:
        objects.setdefault(section, {})
    if source.documents and not rules.skip(DOCUMENTS_SECTION):
        if DOCUMENTS_SECTION in objects:
            raise CollisionError(
                f"the section {DOCUMENTS_SECTION!r} is reserved for the model's documents",
                next="choose another name for the section",
            )
        objects[DOCUMENTS_SECTION] = dict(source.documents)
    return objects


class _ImportRun:
    """One import into a store. Locks the store."""

    def __init__(
        self, store: Store, step: int, source: SourceCheckpoint, layout: StepLayout, objects: Mapping[str, object]
    ) -> None:
        self._store, self._step, self._source, self._layout, self._objects = store, step, source, layout, objects

    def _lock_store(self) -> None:
        """Create the store if it is missing, and lock it."""
        check_no_checkpoint(self._store)
        if not self._store.exists(MARKER_NAME):
            self._store.make_directory()
        self._store.lock(f"process {os.getpid()} on {socket.gethostname()}, an import of {self._source.location}")

    def _check_step(self) -> None:
        existing = catalog.steps(self._store)
        if existing and self._step <= existing[-1]:
            raise StepExistsError(
                f"cannot import as step {self._step} into {self._store.location}",
                found=f"newest step {existing[-1]}", next=f"give a later step: --step {existing[-1] + 1}",
            )
        if self._store.exists(step_directory(self._step)):
            raise StepExistsError(
                f"cannot import as step {self._step} into {self._store.location}",
                found=f"{step_directory(self._step)}, which is not a checkpoint",
                next=f"move {step_directory(self._step)} elsewhere",
            )

    def _remove_leftovers(self, spared: Collection[str]) -> None:
        def removed(name: str, why: str, error: StorageError | None) -> None:
            del name, why, error  # ignored, as in a save: the next writer tries to remove the leftover again

        catalog.sweep_leftovers(self._store, removed, spared=spared)

    def _publish(self, draft: publish.Draft, store_id: str, copied: CopyResult) -> None:
        io = io_record(backend(), REQUEST_BYTES, QUEUE_DEPTH, copied.bytes)
        publish_step(self._layout, copied.checks, self._objects, self._store, draft, store_id, io)


class _StoreImport(_ImportRun):
    """An import into a store that is not a directory, where an incomplete file cannot be continued."""

    def run(
        self, budget_bytes: int, on_progress: Callable[[int, int], None] | None, cluster: Cluster | None
    ) -> CopyResult:
        """Remove unfinished checkpoints, such as one of an earlier import, then import."""
        store = self._store
        self._lock_store()
        try:
            store_id = publish.open_store(store)
            self._remove_leftovers(())
            self._check_step()
            draft = publish.begin_draft(store, self._step, secrets.token_hex(8))
            job = ConversionJob(self._source, self._layout.layout, StoreDraft(store, draft.directory), budget_bytes)
            try:
                copied = copy(job, NoJournal(), on_progress=on_progress, cluster=cluster)
                self._publish(draft, store_id, copied)
            except BaseException:
                publish.remove_own_files(
                    store, draft, [*(file.name for file in job.layout.files), INDEX_NAME, OBJECTS_NAME]
                )
                raise
            return copied
        finally:
            store.unlock()


class _DirectoryImport(_ImportRun):
    """An import into a directory, in which a journal records the durable windows (ranges of files)."""

    def __init__(
        self, store: LocalStore, step: int, source: SourceCheckpoint, layout: StepLayout, objects: Mapping[str, object]
    ) -> None:
        super().__init__(store, step, source, layout, objects)
        self._root = store.root
        self._journal = ConversionJournal(store.root / import_journal(step))

    def run(
        self, budget_bytes: int, on_progress: Callable[[int, int], None] | None, cluster: Cluster | None
    ) -> CopyResult:
        store, window = self._store, window_bytes(budget_bytes)
        plan = plan_digest(self._source, self._layout.layout, ["step", self._step, window, sorted(self._objects)])
        self._lock_store()
        self._journal.open()
        try:
            store_id = publish.open_store(store)
            if self._is_done(plan):
                return self._end(CopyResult((), 0, self._layout.layout.bytes))
            try:
                self._check_step()
            except StepExistsError:
                self._journal.remove()
                raise
            draft = self._draft(plan)
            directory = self._root / draft.directory
            drop_unfit_lines(self._layout.layout, self._journal, directory, window)
            job = ConversionJob(self._source, self._layout.layout, directory, budget_bytes)
            try:
                copied = copy(job, self._journal, on_progress=on_progress, cluster=cluster)
            except DamagedError:  # another file has to replace the damaged one, so the import starts from the beginning
                self._remove_leftovers((import_journal(self._step),))
                self._journal.remove()
                raise
            for name in (INDEX_NAME, OBJECTS_NAME, MANIFEST_NAME):  # files of an earlier attempt, which was killed here
                if store.exists(path_inside(draft.directory, name)):
                    store.remove(path_inside(draft.directory, name))
            self._publish(draft, store_id, copied)
            return self._end(copied)
        finally:
            self._journal.close()

    def _end(self, copied: CopyResult) -> CopyResult:
        self._journal.remove()
        return copied

    def _is_done(self, plan: str) -> bool:
        """Whether an earlier import of the same plan has committed its checkpoint, but was killed before it removed its
        journal.
        """
        begun = self._journal.start
        if begun is None or begun.plan != plan or self._step not in catalog.steps(self._store):
            return False
        name = saving_directory(self._step, read_manifest(self._store, step_directory(self._step)).id)
        return begun.draft == name

    def _draft(self, plan: str) -> publish.Draft:
        """The unfinished checkpoint that the journal names, if it exists and has this plan; else a new one."""
        store, begun = self._store, self._journal.start
        journal = import_journal(self._step)
        if begun is not None and begun.plan == plan and store.exists(begun.draft) and not store.is_link(begun.draft):
            self._remove_leftovers((begun.draft, journal))
            return publish.Draft(self._step, begun.draft.rpartition("-")[2], begun.draft)
        self._remove_leftovers((journal,))
        draft = publish.begin_draft(store, self._step, secrets.token_hex(8))
        self._journal.begin(plan, draft.directory)
        return draft


__all__ = ["ImportReport", "import_checkpoint"]
