"""A checkpoint of any format as a table: which tensors it has, and where the bytes of each box lie in its files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import MIB
from flowstone.errors import CollisionError, CoverageError, DamagedError, UnsupportedFormatError
from flowstone.plan.coverage import check_tiling
from flowstone.store.os_errors import translated
from flowstone.table.box import Box
from flowstone.table.pieces import Alias
from flowstone.table.stored import SourceTensor, StoredBox, reach_elements, row_major

METADATA_BYTES_MAX = 1024 * MIB
"""What is read of a checkpoint before anything is known of it: the file that names all tensors."""


class Decoded(Protocol):
    """Bytes that lie in no file as they are, but in what another library decodes. Any thread may read."""

    def read(self, begin: int, into: NDArray[np.uint8]) -> None:
        """Fill memory with the bytes from `begin` on. Raises DamagedError."""


class SourceFile(msgspec.Struct, frozen=True):
    """A file that bytes are read from, as it was when the source was opened; `path` has no links in it.

    decoded  where there is no such file: what reads its bytes, which `path` names for people
    is_shared  whether other processes can read it by this record: it is a file, perhaps of a shared file system
    """

    path: str
    bytes: int
    changed_ns: int
    decoded: Decoded | None = None
    is_shared: bool = True


class Unmapped(msgspec.Struct, frozen=True):
    """A value that a checkpoint of ours cannot hold: where it is, and of which type."""

    name: str
    what: str


class Source(msgspec.Struct, frozen=True, eq=False):
    """A checkpoint that is ready to be read: everything about it is known and checked but the tensors' bytes.

    kind      "flowstone", "safetensors", "torch", "dcp", "megatron", "deepspeed", "torchsnapshot", "orbax"
    location  for people
    tensors   in the order in which they are best read
    objects   section -> value, of what is no tensor; a TensorRef stands where a tensor lies
    per_rank  section -> one value for each rank
    documents  small files beside the tensors (a model's configuration, a tokenizer), by name
    is_flat   the tensors are those of one module, by its own names: they belong to no section yet
    digests   XXH3-64 of chunks, where something vouches for bytes
    unmapped  what else it has; an error, unless a rule skips it
    step      of a store of ours
    """

    kind: str
    location: str
    files: tuple[SourceFile, ...]
    tensors: tuple[SourceTensor, ...]
    aliases: tuple[Alias, ...] = ()
    objects: Mapping[str, object] = msgspec.field(default_factory=dict)
    per_rank: Mapping[str, Sequence[object]] = msgspec.field(default_factory=dict)
    documents: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    is_flat: bool = False
    digests: NDArray[np.uint64] | None = None
    unmapped: tuple[Unmapped, ...] = ()
    step: int | None = None


def source_file(path: Path) -> SourceFile:
    """The file at `path`, behind links if there are any: caches keep their files behind links."""
    with translated(path.parent, "look at", path.name):
        real = path.resolve(strict=True)
        found = os.stat(real)
    return SourceFile(str(real), found.st_size, found.st_mtime_ns)


def read_whole(directory: Path, name: str, bytes_max: int) -> bytes:
    """A small file of a checkpoint. Raises DamagedError if it is longer than `bytes_max`; StorageError."""
    path = directory / name
    with translated(directory, "read", name):
        if path.stat().st_size > bytes_max:
            raise DamagedError(f"{path} is too long", expected=f"at most {bytes_max} bytes", next="check it")
        return path.read_bytes()


def in_file_order(tensors: Iterable[SourceTensor]) -> tuple[SourceTensor, ...]:
    """The tensors by where they begin in the files, which are so read from front to back; those without boxes first."""
    return tuple(sorted(tensors, key=lambda one: [(box.file, box.offset_bytes) for box in one.boxes[:1]]))


def check_source(source: Source) -> Source:
    """The source itself, if it is whole: names differ, boxes fill their tensors, extents lie inside of their files.

    raises  CollisionError, CoverageError, DamagedError, UnsupportedFormatError
    """
    _check_names([*(tensor.name for tensor in source.tensors), *(alias.name for alias in source.aliases)])
    for tensor in source.tensors:
        whole = len(tensor.boxes) == 1 and tensor.boxes[0].box == Box.whole(tensor.shape)
        if not whole:
            _check_filled(source, tensor)
        for stored in tensor.boxes:
            _check_extent(source, tensor, stored)
    return source


def _check_names(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CollisionError(
                f"two tensors of the checkpoint are called {name!r}", next="rename one of them with a Rename rule"
            )
        seen.add(name)


def _check_filled(source: Source, tensor: SourceTensor) -> None:
    try:
        check_tiling(tensor.name, tensor.shape, [stored.box for stored in tensor.boxes])
    except CoverageError as error:
        raise CoverageError(
            f"{source.location} has not every element of {tensor.name!r:.200} once",
            found=error.message.removeprefix(f"cannot save {tensor.name!r}: "),
            expected=f"parts that fill shape {tensor.shape}", next="copy the whole checkpoint again",
        ) from error


def _check_extent(source: Source, tensor: SourceTensor, stored: StoredBox) -> None:
    assert stored.file is not None, "what a source has lies in a file"
    file = source.files[stored.file]
    strides = stored.strides if stored.strides is not None else row_major(stored.box.shape)
    if any(stride < 0 for stride in strides):
        raise UnsupportedFormatError(
            f"{tensor.name!r} in {file.path} runs backwards in memory", found=f"strides {strides}",
            next="save a contiguous copy of it",
        )
    end = stored.offset_bytes + reach_elements(stored.box.shape, strides) * tensor.dtype.item_bytes
    if stored.offset_bytes < 0 or end > file.bytes:
        raise DamagedError(
            f"{file.path} is too short for {tensor.name!r}", expected=f"at least {end} bytes",
            found=f"{file.bytes} bytes", next="copy or download the file again",
        )
