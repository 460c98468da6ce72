"""An Orbax checkpoint as a source: the tree in its metadata, with arrays that are read by tensorstore.

Orbax stores arrays as compressed zarr, most often in one database (OCDBT). tensorstore, the library that Orbax itself
uses, decodes both. Only this module needs tensorstore.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import MIB
from flowstone.convert.fetch import linear_boxes
from flowstone.convert.source import (
    METADATA_BYTES_MAX,
    SourceCheckpoint,
    SourceFile,
    UnmappedValue,
    allocated_bytes,
    check_expansion,
    check_source,
    is_path_inside,
    open_plain,
    read_small_file,
)
from flowstone.convert.sources.tree import check_sections
from flowstone.errors import DamagedError, FrameworkError, UnsupportedFormatError
from flowstone.format.objects import TensorRef
from flowstone.store.os_errors import translated
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.stored import SourceTensor, StoredBox

_METADATA, _STEP_METADATA, _STRINGS, _DATABASE = "_METADATA", "_CHECKPOINT_METADATA", "_strings.json", "manifest.ocdbt"
_UNFINISHED = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(?:.*_)?(\d+)")
_ARRAYS = frozenset({"jax.Array", "np.ndarray"})
_EMPTY: Mapping[str, object] = {"None": None, "Dict": {}, "List": [], "Tuple": ()}
_CACHE_BYTES = 64 * MIB  # size of the cache beyond one row of chunks: for the chunks that two threads read at once
_READ_WHOLE = frozenset({_DATABASE, ".zarray", ".zattrs", ".zgroup", "zarr.json"})
_READ_WHOLE_BYTES_MAX = 64 * MIB
# limit of an encoded chunk, as a multiple of its decoded size: if it cannot be compressed, it becomes slightly longer
_ENCODED_MAX = 2
# limit of the size of all arrays together, as a multiple of the files' size: constant arrays, such as moments before
# the first step, compress well
_EXPANSION_MAX = 1024


class _Key(msgspec.Struct, frozen=True):
    key: str
    key_type: int


class _Value(msgspec.Struct, frozen=True):
    value_type: str


class _Entry(msgspec.Struct, frozen=True):
    key_metadata: tuple[_Key, ...]
    value_metadata: _Value


class _OrbaxMetadata(msgspec.Struct, frozen=True):
    """The fields of the file `_METADATA` that are read. If the last field is true, all chunks are stored; otherwise
    missing chunks are zeros.
    """

    tree_metadata: dict[str, _Entry]
    use_ocdbt: bool = True
    use_zarr3: bool = False
    store_array_data_equal_to_fill_value: bool = False


class _OrbaxArray:
    """The elements of an array, as if they were the bytes of a dense, row-major file. Can be read on any thread."""

    def __init__(self, store: Any, path: str) -> None:
        self.store, self._path = store, path

    def read(self, begin: int, into: NDArray[np.uint8]) -> None:
        """Fill `into` with the bytes from offset `begin` on. The chunks with these bytes are decoded, unless they are
        cached.
        """
        item = self.store.dtype.numpy_dtype.itemsize
        first, last = begin // item, -(-(begin + len(into)) // item)
        boxes = linear_boxes(self.store.shape, first, last)
        parts = [self.region(box).reshape(-1).view(np.uint8) for box in boxes]
        content = parts[0] if len(parts) == 1 else np.concatenate(parts)
        into[...] = content[begin - first * item :][: len(into)]

    def region(self, box: Box) -> NDArray[Any]:
        """The elements of a box as a dense array. Raises DamagedError."""
        inside = tuple(slice(low, low + side) for low, side in zip(box.offset, box.shape, strict=True))
        try:
            return np.ascontiguousarray(self.store[inside].read(order="C").result())
        except (ValueError, OSError) as error:
            raise DamagedError(
                f"{self._path} cannot be read", found=f"{error!s:.300}", next="copy the whole directory again"
            ) from error


def is_orbax(path: Path) -> bool:
    """Whether a directory is an Orbax item, a step (a directory with items), or a directory with steps."""
    return path.is_dir() and bool(_items(_step(path)))


def read_orbax(path: Path) -> SourceCheckpoint:
    """Read the checkpoint. Its sections are the top-level keys of its tree; if it has several items, their names.

    path  the directory of an item, of a step of a CheckpointManager, or of a manager, whose newest finished step is
          read

    raises  FrameworkError          tensorstore is not installed
            DamagedError            metadata or arrays are missing, or cannot be read
            UnsupportedFormatError  Flowstone cannot store the tree
    """
    items = _items(_step(path))
    is_alone = len(items) == 1
    stored = [_stored_bytes(item) for item in items]
    allocated, longest = sum(total for total, _ in stored), max(longest for _, longest in stored)
    parts = [_OrbaxItem(item, "" if is_alone else f"{item.name}.") for item in items]
    row_bytes = max(part.row_bytes() for part in parts)
    check_expansion(str(path), {"one row of chunks": row_bytes}, allocated, _EXPANSION_MAX)
    if longest > MIB + _ENCODED_MAX * row_bytes:
        raise DamagedError(
            f"{path} has a chunk that is too large", expected=f"at most {MIB + _ENCODED_MAX * row_bytes} bytes",
            found=f"{longest} bytes", next="copy the whole directory again",
        )
    cache_bytes = _CACHE_BYTES + row_bytes
    tensors: list[SourceTensor] = []
    objects: dict[str, object] = {}
    files: list[SourceFile] = []
    unmapped = [UnmappedValue(name, "an item without arrays") for name in _others(_step(path))]
    for item, part in zip(items, parts, strict=True):
        item_tensors, tree = part.read(cache_bytes, files, unmapped)
        tensors += item_tensors
        objects |= tree if is_alone else {item.name: tree}
    check_sections(objects, str(path))
    has_arrays_alone = all(isinstance(leaf, TensorRef) for leaf in _leaves(objects))
    is_flat = is_alone and has_arrays_alone and any(isinstance(value, TensorRef) for value in objects.values())
    check_expansion(str(path), {tensor.name: tensor.bytes for tensor in tensors}, allocated, _EXPANSION_MAX)
    return check_source(SourceCheckpoint(
        "orbax", str(path), tuple(files), tuple(tensors), objects={} if is_flat else objects, is_flat=is_flat,
        unmapped=tuple(unmapped),
    ))


def _stored_bytes(item: Path) -> tuple[int, int]:
    """The disk space of an item's files, and the length of its longest chunk.

    raises  DamagedError  a file is far too large; tensorstore would end the process
            StorageError  a file is a pipe or a device; tensorstore would wait forever
    """
    total = longest = 0
    is_database = (item / _DATABASE).is_file()
    for place, directories, names in os.walk(item):
        for name in (*names, *(inner for inner in directories if os.path.islink(os.path.join(place, inner)))):
            with translated(item, "read", name), open_plain(Path(place, name)) as opened:
                length = os.fstat(opened.fileno()).st_size
                total += allocated_bytes(opened)
            if name in _READ_WHOLE and length > _READ_WHOLE_BYTES_MAX:
                raise DamagedError(
                    f"{os.path.join(place, name)} is too large", expected=f"at most {_READ_WHOLE_BYTES_MAX} bytes",
                    found=f"{length} bytes", next="copy the whole directory again",
                )
            if place != str(item) and not is_database:
                longest = max(longest, length)
    return total, longest


def _step(path: Path) -> Path:
    """The directory of the newest step in `path`; `path` itself if it has no steps."""
    with translated(path, "list", "."):
        steps = [
            (int(match[1]), name) for name in os.listdir(path)
            if (match := _STEP.fullmatch(name)) and (path / name / _STEP_METADATA).is_file()
        ]
    return path / max(steps)[1] if steps and not (path / _METADATA).is_file() else path


def _items(path: Path) -> list[Path]:
    """The directories in a step that contain arrays; `path` itself if it contains arrays."""
    if _is_item(path):
        return [path]
    with translated(path, "list", "."):
        return sorted(path / name for name in os.listdir(path) if _is_item(path / name) and _UNFINISHED not in name)


def _others(path: Path) -> list[str]:
    """The names of a step's items without arrays, which were saved as JSON or by a custom handler."""
    if _is_item(path):
        return []
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not _is_item(Path(entry.path)))


