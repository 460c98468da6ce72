"""Import: a checkpoint of another program becomes an ordinary checkpoint of a store of ours."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flowstone.arguments import check_work, step_number, store_at, to_section, to_store
from flowstone.cluster import Cluster
from flowstone.commit import catalog, publish
from flowstone.commit.entries import import_journal, saving_directory, step_directory
from flowstone.commit.locations import check_no_checkpoint
from flowstone.commit.manifests import inside, read_manifest
from flowstone.convert.cast import cast_target
from flowstone.convert.copy import BUDGET_BYTES_DEFAULT, Copied, Job, copy, resumable, window_bytes
from flowstone.convert.file_io import QUEUE_DEPTH, REQUEST_BYTES, backend
from flowstone.convert.followers import Follow
from flowstone.convert.journal import Journal
from flowstone.convert.layout import plan_digest
from flowstone.convert.mapping import Mapped, Rules, all_names, check_rules, choose, without_lost
from flowstone.convert.opening import open_source
from flowstone.convert.source import Source
from flowstone.convert.sources.tree import check_sections
from flowstone.convert.store_writes import StoreDraft, Unresumed
from flowstone.convert.targets.flowstone import StepLayout, io_record, lay_out_step, publish_step
from flowstone.errors import ArgumentError, CollisionError, DamagedError, StepExistsError, StorageError
from flowstone.format.documents import DOCUMENTS_SECTION
from flowstone.format.manifest import INDEX_NAME, MANIFEST_NAME, MARKER_NAME, OBJECTS_NAME
from flowstone.format.objects import TensorRef
from flowstone.layout_rules import GivenRules
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.table.pieces import Alias


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did.

    kind     of what was imported: "safetensors", ...
    tensors  their names in the checkpoint
    aliases  further names of tensors, which are stored once: (name, the name it is stored under)
    cast     names of those whose values were converted
    skipped  names that a rule left out
    resumed_bytes  of `bytes`, what an earlier, unfinished import had written
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
    """Make a checkpoint of a store of what another program has saved, in bounded memory. Blocks.

    Killed and called again with the same arguments, it goes on where the last durable window ended, in a directory; in
    other stores, which cannot go on with half a file, it begins anew. The checkpoint appears once it is whole and
    durable.

    source   safetensors (a file, or a directory with its index), a file of torch.save, a directory of DCP,
             Megatron-core, DeepSpeed, TorchSnapshot or Orbax; a checkpoint of ours, also of a bucket or a Store
    store    a directory, made where it is missing; the URL of an object store; or a Store
    step     of the new checkpoint; above every one that is there
    section  the section for tensors of a file without sections: `<section>.<name>`; "": their names begin with their
             sections already, as `export(..., section=None)` writes them
    dtype    floating-point tensors are converted to it: "bfloat16" ("bf16"), "float16", "float32", "float64"
    rules    fs.Skip, fs.Rename, fs.Split, ..., of names as the source has them; fs.RuleSet, of names below the section
    budget_bytes  of memory for bytes on their way
    on_progress   is told the bytes done and the bytes in all
    cluster       does it, in parts of which each has that budget; None: this process does

    raises  StepExistsError, LockedError, DamagedError, UnsupportedFormatError, NotAStoreError, ArgumentError, ...
    """
    begun = time.monotonic()
    check_work(on_progress=on_progress, cluster=cluster)
    place = to_store(store)
    wanted, section = step_number(step, verb="import"), to_section(section)
    opened = open_source(source)
    if "@" in section or section.startswith("__") or "\0" in section:
        raise ArgumentError(f"{section!r:.60} cannot name a section", next="give a name without '@' and NUL")
    known = check_rules(rules, opened, section)
    with Follow(opened, known.steps, known.skip) as follow:
        mapped = _in_sections(opened, choose(opened, None, known, cast_target(dtype), follow), section)
        opened = msgspec.structs.replace(opened, objects=follow.objects(all_names(opened)))
    if opened.kind != "flowstone" and isinstance(place, Path) and _is_same(place, source):
        raise ArgumentError(
            f"cannot import {opened.location} into its own directory, which would then be a store",
            next="give another directory",
        )
    layout = lay_out_step(mapped.outputs, mapped.aliases)
    objects = _objects(opened, section, known, mapped)
    target = store_at(place)
    parts = wanted, opened, layout, objects
    into = _Import(target, *parts) if isinstance(target, LocalStore) else _StoreImport(target, *parts)
    try:
        copied = into.run(budget_bytes, on_progress, cluster)
    finally:
        if target is not store:
            target.close()
    return ImportReport(
        path=f"{target.location}/{step_directory(wanted)}", step=wanted, kind=opened.kind,
        tensors=tuple(one.name for one in mapped.outputs),
        aliases=tuple((alias.name, alias.target) for alias in mapped.aliases), cast=mapped.cast, skipped=mapped.skipped,
        bytes=layout.layout.bytes, resumed_bytes=copied.resumed_bytes, seconds=time.monotonic() - begun,
    )


def _is_same(place: Path, source: str | os.PathLike[str] | Store) -> bool:
    return isinstance(source, str | os.PathLike) and (
        os.path.realpath(place) == os.path.realpath(Path(source).expanduser())
    )


def _in_sections(source: Source, mapped: Mapped, section: str) -> Mapped:
    """The same, below a section where the source knows none."""
    if not source.is_flat or not section:
        return mapped
    outputs = tuple(msgspec.structs.replace(one, name=f"{section}.{one.name}") for one in mapped.outputs)
    aliases = tuple(Alias(f"{section}.{alias.name}", f"{section}.{alias.target}") for alias in mapped.aliases)
    cast = tuple(f"{section}.{name}" for name in mapped.cast)
    return Mapped(outputs, aliases, mapped.skipped, cast)


def _objects(source: Source, section: str, rules: Rules, mapped: Mapped) -> Mapping[str, object]:
    """What the checkpoint holds besides tensors."""
    names = {*(one.name for one in mapped.outputs), *(alias.name for alias in mapped.aliases)}
    found = {
        name: without_lost(value, names) for name, value in source.objects.items() if not rules.skip(name)
    }
    if source.is_flat and not section:
        check_sections({name.partition(".")[0]: None for name in names}, source.location)
        for name in sorted(names):
            of, dot, _ = name.partition(".")
            found.setdefault(of, {} if dot else TensorRef(name, "tensor"))
    elif source.is_flat:
        found.setdefault(section, {})
    if source.documents and not rules.skip(DOCUMENTS_SECTION):
        if DOCUMENTS_SECTION in found:
            raise CollisionError(
                f"the section {DOCUMENTS_SECTION!r} is taken: it has the model's documents", next="name another section"
            )
        found[DOCUMENTS_SECTION] = dict(source.documents)
    return found


class _Begun:
    """One import into a store, of which it is the one writer meanwhile."""

    def __init__(
        self, store: Store, step: int, source: Source, layout: StepLayout, objects: Mapping[str, object]
    ) -> None:
        self._store, self._step, self._source, self._layout, self._objects = store, step, source, layout, objects

    def _take(self) -> None:
        """Make the store where it is missing, and lock it."""
        check_no_checkpoint(self._store)
        if not self._store.exists(MARKER_NAME):
            self._store.make_directory()
        self._store.lock(f"process {os.getpid()} on {socket.gethostname()}, an import of {self._source.location}")

    def _check_step(self) -> None:
        existing = catalog.steps(self._store)
        if existing and self._step <= existing[-1]:
            raise StepExistsError(
                f"cannot import as step {self._step} into {self._store.location}", found=f"newest step {existing[-1]}",
                next=f"give a later one: --step {existing[-1] + 1}",
            )
        if self._store.exists(step_directory(self._step)):
            raise StepExistsError(
                f"cannot import as step {self._step} into {self._store.location}",
                found=f"{step_directory(self._step)}, which is not a checkpoint", next="move it away",
            )

    def _sweep(self, spared: Collection[str]) -> None:
        def removed(name: str, why: str, error: StorageError | None) -> None:
            del name, why, error  # as a save does: what cannot be removed is tried again by the next writer

        catalog.sweep(self._store, removed, spared=spared)

    def _publish(self, draft: publish.Draft, store_id: str, copied: Copied) -> None:
        io = io_record(backend(), REQUEST_BYTES, QUEUE_DEPTH, copied.bytes)
        publish_step(self._layout, copied.checks, self._objects, self._store, draft, store_id, io)


class _StoreImport(_Begun):
    """Into a store that is no directory: a file that is not whole cannot be gone on with there."""

    def run(
        self, budget_bytes: int, on_progress: Callable[[int, int], None] | None, cluster: Cluster | None
    ) -> Copied:
        """What an earlier import has left is swept, with all else that is unfinished."""
        store = self._store
        self._take()
        try:
            store_id = publish.open_store(store)
            self._sweep(())
            self._check_step()
            draft = publish.begin(store, self._step, secrets.token_hex(8))
            job = Job(self._source, self._layout.layout, StoreDraft(store, draft.directory), budget_bytes)
            try:
                copied = copy(job, Unresumed(), on_progress=on_progress, cluster=cluster)
                self._publish(draft, store_id, copied)
            except BaseException:
                publish.remove_own(store, draft, [*(file.name for file in job.layout.files), INDEX_NAME, OBJECTS_NAME])
                raise
            return copied
        finally:
            store.unlock()


class _Import(_Begun):
    """Into a directory, in which a journal says what is durable."""

    def __init__(
        self, store: LocalStore, step: int, source: Source, layout: StepLayout, objects: Mapping[str, object]
    ) -> None:
        super().__init__(store, step, source, layout, objects)
        self._root = store.root
        self._journal = Journal(store.root / import_journal(step))

    def run(
        self, budget_bytes: int, on_progress: Callable[[int, int], None] | None, cluster: Cluster | None
    ) -> Copied:
        store, window = self._store, window_bytes(budget_bytes)
        plan = plan_digest(self._source, self._layout.layout, ["step", self._step, window, sorted(self._objects)])
        self._take()
        self._journal.open()
        try:
            store_id = publish.open_store(store)
            if self._is_done(plan):
                return self._end(Copied((), 0, self._layout.layout.bytes))
            try:
                self._check_step()
            except StepExistsError:
                self._journal.remove()
                raise
            draft = self._draft(plan)
            directory = self._root / draft.directory
            self._journal.durable = resumable(self._layout.layout, self._journal, directory, window)
            job = Job(self._source, self._layout.layout, directory, budget_bytes)
            try:
                copied = copy(job, self._journal, on_progress=on_progress, cluster=cluster)
            except DamagedError:  # another file has to replace the damaged one: an import starts anew
                self._sweep((import_journal(self._step),))
                self._journal.remove()
                raise
            for name in (INDEX_NAME, OBJECTS_NAME, MANIFEST_NAME):  # of an earlier try that ended here
                if store.exists(inside(draft.directory, name)):
                    store.remove(inside(draft.directory, name))
            self._publish(draft, store_id, copied)
            return self._end(copied)
        finally:
            self._journal.close()

    def _end(self, copied: Copied) -> Copied:
        self._journal.remove()
        return copied

    def _is_done(self, plan: str) -> bool:
        """Whether an earlier import of the same plan was published, and died before it removed its journal."""
        begun = self._journal.begun
        if begun is None or begun.plan != plan or self._step not in catalog.steps(self._store):
            return False
        name = saving_directory(self._step, read_manifest(self._store, step_directory(self._step)).id)
        return begun.draft == name

    def _draft(self, plan: str) -> publish.Draft:
        """The draft that the journal speaks of, if it is of this plan and there still; else a new one."""
        store, begun = self._store, self._journal.begun
        journal = import_journal(self._step)
        if begun is not None and begun.plan == plan and store.exists(begun.draft) and not store.is_link(begun.draft):
            self._sweep((begun.draft, journal))
            return publish.Draft(self._step, begun.draft.rpartition("-")[2], begun.draft)
        self._sweep((journal,))
        draft = publish.begin(store, self._step, secrets.token_hex(8))
        self._journal.begin(plan, draft.directory)
        return draft


__all__ = ["ImportReport", "import_checkpoint"]
