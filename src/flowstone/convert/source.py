"""A checkpoint of any format as a table: its tensors, their boxes (parts), and the file offset of each box."""

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
"""The size limit of a metadata file, which names all tensors."""

_SIDE_MAX = 1 << 60
_PATH_BYTES_MAX = 2048  # the longest path below a checkpoint's directory: Linux allows 4096 bytes for a complete path
_FILE_NAME_BYTES_MAX = 255
# limit of the size of all tensors together, as a multiple of the files' size: tensors that share memory in a file are
# each written in full
_EXPANSION_MAX = 16
_EXPANDED_BYTES_MIN = GIB  # allowed even for the smallest file, as an expanded mask may be stored as a single number
# in blocks of 512 bytes: one page, which a file with a header takes at least; some network file systems report 0 or 1
_BLOCKS_MIN = 8
_UNALIGNED_MAX = 1 << 14  # the most boxes of a tensor that form no grid: each of these is compared with all before it


class DecodedBytes(Protocol):
    """Bytes that another library decodes. Can be read on any thread."""

    def read(self, begin: int, into: NDArray[np.uint8]) -> None:
        """Fill `into` with the bytes from offset `begin` on. Raises DamagedError."""


class SourceFile(msgspec.Struct, frozen=True):
    """A file from which bytes are read. `bytes` and `changed_ns` are its size and time of change when the source was
    opened. `path` has no symbolic links.

    decoded  reads the bytes if no file has them in plain form; `path` is then only for messages
    is_shared  whether other processes can open the file by its path, for example on a shared file system
    allocated_bytes  the disk space that the file occupies, without its holes
    """

    path: str
    bytes: int
    changed_ns: int
    decoded: DecodedBytes | None = None
    is_shared: bool = True
    allocated_bytes: int = 0


class UnmappedValue(msgspec.Struct, frozen=True):
    """A value that a Flowstone checkpoint cannot hold: its name and its type."""

    name: str
    type_name: str


class SourceCheckpoint(msgspec.Struct, frozen=True, eq=False):
    """A checkpoint that was opened for a conversion: everything except the bytes of tensors was read and checked.

    kind      "flowstone", "safetensors", "torch", "dcp", "megatron", "deepspeed", "torchsnapshot", "orbax"
    location  the path, for messages
    tensors   in the order in which they are read fastest
    objects   section -> its values other than tensors, in which a TensorRef stands for each tensor
    per_rank  section -> a list of such values, one for each rank
    documents  small files beside the tensors (a model's configuration, a tokenizer), by name
    is_flat   whether the tensors have names of one module, such as layers.0.weight, without sections
    digests   XXH3-64 of chunks, if the format has checksums
    unmapped  values that a Flowstone checkpoint cannot store; they are an error, unless a rule skips them
    step      the step, if the source is a Flowstone store
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
    unmapped: tuple[UnmappedValue, ...] = ()
    step: int | None = None


def source_file(path: Path) -> SourceFile:
    """The file at `path`. Symbolic links are followed, as caches of downloads store their files behind links."""
    with translated(path.parent, "read", path.name), open_plain(path) as opened:
        status = os.fstat(opened.fileno())
        allocated = allocated_bytes(opened)
        return SourceFile(os.path.realpath(path), status.st_size, status.st_mtime_ns, allocated_bytes=allocated)


def allocated_bytes(file: BinaryIO) -> int:
    """The disk space of a file, without its holes. Raises OSError."""
    status = os.fstat(file.fileno())
    if status.st_blocks >= _BLOCKS_MIN or not status.st_size:
        return min(status.st_size, status.st_blocks * 512)
    try:
        os.lseek(file.fileno(), 0, os.SEEK_DATA)
    except OSError as error:
        return 0 if error.errno == errno.ENXIO else status.st_size
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    return status.st_size


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file, following symbolic links. Refuses pipes and devices, which could block. Raises OSError."""

    def opener(name: str, _: int) -> int:
        owner = Descriptors(in_use=True)  # owns the descriptor until the file object does
        try:
            return open_file(Path(os.path.realpath(name, strict=True)), owner)
        except BaseException:
            owner.close()
            raise

    return open(path, "rb", opener=opener)


def is_path_inside(name: object) -> bool:
    """Whether this name in a checkpoint is a valid path below the checkpoint's directory."""
    if not isinstance(name, str) or name in ("", ".") or name.startswith("/") or "\0" in name or not valid_text(name):
        return False
    parts = name.encode().split(b"/")
    return len(name.encode()) <= _PATH_BYTES_MAX and all(
        part != b".." and len(part) <= _FILE_NAME_BYTES_MAX for part in parts
    )


def read_small_file(directory: Path, name: str, bytes_max: int) -> bytes:
    """Read a small file of a checkpoint. Raises DamagedError if it is longer than `bytes_max`, and StorageError if it
    cannot be read.
    """
    path = directory / name
    with translated(directory, "read", name), open_plain(path) as opened:
        if os.fstat(opened.fileno()).st_size > bytes_max:
            raise DamagedError(
                f"{path} is too large", expected=f"at most {bytes_max} bytes",
                next="check that this file belongs to a checkpoint",
            )
        return opened.read(bytes_max)


