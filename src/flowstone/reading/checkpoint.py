"""A committed checkpoint, read-only: its values, and any region of any tensor. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np

from flowstone.commit import catalog
from flowstone.commit import read as contents
from flowstone.commit.entries import step_directory
from flowstone.commit.locations import check_store, find_checkpoint
from flowstone.commit.manifests import path_inside, read_manifest
from flowstone.config import EngineOptions
from flowstone.errors import (
    ArgumentError,
    DamagedError,
    FlowstoneError,
    NoCheckpointError,
    NoTensorError,
)
from flowstone.extensions import extension
from flowstone.format.index import Index
from flowstone.format.manifest import MANIFEST_NAME, Manifest
from flowstone.plan.read import plan_reads
from flowstone.reading.regions import Region, to_box
from flowstone.stage.arena import open_read_arena
from flowstone.stage.scatter import ReadSource, ReadTargets, raise_damage, scatter
from flowstone.store.base import Store
from flowstone.stores.arguments import check_work, is_list, step_number, store_at, striped_parent, to_store
from flowstone.table.box import Box
from flowstone.table.pieces import Piece, Pieces, Places

if TYPE_CHECKING:
    import torch

    from flowstone.cluster import Cluster
    from flowstone.commit.verify import Verified
    from flowstone.inspection.composition import SectionMakeup

_FETCH_THREADS = 16


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The index entry of a stored tensor. `alias_of`: the name of the tensor whose bytes this one shares; None: its
    bytes are stored under its own name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    pieces: int
    alias_of: str | None


class TensorTable(Mapping[str, TensorEntry]):
    """All tensors of a checkpoint by name, aliases included, in stored order."""

    def __init__(self, index: Index) -> None:
        self._index, self._tensors = index, index.tensors
        self._rows = index.rows()

    def __getitem__(self, name: str) -> TensorEntry:
        if name not in self._rows:
            raise no_tensor(name, self._rows)
        index, tensors, row = self._index, self._tensors, self._rows[name]
        pieces = index.pieces_of(row)
        length = int(index.chunks.length[pieces.start : pieces.stop].sum())
        stored = tensors.names[row]
        return TensorEntry(
            name, tensors.dtypes[row].name, tensors.shapes[row], length, len(pieces),
            None if stored == name else stored,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def no_tensor(name: object, names: Iterable[str], **facts: object) -> NoTensorError:
    """The error for the name of a tensor that does not exist. It lists similar names from `names`."""
    last = str(name).rpartition(".")[2]
    alike = [existing for existing in names if existing.endswith(last)][:5]
    hint = f"; there is {', '.join(alike)}" if alike else ""
    return NoTensorError(
        f"no tensor {name!r} in this checkpoint{hint}", **facts, next="`list(checkpoint.tensors)` gives all names"
    )


class StoredTensor:
    """A tensor of a checkpoint. Indexing it reads the requested part, and no more: `tensor[0:128]`."""

    def __init__(self, checkpoint: Checkpoint, entry: TensorEntry) -> None:
        self._checkpoint, self.entry = checkpoint, entry

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def dtype(self) -> str:
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def ndim(self) -> int:
        return len(self.entry.shape)

    def __getitem__(self, region: Region) -> torch.Tensor:
        """A part of the tensor, verified, in new memory. `region`: as for `Checkpoint.read`."""
        return self._checkpoint.read(self.name, region)

    def numpy(self, region: Region = None) -> np.ndarray:
        """The tensor, or the part `region` of it, as a numpy array. `region`: as for `Checkpoint.read`."""
        return self._checkpoint.read(self.name, region, framework="numpy")

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("reading from a checkpoint always copies: copy=False is not possible")
        array = self.numpy()
        return array if dtype is None else array.astype(cast("Any", dtype), copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Raises TypeError, because iteration would slowly read row by row, which is hardly ever intended."""
        raise TypeError(f"cannot iterate over {self.name!r}: write [...] to read all of it, or [a:b] to read some rows")

    def __repr__(self) -> str:
        return f"<StoredTensor {self.name!r} {self.dtype} {self.shape}>"


