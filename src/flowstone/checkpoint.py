"""A committed checkpoint, read-only: what is in it, and any box of any tensor. Needs no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from flowstone.arguments import step_number, to_store
from flowstone.commit import catalog
from flowstone.commit import read as contents
from flowstone.commit.entries import step_directory
from flowstone.commit.locations import check_store
from flowstone.commit.manifests import inside, read_manifest
from flowstone.commit.verify import Verified, verify
from flowstone.config import EngineOptions
from flowstone.errors import (
    ArgumentError,
    BudgetError,
    DamagedError,
    NoCheckpointError,
    NoTensorError,
    UnsupportedStateError,
)
from flowstone.format.index import Index
from flowstone.format.manifest import MANIFEST_NAME, Manifest
from flowstone.plan.read import plan_reads
from flowstone.regions import Region, to_box
from flowstone.stage.arena import open_read_arena
from flowstone.stage.scatter import Fill, raise_damage, scatter
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.table.dtype import DType
from flowstone.table.pieces import Memory, Piece, Pieces, Places

if TYPE_CHECKING:
    import torch



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


class Checkpoint:
    """One committed checkpoint. Its manifest is already read and checked; index and objects are read when first used.

    Reads take no lock and write nothing. Safe to share between threads.
    """

    def __init__(self, store: Store, directory: str, options: EngineOptions, manifest: Manifest | None = None) -> None:
        self._store, self._directory, self._options = store, directory, options
        self.manifest = manifest or read_manifest(store, directory)

    @property
    def step(self) -> int:
        return self.manifest.step

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
        return contents.read_objects(self._store, self._directory, self.manifest)

    @property
    def objects(self) -> Mapping[str, object]:
        """Section name to value, for all values that are not tensors."""
        return self.contents.replicated

    def check(self) -> None:
        """Check everything that needs no tensor bytes: index, objects, sizes and headers of segments."""
        _ = self.index, self.contents
        contents.check_segments(self._store, self._directory, self.manifest)

    @overload
    def read(self, name: str, box: Region = None, *, framework: Literal["torch"] = "torch") -> torch.Tensor: ...
    @overload
    def read(self, name: str, box: Region = None, *, framework: Literal["numpy"]) -> np.ndarray: ...
    def read(
        self, name: str, box: Region = None, *, framework: Literal["torch", "numpy"] = "torch"
    ) -> torch.Tensor | np.ndarray:
        """A tensor, or the `box` of it (offset and shape in elements), in new memory; every chunk is verified.

        box     or a numpy index: `slice(0, 128)`, `np.s_[0:128, 3]`; an integer drops its dimension

        raises  NoTensorError  no such tensor (also a KeyError)
                ArgumentError  the box does not fit in the tensor, or the framework is unknown (also a ValueError)
                DamagedError   stored bytes are not what was written
                BudgetError    there is not enough memory for it
        """
        row = self._row(name)
        shape, dtype = self.index.tensors.shapes[row], self.index.tensors.dtypes[row]
        box, result_shape = to_box(box, shape, name)
        wanted = Pieces.of([Piece(name, dtype, shape, box)])
        plan = plan_reads(self.index, wanted, [row])  # before memory is allocated: raises if a part is not stored
        result, memory = _fresh(dtype, box.shape, framework)
        fill = Fill(self.index, plan, wanted, Places.of([memory]))
        arena = open_read_arena(self._store)
        try:
            found = scatter(self._store, self.segment_paths, fill, arena)
        finally:
            arena.close()
        raise_damage(found, self.index, wanted, self.segment_paths, f"cannot read {name!r} of {self.path}")
        return result if result_shape == box.shape else result.reshape(result_shape)

    def _row(self, name: str) -> int:
        """The index row of a tensor; NoTensorError lists similar names."""
        row = self.index.rows().get(name)
        if row is not None:
            return row
        place = str(name).partition(".")[0]
        is_object = place in self.objects or place in self.contents.per_rank
        also = {"objects": f"there is {place!r} in .objects"} if is_object else {}
        raise no_tensor(name, self.tensors, **also)

    def verify(self, on_progress: Callable[[int, int], None] | None = None) -> Verified:
        """Account for every byte of every file, padding included. Raises DamagedError naming all that differs."""
        verified = self.inspect(on_progress)
        if not verified.sound:
            raise DamagedError(
                f"{self.path} is damaged in {len(verified.findings)} place(s)",
                found="\n".join(f"{finding.file}: {finding.what}" for finding in verified.findings),
                next="restore the files from a copy, or load an older step",
            )
        return verified

    def inspect(self, on_progress: Callable[[int, int], None] | None = None) -> Verified:
        """As `verify`, but damage is returned in the result instead of raised."""
        arena = open_read_arena(self._store)
        try:
            return verify(self._store, self._directory, arena, on_progress)
        finally:
            arena.close()

    @cached_property
    def segment_paths(self) -> tuple[str, ...]:
        return tuple(inside(self._directory, row.name) for row in self.manifest.segments)

    def __repr__(self) -> str:
        return f"<Checkpoint step {self.step} in {self.path}>"


def open_checkpoint(
    path: str | os.PathLike[str] | Store, step: int | None = None, *, engine: EngineOptions | None = None
) -> Checkpoint:
    """The newest checkpoint of the store at `path`, or its checkpoint of `step`; or the checkpoint at `path` itself.

    path    a directory, or a Store, which stays open

    raises  NotAStoreError      `path` holds neither a store nor a checkpoint
            NoCheckpointError   a store without any checkpoint, or without that step
            DamagedError        its manifest is not what was written
            ArgumentError       `path` is not a directory, or `step` is not a step
    """
    if not isinstance(engine, EngineOptions | None):
        raise ArgumentError(f"engine {engine!r:.60} is not an EngineOptions", next="write engine=fs.EngineOptions(...)")
    wanted = None if step is None else step_number(step, verb="open")
    options = engine or EngineOptions()
    place = to_store(path)
    store: Store = LocalStore(place, options) if isinstance(place, Path) else place
    if store.exists(MANIFEST_NAME):
        found = Checkpoint(store, "", options)
        if wanted not in (None, found.step):
            raise NoCheckpointError(
                f"{store.location} is the checkpoint of step {found.step}, not a store", wanted=f"step {wanted}",
                next="open the directory above it, or leave out the step",
            )
        return found
    check_store(store)
    newest = catalog.newest(store) if wanted is None else None
    found_step = catalog.find(store, wanted) if newest is None else newest.step
    return Checkpoint(store, step_directory(found_step), options, newest)


def _fresh(dtype: DType, shape: tuple[int, ...], framework: str) -> tuple[torch.Tensor | np.ndarray, Memory]:
    if framework == "torch":
        from flowstone.state import tensors  # the one place where a reader needs torch

        try:
            result = tensors.empty(dtype, shape)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when memory runs out
            raise _no_memory(dtype, shape) from error
        return result, tensors.memory_of(result)
    if framework != "numpy":
        raise ArgumentError(f"framework {framework!r} is neither 'torch' nor 'numpy'", next="give one of them")
    try:
        array = np.empty(shape, dtype.name)
    except MemoryError as error:
        raise _no_memory(dtype, shape) from error
    except TypeError:
        raise UnsupportedStateError(
            f"numpy has no {dtype.name}", next="read it with framework='torch', or open the segment with safetensors"
        ) from None
    return array, Memory(array, array.ctypes.data, array.shape, array.strides, array.itemsize)


def _no_memory(dtype: DType, shape: tuple[int, ...]) -> BudgetError:
    needed = math.prod(shape) * dtype.item_bytes
    return BudgetError(
        f"no memory for a tensor of {dtype.name} and shape {shape}", needed=f"{needed} bytes",
        next="read it in boxes, one after the other",
    )


__all__ = ["Checkpoint", "TensorEntry", "TensorTable", "Verified", "open_checkpoint"]