def in_file_order(tensors: Iterable[SourceTensor]) -> tuple[SourceTensor, ...]:
    """Sort the tensors by file and offset, so that files are read from front to back. Tensors without boxes come first.
    """
    return tuple(sorted(tensors, key=lambda tensor: [(box.file, box.offset_bytes) for box in tensor.boxes[:1]]))


def check_source(source: SourceCheckpoint) -> SourceCheckpoint:
    """Return the source if it is valid: names are unique, boxes fill their tensors, all bytes are inside of their
    files, and the tensors are not many times larger than the files.

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


def _check_sizes(source: SourceCheckpoint) -> None:
    for tensor in source.tensors:
        if len(tensor.shape) > NDIM_MAX or max(tensor.shape, default=0) >= _SIDE_MAX:
            raise UnsupportedFormatError(
                f"{tensor.name!r:.200} in {source.location} has too many dimensions, or too long ones",
                expected=f"at most {NDIM_MAX} dimensions, each below 2^60", next="do not use this checkpoint",
            )
    if source.digests is None and all(file.decoded is None for file in source.files):
        allocated = sum({file.path: file.allocated_bytes for file in source.files}.values())
        lengths = {tensor.name: tensor.bytes for tensor in source.tensors}
        check_expansion(source.location, lengths, allocated, _EXPANSION_MAX)


def check_expansion(location: str, lengths: Mapping[str, int], held_bytes: int, expansion_max: int) -> None:
    """Raise UnsupportedFormatError if the tensors are many times larger than the files. `lengths`: name of a tensor ->
    its bytes. `held_bytes`: the size of the files.
    """
    most = max(_EXPANDED_BYTES_MIN, expansion_max * held_bytes)
    total = sum(lengths.values())
    if total > most:
        largest = max(lengths, key=lambda name: lengths[name])
        raise UnsupportedFormatError(
            f"the tensors of {location} would expand from {held_bytes} stored bytes to {total} bytes",
            expected=f"at most {most} bytes", found=f"the largest is {largest!r:.200}, {lengths[largest]} bytes",
            next="if you trust this checkpoint, load it with the program that saved it, and save it again without "
            "tensors made by expand()",
        )


def _check_names(names: Iterable[str], source: SourceCheckpoint) -> None:
    seen: set[str] = set()
    for name in names:
        if not valid_text(name) or "\0" in name or len(name.encode()) > NAME_BYTES_MAX:
            raise UnsupportedFormatError(
                f"{source.location} has an invalid tensor name {name!r:.200}",
                expected=f"at most {NAME_BYTES_MAX} bytes of UTF-8 without NUL",
                next="rename the tensor, and save again",
            )
        if name in seen:
            raise CollisionError(
                f"two tensors of the checkpoint have the name {name!r}",
                next="rename one of the two with a rule fs.Rename",
            )
        seen.add(name)


def _check_filled(source: SourceCheckpoint, tensor: SourceTensor) -> None:
    boxes = [stored.box for stored in tensor.boxes]
    if {len(box.shape) for box in boxes} == {len(tensor.shape)} and all(box.inside(tensor.shape) for box in boxes):
        offsets, sides = (np.array(rows, np.int64).reshape(len(boxes), len(tensor.shape))
                          for rows in ([box.offset for box in boxes], [box.shape for box in boxes]))
        if tiles(offsets, sides, tensor.shape):
            return
    if len(boxes) > _UNALIGNED_MAX:
        raise CoverageError(
            f"{tensor.name!r:.200} in {source.location} has too many parts that do not form a grid",
            expected=f"at most {_UNALIGNED_MAX} parts", found=f"{len(boxes)} parts",
            next="save the tensor in fewer parts",
        )
    try:
        check_tiling(tensor.name, tensor.shape, boxes)
    except CoverageError as error:
        raise CoverageError(
            f"{source.location} does not hold every element of {tensor.name!r:.200} exactly once",
            found=error.message.removeprefix(f"cannot save {tensor.name!r}: "),
            expected=f"parts that fill shape {tensor.shape}", next="copy the whole checkpoint again",
        ) from error


def _check_extent(source: SourceCheckpoint, tensor: SourceTensor, stored: StoredBox) -> None:
    assert stored.file is not None, "every box of a source lies in a file"
    file = source.files[stored.file]
    strides = stored.strides if stored.strides is not None else row_major(stored.box.shape)
    if any(stride < 0 for stride in strides):
        raise UnsupportedFormatError(
            f"{tensor.name!r} in {file.path} has negative strides", found=f"strides {strides}",
            next="save a contiguous copy of the tensor",
        )
    end = stored.offset_bytes + reach_elements(stored.box.shape, strides) * tensor.dtype.item_bytes
    if stored.offset_bytes < 0 or end > file.bytes:
        raise DamagedError(
            f"{file.path} is too short for {tensor.name!r}", expected=f"at least {end} bytes",
            found=f"{file.bytes} bytes", next="copy or download the file again",
        )
