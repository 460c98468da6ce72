"""A checkpoint of any format as a table: which tensors it has, and where the bytes of each box lie in its files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import GIB, MIB, NAME_BYTES_MAX, NDIM_MAX
from flowstone.errors import CollisionError, CoverageError, DamagedError, UnsupportedFormatError
from flowstone.format.leaves import valid_text
from flowstone.plan.coverage import check_tiling, tiles
from flowstone.store.descriptors import Descriptors
from flowstone.store.engines import open_file
from flowstone.store.os_errors import translated
from flowstone.table.box import Box
from flowstone.table.pieces import Alias
from flowstone.table.stored import SourceTensor, StoredBox, reach_elements, row_major

METADATA_BYTES_MAX = 1024 * MIB
"""What is read of a checkpoint before anything is known of it: the file that names all tensors."""

_SIDE_MAX = 1 << 60
_PATH_BYTES_MAX = 2048  # of a file below a checkpoint's directory: Linux takes 4096 in all
_FILE_NAME_BYTES_MAX = 255
_EXPANSION_MAX = 16  # tensors that share memory in a file are each written out in full
_EXPANDED_BYTES_MIN = GIB  # allowed for the smallest file: a mask may be one number, expanded
_BLOCKS_MIN = 8  # of 512 bytes: one page, which any file with a header takes; some network file systems report 0 or 1
_UNALIGNED_MAX = 1 << 14  # boxes that form no grid: each is compared with all before it


class Decoded(Protocol):
    """Bytes that lie in no file as they are, but in what another library decodes. Any thread may read."""

    def read(self, begin: int, into: NDArray[np.uint8]) -> None:
        """Fill memory with the bytes from `begin` on. Raises DamagedError."""


class SourceFile(msgspec.Struct, frozen=True):
    """A file that bytes are read from, as it was when the source was opened; `path` has no links in it.

    decoded  where there is no such file: what reads its bytes, which `path` names for people
    is_shared  whether other processes can read it by this record: it is a file, perhaps of a shared file system
    allocated_bytes  what it takes on the disk, without its holes
    """

    path: str
    bytes: int
    changed_ns: int
    decoded: Decoded | None = None
    is_shared: bool = True
    allocated_bytes: int = 0


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
    with translated(path.parent, "read", path.name), open_plain(path) as opened:
        found = os.fstat(opened.fileno())
        allocated = allocated_bytes(opened)
        return SourceFile(os.path.realpath(path), found.st_size, found.st_mtime_ns, allocated_bytes=allocated)


def allocated_bytes(file: BinaryIO) -> int:
    """The bytes that a file takes on the disk, without its holes. Raises OSError."""
    found = os.fstat(file.fileno())
    if found.st_blocks >= _BLOCKS_MIN or not found.st_size:
        return min(found.st_size, found.st_blocks * 512)
    try:
        os.lseek(file.fileno(), 0, os.SEEK_DATA)
    except OSError as error:
        return 0 if error.errno == errno.ENXIO else found.st_size
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    return found.st_size


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file, following links; refuse what could block or never end (pipes, devices). Raises OSError."""

    def opener(name: str, _: int) -> int:
        owner = Descriptors(in_use=True)  # until the file object has it
        try:
            return open_file(Path(os.path.realpath(name, strict=True)), owner)
        except BaseException:
            owner.close()
            raise

    return open(path, "rb", opener=opener)


def is_inner(name: object) -> bool:
    """Whether a checkpoint may name one of its files so: a valid path below its own directory."""
    if not isinstance(name, str) or name in ("", ".") or name.startswith("/") or "\0" in name or not valid_text(name):
        return False
    parts = name.encode().split(b"/")
    return len(name.encode()) <= _PATH_BYTES_MAX and all(
        part != b".." and len(part) <= _FILE_NAME_BYTES_MAX for part in parts
    )


def read_whole(directory: Path, name: str, bytes_max: int) -> bytes:
    """A small file of a checkpoint. Raises DamagedError if it is longer than `bytes_max`; StorageError."""
    path = directory / name
    with translated(directory, "read", name), open_plain(path) as opened:
        if os.fstat(opened.fileno()).st_size > bytes_max:
            raise DamagedError(f"{path} is too long", expected=f"at most {bytes_max} bytes", next="check it")
        return opened.read(bytes_max)