class Checkpoint:
    """One committed checkpoint. Its manifest has been read and checked; index and objects are read when first used.

    Reads take no lock and write nothing. Safe to share between threads.
    """

    def __init__(self, store: Store, directory: str, options: EngineOptions, manifest: Manifest | None = None) -> None:
        self._store, self._directory, self._options = store, directory, options
        self.is_spread = store.capabilities.spreads  # whether its segment files may be on several paths of the store
        self.manifest = manifest or read_manifest(store, directory)
        self._journal_step: int | None = None
        self._objects_text: bytearray | None = None  # read by `fetch`, until it is decoded
        self._headers_checked = False  # whether `fetch` has checked the headers of the segment files

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def journal_step(self) -> int | None:
        """The step up to which `Checkpointer.load` replays the journal; None if there was no journal when this
        checkpoint was opened.
        """
        return self._journal_step

    def with_journal(self, step: int | None) -> Checkpoint:
        """A copy of this checkpoint with this `journal_step`."""
        same = copy(self)
        same._journal_step = None if step == self.manifest.step else step
        return same

    @property
    def path(self) -> str:
        return f"{self._store.location}/{self._directory}".rstrip("/")

    @cached_property
    def index(self) -> Index:
        """The table of all tensors and their stored pieces. Read and verified at the first use."""
        return contents.read_index(self._store, self._directory, self.manifest)

    @cached_property
    def tensors(self) -> TensorTable:
        return TensorTable(self.index)

    @cached_property
    def contents(self) -> contents.PlainObjects:
        """All values that are not tensors, with the values of each rank (fs.PerRank) apart. Read and verified at the
        first use.
        """
        text, self._objects_text = self._objects_text, None
        return contents.read_objects(self._store, self._directory, self.manifest, text)

    @cached_property
    def sections(self) -> tuple[SectionMakeup, ...]:
        """For each section, how many bytes of its tensors were written by this save, how many are in files of earlier
        saves, and how many are encoded. Reads no data of tensors.
        """
        sections_of = extension("inspection.sections")
        return tuple(sections_of(self.manifest, self.index, [*self.objects, *self.contents.per_rank]))

    @property
    def objects(self) -> Mapping[str, object]:
        """All values that are not tensors, by section name."""
        return self.contents.replicated

    def check(self) -> None:
        """Check everything except the bytes of tensors: index, objects, and sizes and headers of segment files."""
        if self._store.capabilities.distant and not self._headers_checked:
            self.fetch()
        _ = self.index, self.contents
        checked, self._headers_checked = self._headers_checked, False
        if not checked:
            contents.check_segments(self._store, self._directory, self.manifest)

    def fetch(self) -> None:
        """Read in advance the files that `check` needs, so that a later `check` does not have to wait for requests for
        tensor bytes.
        """
        store, directory, manifest = self._store, self._directory, self.manifest
        if self._headers_checked:
            return
        if not store.capabilities.distant:
            _ = self.index
            contents.check_segments(store, directory, manifest)
            self._headers_checked, self._objects_text = True, contents.read_objects_bytes(store, directory, manifest)
            return
        with ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="flowstone-fetch") as threads:
            text = threads.submit(contents.read_objects_bytes, store, directory, manifest)
            index = threads.submit(lambda: self.index)
            checks = [threads.submit(contents.check_segment, store, directory, row) for row in manifest.segments]
            _ = index.result(), [check.result() for check in checks]
            self._headers_checked, self._objects_text = True, text.result()

    @overload
    def read(self, name: str, box: Region = None, *, framework: Literal["torch"] | None = None) -> torch.Tensor: ...
    @overload
    def read(self, name: str, box: Region = None, *, framework: Literal["numpy"]) -> np.ndarray: ...
    def read(
        self, name: str, box: Region = None, *, framework: Literal["torch", "numpy"] | None = None
    ) -> torch.Tensor | np.ndarray:
        """A tensor, or a region of it, in new memory. Every chunk that is read is verified.

        box        a Box (in elements), or a numpy index: `slice(0, 128)`, `np.s_[0:128, 3]`; None: the full tensor
        framework  None: torch, or numpy (and ml_dtypes) if torch is not installed

        raises     NoTensorError  no such tensor (also a KeyError)
                   ArgumentError  the box does not fit in the tensor, or the framework is unknown (also a ValueError)
                   DamagedError   stored bytes do not match their digests
                   BudgetError    not enough memory
        """
        row = self._row(name)
        box, result_shape = to_box(box, self.index.tensors.shapes[row], name)
        result = self._read([row], [name], [box], framework)[0]
        return result if result_shape == box.shape else result.reshape(result_shape)

    def _read(
        self, rows: Sequence[int], names: Sequence[str], boxes: Sequence[Box], framework: str | None = None
    ) -> list[torch.Tensor | np.ndarray]:
        """Regions (boxes) of tensors, each in new memory, with one read for all. Every chunk is verified."""
        from flowstone.stage.allocation import allocator  # imported here: loads do not need it

        index = self.index
        pieces = Pieces.of([
            Piece(name, index.tensors.dtypes[row], index.tensors.shapes[row], box)
            for name, row, box in zip(names, rows, boxes, strict=True)
        ])
        plan = plan_reads(index, pieces, rows)  # raises if a part is not stored, before memory is allocated
        dtypes = [index.tensors.dtypes[row] for row in rows]
        allocate = allocator(framework)
        allocated = [allocate(dtype, box.shape) for dtype, box in zip(dtypes, boxes, strict=True)]
        fill = ReadTargets(index, plan, pieces, Places.of([memory for _, memory in allocated]))
        with closing(open_read_arena(self._store)) as arena:
            outcome = scatter(self._store, self.segment_paths, fill, arena)
        subject = repr(names[0]) if len(names) == 1 else f"{len(names)} tensors"
        raise_damage(outcome, index, pieces, self.segment_paths, f"cannot read {subject} of {self.path}")
        return [tensor for tensor, _ in allocated]

    def state_dict(
        self, section: str | None = None, *, rank: int | None = None, by_name: bool = False
    ) -> dict[str, Any]:
        """The `state_dict()` of the object saved as `section`, in new memory; every chunk is verified.

        For a module: tensors by name, without prefixes of wrappers. For an optimizer: its state dict, with parameters
        numbered in the order of its groups, as `Optimizer.load_state_dict` expects. For a container of modules: a dict
        for each module. For an object with a provider: a dict with "kind", "parts" and "objects". Tied tensors are one
        object. Without torch, tensors are numpy arrays.

        section  None: a dict of all sections; per-rank sections are included only if `rank` is given
        rank     for per-rank sections: the rank whose value is returned
        by_name  whether an optimizer's parameters have names instead of numbers, as `set_optimizer_state_dict` expects

        raises   NoTensorError  no such section (also a KeyError)
                 ArgumentError  the section has one value per rank, and `rank` is missing or out of range
                 DamagedError   stored bytes do not match their digests
                 BudgetError    not enough memory
        """
        per_rank = self.contents.per_rank
        names = list(dict.fromkeys([*self.objects, *per_rank]))
        if section is not None:
            if section not in names:
                raise NoTensorError(
                    f"no section {section!r} in this checkpoint", found=", ".join(map(repr, names)) or "none",
                    next="give one of these, or None for all sections",
                )
            return cast("dict[str, Any]", self._section(section, rank, by_name=by_name))
        included = [name for name in names if name not in per_rank or rank is not None]
        return {name: self._section(name, rank, by_name=by_name) for name in included}

    def _section(self, section: str, rank: int | None, *, by_name: bool) -> object:
        """The state dict of one section. All its tensors are read with one read."""
        from flowstone.format.assemble import assemble, tensor_names  # imported here: loads do not need it
        from flowstone.stage.allocation import live_values

        stored, prefix = self.objects.get(section), section
        if section in self.contents.per_rank:
            own = self.contents.per_rank[section]
            if rank is None or not 0 <= rank < len(own):
                raise ArgumentError(
                    f"section {section!r} has a value for each of {len(own)} ranks",
                    next=f"give the rank: state_dict({section!r}, rank=0)",
                )
            stored, prefix = own[rank], f"{section}@{rank}"
        rows, stored_as = self.index.rows(), self.index.tensors
        names = [name for name in tensor_names(rows, prefix, stored) if _belongs(name, prefix, self.objects)]
        distinct = list(dict.fromkeys(rows[name] for name in names))  # tied tensors are read once
        boxes = [Box.whole(stored_as.shapes[row]) for row in distinct]
        read = self._read(distinct, [stored_as.names[row] for row in distinct], boxes) if distinct else []
        by_row, live = dict(zip(distinct, read, strict=True)), live_values()
        return assemble(prefix, stored, {name: by_row[rows[name]] for name in names}, by_name=by_name, live=live)

    def stream(
        self,
        names: str | Iterable[str] | None = None,
        device: str | torch.device = "cpu",
        *,
        regions: Mapping[str, Region] | None = None,
        window_bytes: int = 256 << 20,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors in the order on disk. The next tensors are read while the caller works. Every chunk
        is verified.

        For inference engines that load weights. Tensors are read in groups (windows) of up to `window_bytes`. If the
        caller copies or drops the tensors, at most four windows are in memory, for a checkpoint of any size. A tensor
        that the caller keeps stays valid, and keeps its window in memory.

        names         names, or a shell pattern (`"model.*"`); None: all tensors, tied tensors once
        device        device of the returned tensors
        regions       by name, the part of a tensor to read, as for `read`: a rank's slice of a tensor-parallel weight
        window_bytes  most bytes of a window; a tensor with more bytes is a window of its own

        raises        the errors of `read`: for wrong names and regions when called, for damage during the iteration
        """
        streaming = extension("torch.streaming")
        if not isinstance(window_bytes, int) or isinstance(window_bytes, bool) or window_bytes < 1:
            raise ArgumentError(f"window_bytes must be positive, not {window_bytes!r:.60}", next="give 1 << 20 or more")
        requests = []
        parts, device = streaming.check_arguments(names, regions, device)
        for name in self._named(names):
            row = self._row(name)
            box, shape = to_box(parts.pop(name, None), self.index.tensors.shapes[row], name)
            requests.append(streaming.StreamedTensor(name, row, box, shape))
        for name in parts:
            self._row(name)
            raise ArgumentError(f"`regions` has {name!r}, but `names` does not", next=f"add {name!r} to `names`")
        paths = self.segment_paths
        stream = streaming.TensorStream(self._store, self.index, paths, self.path, requests, window_bytes, device)
        return cast("Iterator[tuple[str, torch.Tensor]]", stream.run())

    def _named(self, names: str | Iterable[str] | None) -> Iterable[str]:
        if names is None:
            return [entry.name for entry in self.tensors.values() if entry.alias_of is None]
        if not isinstance(names, str):
            return dict.fromkeys(names)
        matching = [name for name in self.tensors if fnmatchcase(name, names)]
        if not matching:
            raise no_tensor(names, self.tensors)
        return matching

    def keys(self) -> KeysView[str]:
        """The names of all tensors, aliases included, in stored order."""
        return self.tensors.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> StoredTensor:
        """A tensor whose data is read when it is indexed: `checkpoint["model.wte.weight"][0:128]`.

        raises  NoTensorError  no such tensor (also a KeyError)
        """
        self._row(name)
        return StoredTensor(self, self.tensors[name])

    def _row(self, name: str) -> int:
        """The index row of a tensor; NoTensorError lists similar names."""
        row = self.index.rows().get(name) if isinstance(name, str) else None
        if row is not None:
            return row
        section = str(name).partition(".")[0]
        is_object = section in self.objects or section in self.contents.per_rank
        also = {"objects": f"there is {section!r} in .objects"} if is_object else {}
        raise no_tensor(name, self.tensors, **also)

    def verify(
        self, on_progress: Callable[[int, int], None] | None = None, *, cluster: Cluster | None = None
    ) -> Verified:
        """Check every byte of every file, padding included. Raises a DamagedError that lists all faults.

        on_progress  called with the bytes done and the total
        cluster      runs the checks as tasks of Ray; None: this process runs them
        """
        verified = self.inspect(on_progress, cluster=cluster)
        if not verified.sound:
            raise DamagedError(
                f"{self.path} is damaged in {len(verified.findings)} place(s)",
                found="\n".join(f"{finding.file}: {finding.what}" for finding in verified.findings),
                next="restore the files from a copy, or load an older step",
            )
        return verified

    def inspect(
        self, on_progress: Callable[[int, int], None] | None = None, *, cluster: Cluster | None = None
    ) -> Verified:
        """Like `verify`, but if there is damage, the result lists it, and nothing is raised."""
        from flowstone.reading.verification import inspect  # imported here: loads do not need it

        check_work(on_progress=on_progress, cluster=cluster)
        return inspect(self._store, self._directory, on_progress, cluster)

    def stored_bytes(self, name: str, offset: int, length: int) -> bytes:
        """`length` bytes of one of the checkpoint's files from `offset` on, as stored, and not verified. Fewer bytes if
        the file is too short. Raises StorageError.
        """
        return self._store.read(path_inside(self._directory, name), offset=offset, length=length)

    @property
    def source(self) -> ReadSource:
        return ReadSource(self._store, self.index, self.segment_paths, self.path)

    @cached_property
    def segment_paths(self) -> tuple[str, ...]:
        return tuple(path_inside(self._directory, row.name) for row in self.manifest.segments)

    def __repr__(self) -> str:
        size = f"{self.manifest.data_bytes / 1e9:.3g} GB"
        return f"<Checkpoint step {self.step} in {self.path}: {self.manifest.tensors} tensors, {size}>"

    def _repr_html_(self) -> str:
        """A table of the largest tensors, for notebooks; only the line of `repr` if the index cannot be read."""
        from flowstone.reading.notebook import as_html  # imported here: only notebooks need it

        try:
            return as_html(repr(self), list(self.tensors.values()))
        except FlowstoneError as error:
            return as_html(repr(self), [], str(error).partition("\n")[0])


def open_checkpoint(
    path: str | os.PathLike[str] | Store | Sequence[str | os.PathLike[str] | Store], step: int | None = None, *,
    engine: EngineOptions | None = None,
) -> Checkpoint:
    """Open the newest checkpoint of the store at `path`, or that of `step`. `path` may also be the directory of a
    checkpoint.

    path    a directory; or a Store, which stays open; or a list of tiers: the nearest tier that has the step is read

    raises  NotAStoreError      `path` is neither a store nor a checkpoint
            NoCheckpointError   the store has no checkpoint, or none of that step
            DamagedError        the manifest does not match its digest
            ArgumentError       `path` is not a directory, or `step` is not a step
    """
    if not isinstance(engine, EngineOptions | None):
        raise ArgumentError(f"engine {engine!r:.60} is not an EngineOptions", next="write engine=fs.EngineOptions(...)")
    requested = None if step is None else step_number(step, verb="open")
    options = engine or EngineOptions()
    if is_list(path):
        stores = extension("tiered.stores")(path, options)
        nearest, nearest_step = extension("tiered.open_nearest")(stores, requested)
        return Checkpoint(nearest, step_directory(nearest_step), options)
    source = to_store(path)
    store = store_at(source, options)
    if store.exists(MANIFEST_NAME):
        striped = None if store is source else striped_parent(source, options)
        checkpoint = Checkpoint(store, "", options) if striped is None else Checkpoint(*striped, options)
        if requested not in (None, checkpoint.step):
            raise NoCheckpointError(
                f"{store.location} is the checkpoint of step {checkpoint.step}, not a store",
                wanted=f"step {requested}", next="open the directory above it, or omit `step`",
            )
        return checkpoint
    check_store(store)
    newest = catalog.newest_manifest(store) if requested is None else None
    checkpoint_step = find_checkpoint(store, requested) if newest is None else newest.step
    return Checkpoint(store, step_directory(checkpoint_step), options, newest)


def _belongs(name: str, section: str, sections: Iterable[str]) -> bool:
    """Whether a tensor belongs to this section, and not to a longer one with the same prefix ("model", "model.ema")."""
    return not any(
        len(other) > len(section) and other.startswith(section) and (name == other or name.startswith(f"{other}."))
        for other in sections
    )


__all__ = ["Checkpoint", "StoredTensor", "TensorEntry", "TensorTable", "open_checkpoint"]
