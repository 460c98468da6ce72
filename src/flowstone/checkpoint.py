"""A committed checkpoint, read-only: what is in it, and any box of any tensor. Needs no torch."""

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

from flowstone.arguments import check_work, is_list, step_number, store_at, striped_above, to_store
from flowstone.commit import catalog
from flowstone.commit import read as contents
from flowstone.commit.entries import step_directory
from flowstone.commit.locations import check_store, find_checkpoint
from flowstone.commit.manifests import inside, read_manifest
from flowstone.config import EngineOptions
from flowstone.errors import (
    ArgumentError,
    DamagedError,
    FlowstoneError,
    NoCheckpointError,
    NoTensorError,
)
from flowstone.format.index import Index
from flowstone.format.manifest import MANIFEST_NAME, Manifest
from flowstone.plan.read import plan_reads
from flowstone.regions import Region, to_box
from flowstone.stage.arena import open_read_arena
from flowstone.stage.scatter import Fill, Source, raise_damage, scatter
from flowstone.store.base import Store
from flowstone.table.box import Box
from flowstone.table.pieces import Piece, Pieces, Places

if TYPE_CHECKING:
    import torch

    from flowstone.cluster import Cluster
    from flowstone.commit.makeup import SectionMakeup
    from flowstone.commit.verify import Verified

_FETCHED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What the index says about a stored tensor. `alias_of`: the name under which its bytes are stored, if another."""

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
    """The error for a tensor name that does not exist; lists similar names."""
    last = str(name).rpartition(".")[2]
    alike = [known for known in names if known.endswith(last)][:5]
    hint = f"; there is {', '.join(alike)}" if alike else ""
    return NoTensorError(
        f"no tensor {name!r} in this checkpoint{hint}", **facts, next="`list(checkpoint.tensors)` gives all names"
    )


class StoredTensor:
    """A tensor of a checkpoint. Nothing of it is read before it is indexed, and only what is asked for."""

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
        """That part of it, verified, in fresh memory: as `Checkpoint.read` takes a box."""
        return self._checkpoint.read(self.name, region)

    def numpy(self, region: Region = None) -> np.ndarray:
        """All of it, or a part, as an array."""
        return self._checkpoint.read(self.name, region, framework="numpy")

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("what is read from a checkpoint is always a copy")
        found = self.numpy()
        return found if dtype is None else found.astype(cast("Any", dtype), copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Refused: iteration would read row by row, which is slow and hardly intended."""
        raise TypeError(f"{self.name!r} is not read row by row; write [...] for all of it, or [a:b] for some rows")

    def __repr__(self) -> str:
        return f"<StoredTensor {self.name!r} {self.dtype} {self.shape}>"