def in_file_order(tensors: Iterable[SourceTensor]) -> tuple[SourceTensor, ...]:
    """The tensors by where they begin in the files, which are so read from front to back; those without boxes first."""
    return tuple(sorted(tensors, key=lambda one: [(box.file, box.offset_bytes) for box in one.boxes[:1]]))


def check_source(source: Source) -> Source:
    """The source itself, if it is whole: names differ, boxes fill their tensors, extents lie inside of their files, and
    the tensors do not expand beyond measure.

    raises  CollisionError, CoverageError, DamagedError, UnsupportedFormatError
    """
    _check_names([*(tensor.name for tensor in source.tensors), *(alias.name for alias in source.aliases)], source)
    _check_sizes(source)
    for tensor in source.tensors:
        whole = len(tensor.boxes) == 1 and tensor.boxes[0].box == Box.whole(tensor.shape)
        if not whole:
            _check_filled(source, tensor)
        for stored in tensor.boxes:
            _check_extent(source, tensor, stored)
    return source


def _check_sizes(source: Source) -> None:
    for tensor in source.tensors:
        if len(tensor.shape) > NDIM_MAX or max(tensor.shape, default=0) >= _SIDE_MAX:
            raise UnsupportedFormatError(
                f"{tensor.name!r:.200} in {source.location} has too many dimensions, or too long ones",
                expected=f"at most {NDIM_MAX} dimensions, each below 2^60", next="do not use this checkpoint",
            )
    if source.digests is None and all(file.decoded is None for file in source.files):
        held = sum({file.path: file.allocated_bytes for file in source.files}.values())
        lengths = {tensor.name: tensor.bytes for tensor in source.tensors}
        check_expansion(source.location, lengths, held, _EXPANSION_MAX)


def check_expansion(location: str, lengths: Mapping[str, int], held_bytes: int, expansion_max: int) -> None:
    """Raise UnsupportedFormatError if the tensors (bytes by name) are many times larger than the files."""
    most = max(_EXPANDED_BYTES_MIN, expansion_max * held_bytes)
    total = sum(lengths.values())
    if total > most:
        largest = max(lengths, key=lambda name: lengths[name])
        raise UnsupportedFormatError(
            f"{location} would expand from {held_bytes} bytes to {total}", expected=f"at most {most} bytes",
            found=f"the largest is {largest!r:.200}, {lengths[largest]} bytes",
            next="if you trust this checkpoint, load it with the program that saved it, and save it again without "
            "expanded tensors",
        )


def _check_names(names: Iterable[str], source: Source) -> None:
    seen: set[str] = set()
    for name in names:
        if not valid_text(name) or "\0" in name or len(name.encode()) > NAME_BYTES_MAX:
            raise UnsupportedFormatError(
                f"{name!r:.200} in {source.location} cannot name a tensor",
                expected=f"at most {NAME_BYTES_MAX} bytes of UTF-8 without NUL", next="rename it, and save again",
            )
        if name in seen:
            raise CollisionError(
                f"two tensors of the checkpoint are called {name!r}", next="rename one of them with a Rename rule"
            )
        seen.add(name)


def _check_filled(source: Source, tensor: SourceTensor) -> None:
    boxes = [stored.box for stored in tensor.boxes]
    if {len(box.shape) for box in boxes} == {len(tensor.shape)} and all(box.inside(tensor.shape) for box in boxes):
        offsets, sides = (np.array(rows, np.int64).reshape(len(boxes), len(tensor.shape))
                          for rows in ([box.offset for box in boxes], [box.shape for box in boxes]))
        if tiles(offsets, sides, tensor.shape):
            return
    try:
        if len(boxes) > _UNALIGNED_MAX:
            raise CoverageError(f"{len(boxes)} parts that form no grid", next="save it in fewer parts")
        check_tiling(tensor.name, tensor.shape, boxes)
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