def _is_item(path: Path) -> bool:
    if not (path / _METADATA).is_file():
        return False
    with translated(path, "read", _METADATA), open_plain(path / _METADATA) as opened:
        return b'"tree_metadata"' in opened.read(1 << 16)


class _OrbaxItem:
    """One item of a checkpoint: a tree of arrays, which are opened, and of other values, which are read. All names
    begin with `prefix`.
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix
        self._tensorstore = _tensorstore()
        content = read_small_file(directory, _METADATA, METADATA_BYTES_MAX)
        try:
            self._metadata = msgspec.json.decode(content, type=_OrbaxMetadata)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedError(
                f"{directory / _METADATA} is not valid metadata of Orbax", found=f"{error!s:.200}",
                next="copy the file again",
            ) from error
        if self._metadata.use_ocdbt and not (directory / _DATABASE).is_file():
            raise DamagedError(f"{directory} lacks {_DATABASE}", next="copy the whole directory again")
        self._strings: object = None

    def row_bytes(self) -> int:
        """The size in bytes of one row of chunks of the largest array. Reading a few elements decodes no more than
        that.
        """
        names = [name for _, name, entry in self._entries() if entry.value_metadata.value_type in _ARRAYS]
        return max((_row_bytes(self._open_array(name, None).store) for name in names), default=0)

    def _entries(self) -> Iterator[tuple[tuple[_Key, ...], str, _Entry]]:
        for entry in self._metadata.tree_metadata.values():
            yield entry.key_metadata, ".".join(key.key for key in entry.key_metadata), entry

    def read(
        self, cache_bytes: int, files: list[SourceFile], unmapped: list[UnmappedValue]
    ) -> tuple[list[SourceTensor], dict[str, object]]:
        """The item's tensors, and its tree with references to them. Adds to `files` and `unmapped`."""
        # Only one thread decodes, since malloc keeps freed memory for each thread, up to the cache's size.
        context = self._tensorstore.Context(
            {"cache_pool": {"total_bytes_limit": cache_bytes}, "data_copy_concurrency": {"limit": 1}})
        changed_ns = max(
            (self._directory / name).stat().st_mtime_ns for name in (_METADATA, _DATABASE)
            if (self._directory / name).is_file()
        )
        tensors: list[SourceTensor] = []
        leaves: list[tuple[tuple[_Key, ...], object]] = []
        for keys, name, entry in self._entries():
            kind, full = entry.value_metadata.value_type, self._prefix + name
            if kind in _ARRAYS:
                array = self._open_array(name, context)
                array_dtype = array.store.dtype
                dtype = DTYPES.get(array_dtype.name)
                if dtype is None or dtype.item_bytes != array_dtype.numpy_dtype.itemsize:
                    unmapped.append(UnmappedValue(full, array_dtype.name))
                    continue
                shape = tuple(array.store.shape)
                tensors.append(SourceTensor(full, dtype, shape, (StoredBox(Box.whole(shape), len(files), 0),)))
                files.append(SourceFile(f"{self._directory}/{name}", tensors[-1].bytes, changed_ns, array))
                leaves.append((keys, TensorRef(full, "tensor")))
            elif kind == "scalar":
                leaves.append((keys, self._open_array(name, context).region(Box((), ())).item()))
            elif kind == "string":
                leaves.append((keys, self._text(name)))
            elif kind in _EMPTY:
                leaves.append((keys, _EMPTY[kind]))
            else:
                unmapped.append(UnmappedValue(full, kind))
        return tensors, _tree(leaves, str(self._directory))

    def _open_array(self, name: str, context: Any) -> _OrbaxArray:
        """Open an array without reading its elements. If the metadata says that all chunks are stored, a later read of
        a missing chunk raises DamagedError; otherwise it returns zeros.
        """
        base = {"driver": "file", "path": f"{self._directory.absolute()}/"}
        place = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        if not self._metadata.use_ocdbt:
            place = {**base, "path": f"{base['path']}{name}/"}
        spec = {
            "driver": "zarr3" if self._metadata.use_zarr3 else "zarr", "kvstore": place, "recheck_cached_data": False,
            "fill_missing_data_reads": not self._metadata.store_array_data_equal_to_fill_value,
        }
        try:
            if not is_path_inside(name):
                raise ValueError("the name leads out of the directory, or is not a valid file name")
            store = self._tensorstore.open(spec, open=True, read=True, context=context).result()
            return _OrbaxArray(store, f"{self._directory}/{name}")
        except (ValueError, OSError) as error:
            raise DamagedError(
                f"{self._directory} lacks the array {name!r:.200}, or its format differs from the metadata",
                found=f"{error!s:.300}", next="copy the whole directory again",
            ) from error

    def _text(self, name: str) -> object:
        if self._strings is None:
            try:
                self._strings = json.loads(read_small_file(self._directory, _STRINGS, METADATA_BYTES_MAX))
            except (ValueError, RecursionError) as error:
                raise DamagedError(
                    f"{self._directory / _STRINGS} cannot be read", next="copy the file again"
                ) from error
        if not isinstance(self._strings, dict) or not isinstance(self._strings.get(name), str):
            raise DamagedError(f"{self._directory / _STRINGS} lacks {name!r:.200}", next="copy the file again")
        return self._strings[name]