class Checkpoint:
    """One committed checkpoint. Its manifest is already read and checked; index and objects are read when first used.

    Reads take no lock and write nothing. Safe to share between threads.
    """

    def __init__(self, store: Store, directory: str, options: EngineOptions, manifest: Manifest | None = None) -> None:
        self._store, self._directory, self._options = store, directory, options
        self.is_spread = store.capabilities.spreads  # whether its segments may lie on several paths
        self.manifest = manifest or read_manifest(store, directory)
        self._journal_step: int | None = None
        self._objects_text: bytearray | None = None  # of `fetch`, until it is decoded
        self._headers_checked = False  # by `fetch`

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def journal_step(self) -> int | None:
        """The step that `Checkpointer.load` replays from here on, if a journal led further when this was opened."""
        return self._journal_step

    def with_journal(self, step: int | None) -> Checkpoint:
        """The same checkpoint, from which a journal leads to `step`."""
        same = copy(self)
        same._journal_step = None if step == self.manifest.step else step
        return same

    @property
    def path(self) -> str:
        return f"{self._store.location}/{self._directory}".rstrip("/")

    @cached_property
    def index(self) -> Index:
        """The table of all pieces, verified."""
        return contents.read_index(self._store, self._directory, self.manifest)

    @cached_property
    def tensors(self) -> TensorTable:
        return TensorTable(self.index)

    @cached_property
    def contents(self) -> contents.Objects:
        """All values that are not tensors, verified; per-rank values kept apart."""
        text, self._objects_text = self._objects_text, None
        return contents.read_objects(self._store, self._directory, self.manifest, text)

    @cached_property
    def sections(self) -> tuple[SectionMakeup, ...]:
        """What the tensors of each section are made up of: written, referred to, coded. Reads no data."""
        from flowstone.commit.makeup import sections_of  # here: loads need nothing of it

        return sections_of(self.manifest, self.index, [*self.objects, *self.contents.per_rank])

    @property
    def objects(self) -> Mapping[str, object]:
        """Section name to value, for all values that are not tensors."""
        return self.contents.replicated

    def check(self) -> None:
        """Check everything that needs no tensor bytes: index, objects, sizes and headers of segments."""
        if self._store.capabilities.distant and not self._headers_checked:
            self.fetch()
        _ = self.index, self.contents
        checked, self._headers_checked = self._headers_checked, False
        if not checked:
            contents.check_segments(self._store, self._directory, self.manifest)

    def fetch(self) -> None:
        """Read what `check` needs, which then reads nothing: it would wait behind requests for tensors' bytes."""
        store, directory, manifest = self._store, self._directory, self.manifest
        if self._headers_checked:
            return
        if not store.capabilities.distant:
            _ = self.index
            contents.check_segments(store, directory, manifest)
            self._headers_checked, self._objects_text = True, contents.objects_text(store, directory, manifest)
            return
        with ThreadPoolExecutor(_FETCHED_AT_ONCE, thread_name_prefix="flowstone-fetch") as threads:
            text = threads.submit(contents.objects_text, store, directory, manifest)
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
        """A tensor, or the `box` of it (offset and shape in elements), in new memory; every chunk is verified.

        framework  None: torch, or numpy (and ml_dtypes) where torch is not installed
        box     or a numpy index: `slice(0, 128)`, `np.s_[0:128, 3]`; an integer drops its dimension

        raises  NoTensorError  no such tensor (also a KeyError)
                ArgumentError  the box does not fit in the tensor, or the framework is unknown (also a ValueError)
                DamagedError   stored bytes are not what was written
                BudgetError    there is not enough memory for it
        """
        row = self._row(name)
        box, result_shape = to_box(box, self.index.tensors.shapes[row], name)
        result = self._read([row], [name], [box], framework)[0]
        return result if result_shape == box.shape else result.reshape(result_shape)

    def _read(
        self, rows: Sequence[int], names: Sequence[str], boxes: Sequence[Box], framework: str | None = None
    ) -> list[torch.Tensor | np.ndarray]:
        """Boxes of tensors, each in fresh memory, read at once; every chunk verified."""
        from flowstone.stage.fresh import fresh  # here: loads need nothing of it

        index = self.index
        wanted = Pieces.of([
            Piece(name, index.tensors.dtypes[row], index.tensors.shapes[row], box)
            for name, row, box in zip(names, rows, boxes, strict=True)
        ])
        plan = plan_reads(index, wanted, rows)  # before memory is allocated: raises if a part is not stored
        made = [fresh(index.tensors.dtypes[row], box.shape, framework) for row, box in zip(rows, boxes, strict=True)]
        fill = Fill(index, plan, wanted, Places.of([memory for _, memory in made]))
        with closing(open_read_arena(self._store)) as arena:
            found = scatter(self._store, self.segment_paths, fill, arena)
        what = repr(names[0]) if len(names) == 1 else f"{len(names)} tensors"
        raise_damage(found, index, wanted, self.segment_paths, f"cannot read {what} of {self.path}")
        return [result for result, _ in made]

    def state_dict(
        self, section: str | None = None, *, rank: int | None = None, by_name: bool = False
    ) -> dict[str, Any]:
        """What `state_dict()` of the object saved as `section` returned, in fresh memory; every chunk verified.

        A module's has names below the section, without wrappers' prefixes; an optimizer's numbers its parameters in the
        order of its groups, as `Optimizer.load_state_dict` takes it. A container of modules has a dict for each.
        Tied tensors are one object. Without torch, tensors are numpy arrays. Of a provider: "kind", "parts", "objects".

        section  None: a dict of all sections, those that each rank has its own of only if `rank` is given
        rank     whose value, of a section that each rank has its own of
        by_name  an optimizer's parameters have their names instead, as `set_optimizer_state_dict` takes them

        raises   NoTensorError  no such section (also a KeyError)
                 ArgumentError  each rank has its own of that section, and `rank` says no rank of these
                 DamagedError   stored bytes are not what was written
                 BudgetError    there is no memory for it
        """
        per_rank = self.contents.per_rank
        known = list(dict.fromkeys([*self.objects, *per_rank]))
        if section is not None:
            if section not in known:
                raise NoTensorError(
                    f"no section {section!r} in this checkpoint", found=", ".join(map(repr, known)) or "none",
                    next="give one of these, or none for all of them",
                )
            return cast("dict[str, Any]", self._section(section, rank, by_name=by_name))
        wanted = [name for name in known if name not in per_rank or rank is not None]
        return {name: self._section(name, rank, by_name=by_name) for name in wanted}

    def _section(self, section: str, rank: int | None, *, by_name: bool) -> object:
        """One section, its tensors read at once."""
        from flowstone.format.assemble import assemble, tensor_names  # here: loads need nothing of it
        from flowstone.stage.fresh import live_values
        stored, place = self.objects.get(section), section
        if section in self.contents.per_rank:
            own = self.contents.per_rank[section]
            if rank is None or not 0 <= rank < len(own):
                raise ArgumentError(
                    f"section {section!r} was saved for each of {len(own)} ranks apart",
                    next=f"say whose: state_dict({section!r}, rank=0)",
                )
            stored, place = own[rank], f"{section}@{rank}"
        rows, stored_as = self.index.rows(), self.index.tensors
        names = [name for name in tensor_names(rows, place, stored) if _belongs(name, place, self.objects)]
        distinct = list(dict.fromkeys(rows[name] for name in names))  # tied ones are read once
        boxes = [Box.whole(stored_as.shapes[row]) for row in distinct]
        read = self._read(distinct, [stored_as.names[row] for row in distinct], boxes) if distinct else []
        by_row, live = dict(zip(distinct, read, strict=True)), live_values()
        return assemble(place, stored, {name: by_row[rows[name]] for name in names}, by_name=by_name, live=live)

    def stream(
        self,
        names: str | Iterable[str] | None = None,
        device: str | torch.device = "cpu",
        *,
        regions: Mapping[str, Region] | None = None,
        window_bytes: int = 256 << 20,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in the order of the disk, read ahead while the caller works; every chunk verified.

        For engines that load weights: memory stays at four windows at most, however large the checkpoint is, as long as
        the caller copies tensors, or lets go of them. One that it keeps stays as it is, and keeps its window.

        names         which: names, or a shell pattern (`"model.*"`); None: all tensors, tied ones once
        device        where they are to be
        regions       of some, by name, only a part, as `read` takes it: a rank's slice of a tensor-parallel weight
        window_bytes  read at once; a tensor that is larger is a window by itself

        raises        what `read` raises, for names and regions at once, for what is stored as it comes
        """
        from flowstone.streaming import Streaming, Wanted, checked

        if not isinstance(window_bytes, int) or isinstance(window_bytes, bool) or window_bytes < 1:
            raise ArgumentError(f"window_bytes {window_bytes!r:.60} is no number of bytes", next="give 1 << 20 or more")
        wanted: list[Wanted] = []
        parts, device = checked(names, regions, device)
        for name in self._named(names):
            row = self._row(name)
            box, shape = to_box(parts.pop(name, None), self.index.tensors.shapes[row], name)
            wanted.append(Wanted(name, row, box, shape))
        for name in parts:
            self._row(name)
            raise ArgumentError(f"a region of {name!r}, which is not streamed", next="add it to `names`")
        paths = self.segment_paths
        return Streaming(self._store, self.index, paths, self.path, wanted, window_bytes, device).run()

    def _named(self, names: str | Iterable[str] | None) -> Iterable[str]:
        if names is None:
            return [entry.name for entry in self.tensors.values() if entry.alias_of is None]
        if not isinstance(names, str):
            return dict.fromkeys(names)
        found = [name for name in self.tensors if fnmatchcase(name, names)]
        if not found:
            raise no_tensor(names, self.tensors)
        return found

    def keys(self) -> KeysView[str]:
        """The names of all tensors, aliases included, in stored order."""
        return self.tensors.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> StoredTensor:
        """A tensor, of which nothing is read before it is indexed: `checkpoint["model.wte.weight"][0:128]`.

        raises  NoTensorError  no such tensor (also a KeyError)
        """
        self._row(name)
        return StoredTensor(self, self.tensors[name])

    def _row(self, name: str) -> int:
        """The index row of a tensor; NoTensorError lists similar names."""
        row = self.index.rows().get(name) if isinstance(name, str) else None
        if row is not None:
            return row
        place = str(name).partition(".")[0]
        is_object = place in self.objects or place in self.contents.per_rank
        also = {"objects": f"there is {place!r} in .objects"} if is_object else {}
        raise no_tensor(name, self.tensors, **also)

    def verify(
        self, on_progress: Callable[[int, int], None] | None = None, *, cluster: Cluster | None = None
    ) -> Verified:
        """Account for every byte of every file, padding included. Raises DamagedError naming all that differs.

        on_progress  is told the bytes done and the bytes in all
        cluster      does it, as tasks of Ray; None: this process does
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
        """As `verify`, but damage is returned in the result instead of raised."""
        from flowstone.verification import inspect  # here: loads need nothing of it
        check_work(on_progress=on_progress, cluster=cluster)
        return inspect(self._store, self._directory, on_progress, cluster)

    def stored_bytes(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of one of its files as they are stored, unverified; fewer if it ends before. Raises StorageError."""
        return self._store.read(inside(self._directory, name), offset=offset, length=length)

    @property
    def source(self) -> Source:
        return Source(self._store, self.index, self.segment_paths, self.path)

    @cached_property
    def segment_paths(self) -> tuple[str, ...]:
        return tuple(inside(self._directory, row.name) for row in self.manifest.segments)

    def __repr__(self) -> str:
        size = f"{self.manifest.data_bytes / 1e9:.3g} GB"
        return f"<Checkpoint step {self.step} in {self.path}: {self.manifest.tensors} tensors, {size}>"

    def _repr_html_(self) -> str:
        """A table of the largest tensors, for notebooks; only the line of `repr` where the index cannot be read."""
        from flowstone.notebook import as_html  # imported here: only a notebook asks

        try:
            return as_html(repr(self), list(self.tensors.values()))
        except FlowstoneError as error:
            return as_html(repr(self), [], str(error).partition("\n")[0])


def open_checkpoint(
    path: str | os.PathLike[str] | Store | Sequence[str | os.PathLike[str] | Store], step: int | None = None, *,
    engine: EngineOptions | None = None,
) -> Checkpoint:
    """The newest checkpoint of the store at `path`, or its checkpoint of `step`; or the checkpoint at `path` itself.

    path    a directory, or a Store, which stays open; of a list of tiers, the nearest that has it

    raises  NotAStoreError      `path` holds neither a store nor a checkpoint
            NoCheckpointError   a store without any checkpoint, or without that step
            DamagedError        its manifest is not what was written
            ArgumentError       `path` is not a directory, or `step` is not a step
    """
    if not isinstance(engine, EngineOptions | None):
        raise ArgumentError(f"engine {engine!r:.60} is not an EngineOptions", next="write engine=fs.EngineOptions(...)")
    wanted = None if step is None else step_number(step, verb="open")
    options = engine or EngineOptions()
    if is_list(path):
        from flowstone.tiers.policy import stores_of  # imported here: most have one store
        from flowstone.tiers.restore import open_nearest

        nearest, nearest_step = open_nearest(stores_of(path, options), wanted)
        return Checkpoint(nearest, step_directory(nearest_step), options)
    place = to_store(path)
    store = store_at(place, options)
    if store.exists(MANIFEST_NAME):
        whole = None if store is place else striped_above(place, options)
        found = Checkpoint(store, "", options) if whole is None else Checkpoint(*whole, options)
        if wanted not in (None, found.step):
            raise NoCheckpointError(
                f"{store.location} is the checkpoint of step {found.step}, not a store", wanted=f"step {wanted}",
                next="open the directory above it, or leave out the step",
            )
        return found
    check_store(store)
    newest = catalog.newest(store) if wanted is None else None
    found_step = find_checkpoint(store, wanted) if newest is None else newest.step
    return Checkpoint(store, step_directory(found_step), options, newest)


def _belongs(name: str, place: str, sections: Iterable[str]) -> bool:
    """Whether a tensor is of this section, and of none whose name begins with this one's and a dot."""
    return not any(
        len(other) > len(place) and other.startswith(place) and (name == other or name.startswith(f"{other}."))
        for other in sections
    )


__all__ = ["Checkpoint", "StoredTensor", "TensorEntry", "TensorTable", "Verified", "open_checkpoint"]