def _tensorstore() -> ModuleType:
    try:
        import tensorstore
    except ImportError as error:
        raise FrameworkError(
            "Orbax checkpoints are read with tensorstore, which is not installed",
            next="pip install 'flowstone[orbax]', or pip install tensorstore",
        ) from error
    return tensorstore


def _row_bytes(store: Any) -> int:
    """How many bytes one row of chunks has: all chunks that begin at the same index of the first dimension."""
    if not store.shape:
        return 0
    chunk = store.chunk_layout.read_chunk.shape or store.shape
    # the side lengths, rounded up to full chunks
    sides = [-(-side // part) * part for side, part in zip(store.shape[1:], chunk[1:], strict=True)]
    return int(math.prod((chunk[0], *sides)) * store.dtype.numpy_dtype.itemsize)


def _tree(leaves: Sequence[tuple[tuple[_Key, ...], object]], path: str) -> dict[str, object]:
    """Nest values by their keys: numbers are positions in lists, and strings are keys of dicts."""
    root: dict[str, object] = {}
    lists: list[tuple[dict[str, object], str]] = []
    for keys, value in leaves:
        node = root
        for depth, key in enumerate(keys[:-1]):
            if key.key not in node:
                node[key.key] = {}
                if keys[depth + 1].key_type == 1:
                    lists.append((node, key.key))
            inner = node[key.key]
            if not isinstance(inner, dict):
                raise UnsupportedFormatError(
                    f"{path}: {key.key!r:.60} is a value, but also has values below it",
                    next="restore the checkpoint with Orbax, and save it with fs.Checkpointer",
                )
            node = inner
        if not keys or keys[-1].key in node:
            name = ".".join(key.key for key in keys)
            raise DamagedError(
                f"{path} has two values with the name {name!r:.200}, or one without a name",
                next="copy the whole directory again",
            )
        node[keys[-1].key] = value
    for node, name in reversed(lists):  # inner lists are converted first
        inner = node[name]
        assert isinstance(inner, dict), "the loop above made it a dict"
        if inner.keys() == {str(number) for number in range(len(inner))}:
            node[name] = [inner[str(number)] for number in range(len(inner))]
    return root


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple) and value:
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value
