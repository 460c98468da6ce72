"""A checkpoint of Orbax as a source: the tree that its metadata describes, of arrays that tensorstore reads.

Orbax stores arrays in zarr, compressed, most often inside of one database (OCDBT). What decodes both is the library
that Orbax itself has for it; nothing else here needs it.
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
    Source,
    SourceFile,
    Unmapped,
    allocated_bytes,
    check_expansion,
    check_source,
    is_inner,
    open_plain,
    read_whole,
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
_CACHE_BYTES = 64 * MIB  # beside one row of chunks: of those that two threads read at once
_READ_WHOLE = frozenset({_DATABASE, ".zarray", ".zattrs", ".zgroup", "zarr.json"})
_READ_WHOLE_BYTES_MAX = 64 * MIB
_ENCODED_MAX = 2  # a chunk that does not compress becomes longer, by little
_EXPANSION_MAX = 1024  # what is equal throughout, such as moments before the first step, compresses so well


class _Key(msgspec.Struct, frozen=True):
    key: str
    key_type: int


class _Value(msgspec.Struct, frozen=True):
    value_type: str


class _Entry(msgspec.Struct, frozen=True):
    key_metadata: tuple[_Key, ...]
    value_metadata: _Value


class _Metadata(msgspec.Struct, frozen=True):
    """`_METADATA`, as far as it is needed. Missing chunks are zero, unless the last field says that none is missing."""

    tree_metadata: dict[str, _Entry]
    use_ocdbt: bool = True
    use_zarr3: bool = False
    store_array_data_equal_to_fill_value: bool = False


class _Array:
    """The elements of an array as a file has them that is dense and row-major. Any thread."""

    def __init__(self, store: Any, path: str) -> None:
        self.store, self._path = store, path

    def read(self, begin: int, into: NDArray[np.uint8]) -> None:
        """The bytes from `begin` on. Decodes the chunks that they are in, unless the cache has these."""
        item = self.store.dtype.numpy_dtype.itemsize
        first, last = begin // item, -(-(begin + len(into)) // item)
        boxes = linear_boxes(self.store.shape, first, last)
        parts = [self.region(box).reshape(-1).view(np.uint8) for box in boxes]
        content = parts[0] if len(parts) == 1 else np.concatenate(parts)
        into[...] = content[begin - first * item :][: len(into)]

    def region(self, box: Box) -> NDArray[Any]:
        """The elements of a box, dense. Raises DamagedError."""
        inside = tuple(slice(low, low + side) for low, side in zip(box.offset, box.shape, strict=True))
        try:
            return np.ascontiguousarray(self.store[inside].read(order="C").result())
        except (ValueError, OSError) as error:
            raise DamagedError(
                f"{self._path} cannot be read", found=f"{error!s:.300}", next="copy the whole directory again"
            ) from error


def is_orbax(path: Path) -> bool:
    """Whether a directory is an item that Orbax has saved, or a step that consists of some, or has such steps."""
    return path.is_dir() and bool(_items(_step(path)))


def read_orbax(path: Path) -> Source:
    """What the checkpoint holds. The keys at the top of a tree are sections; of several items, their names are.

    path  an item, a step of a CheckpointManager, or its directory: then the newest step that was finished

    raises  FrameworkError          tensorstore is not installed
            DamagedError            metadata or arrays that are missing, or cannot be read
            UnsupportedFormatError  a tree that cannot be a state of ours
    """
    items = _items(_step(path))
    is_alone = len(items) == 1
    stored = [_stored_bytes(item) for item in items]
    held, longest = sum(total for total, _ in stored), max(longest for _, longest in stored)
    parts = [_Item(item, "" if is_alone else f"{item.name}.") for item in items]
    row_bytes = max(part.row_bytes() for part in parts)
    check_expansion(str(path), {"one row of chunks": row_bytes}, held, _EXPANSION_MAX)
    if longest > MIB + _ENCODED_MAX * row_bytes:
        raise DamagedError(
            f"{path} has a chunk that is too long", expected=f"at most {MIB + _ENCODED_MAX * row_bytes} bytes",
            found=f"{longest} bytes", next="copy it again",
        )
    cache_bytes = _CACHE_BYTES + row_bytes
    tensors: list[SourceTensor] = []
    objects: dict[str, object] = {}
    files: list[SourceFile] = []
    unmapped = [Unmapped(name, "an item without arrays") for name in _others(_step(path))]
    for item, part in zip(items, parts, strict=True):
        found, tree = part.read(cache_bytes, files, unmapped)
        tensors += found
        objects |= tree if is_alone else {item.name: tree}
    check_sections(objects, str(path))
    has_arrays_alone = all(isinstance(leaf, TensorRef) for leaf in _leaves(objects))
    is_flat = is_alone and has_arrays_alone and any(isinstance(value, TensorRef) for value in objects.values())
    check_expansion(str(path), {tensor.name: tensor.bytes for tensor in tensors}, held, _EXPANSION_MAX)
    return check_source(Source(
        "orbax", str(path), tuple(files), tuple(tensors), objects={} if is_flat else objects, is_flat=is_flat,
        unmapped=tuple(unmapped),
    ))


def _stored_bytes(item: Path) -> tuple[int, int]:
    """The bytes that the files of an item take on the disk, and the length of its longest chunk.

    raises  DamagedError, StorageError  for a file that is far too long, at which tensorstore would end the process, or
                                        for a pipe or device, on which it would wait
    """
    total = longest = 0
    is_database = (item / _DATABASE).is_file()
    for place, directories, names in os.walk(item):
        for name in (*names, *(one for one in directories if os.path.islink(os.path.join(place, one)))):
            with translated(item, "read", name), open_plain(Path(place, name)) as opened:
                length = os.fstat(opened.fileno()).st_size
                total += allocated_bytes(opened)
            if name in _READ_WHOLE and length > _READ_WHOLE_BYTES_MAX:
                raise DamagedError(
                    f"{os.path.join(place, name)} is too long", expected=f"at most {_READ_WHOLE_BYTES_MAX} bytes",
                    found=f"{length} bytes", next="copy the whole directory again",
                )
            if place != str(item) and not is_database:
                longest = max(longest, length)
    return total, longest


def _step(path: Path) -> Path:
    """The newest step that is in a directory, or the path itself where there is none."""
    with translated(path, "list", "."):
        found = [
            (int(match[1]), name) for name in os.listdir(path)
            if (match := _STEP.fullmatch(name)) and (path / name / _STEP_METADATA).is_file()
        ]
    return path / max(found)[1] if found and not (path / _METADATA).is_file() else path


def _items(path: Path) -> list[Path]:
    """The directories of a step that have arrays; itself, if it has."""
    if _is_item(path):
        return [path]
    with translated(path, "list", "."):
        return sorted(path / name for name in os.listdir(path) if _is_item(path / name) and _UNFINISHED not in name)


def _others(path: Path) -> list[str]:
    """The items of a step that hold no arrays: what Orbax has saved as JSON, or by a handler of the job's own."""
    if _is_item(path):
        return []
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not _is_item(Path(entry.path)))


def _is_item(path: Path) -> bool:
    if not (path / _METADATA).is_file():
        return False
    with translated(path, "read", _METADATA), open_plain(path / _METADATA) as opened:
        return b'"tree_metadata"' in opened.read(1 << 16)


class _Item:
    """One tree: opens its arrays, and takes its other values. `prefix`: of all its names."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix
        self._tensorstore = _tensorstore()
        content = read_whole(directory, _METADATA, METADATA_BYTES_MAX)
        try:
            self._metadata = msgspec.json.decode(content, type=_Metadata)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedError(
                f"{directory / _METADATA} is not as Orbax writes it", found=f"{error!s:.200}", next="copy it again"
            ) from error
        if self._metadata.use_ocdbt and not (directory / _DATABASE).is_file():
            raise DamagedError(f"{directory} lacks {_DATABASE}", next="copy the whole directory again")
        self._strings: object = None

    def row_bytes(self) -> int:
        """Of the chunks that a run of elements touches, at most: those of one row of some array."""
        names = [name for _, name, entry in self._entries() if entry.value_metadata.value_type in _ARRAYS]
        return max((_row_bytes(self._opened(name, None).store) for name in names), default=0)

    def _entries(self) -> Iterator[tuple[tuple[_Key, ...], str, _Entry]]:
        for entry in self._metadata.tree_metadata.values():
            yield entry.key_metadata, ".".join(key.key for key in entry.key_metadata), entry

    def read(
        self, cache_bytes: int, files: list[SourceFile], unmapped: list[Unmapped]
    ) -> tuple[list[SourceTensor], dict[str, object]]:
        """Its tensors, and its tree with references to them. Adds to files, and to what has no place."""
        # One thread decodes: malloc keeps for each thread what it has freed, up to the cache's size.
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
                array = self._opened(name, context)
                kept = array.store.dtype
                dtype = DTYPES.get(kept.name)
                if dtype is None or dtype.item_bytes != kept.numpy_dtype.itemsize:
                    unmapped.append(Unmapped(full, kept.name))
                    continue
                shape = tuple(array.store.shape)
                tensors.append(SourceTensor(full, dtype, shape, (StoredBox(Box.whole(shape), len(files), 0),)))
                files.append(SourceFile(f"{self._directory}/{name}", tensors[-1].bytes, changed_ns, array))
                leaves.append((keys, TensorRef(full, "tensor")))
            elif kind == "scalar":
                leaves.append((keys, self._opened(name, context).region(Box((), ())).item()))
            elif kind == "string":
                leaves.append((keys, self._text(name)))
            elif kind in _EMPTY:
                leaves.append((keys, _EMPTY[kind]))
            else:
                unmapped.append(Unmapped(full, kind))
        return tensors, _tree(leaves, str(self._directory))

    def _opened(self, name: str, context: Any) -> _Array:
        """An array, without a read of its elements. A chunk that is missing is an error where none may be."""
        base = {"driver": "file", "path": f"{self._directory.absolute()}/"}
        place = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        if not self._metadata.use_ocdbt:
            place = {**base, "path": f"{base['path']}{name}/"}
        spec = {
            "driver": "zarr3" if self._metadata.use_zarr3 else "zarr", "kvstore": place, "recheck_cached_data": False,
            "fill_missing_data_reads": not self._metadata.store_array_data_equal_to_fill_value,
        }
        try:
            if not is_inner(name):
                raise ValueError("the name leads out of the directory, or cannot name a file")
            store = self._tensorstore.open(spec, open=True, read=True, context=context).result()
            return _Array(store, f"{self._directory}/{name}")
        except (ValueError, OSError) as error:
            raise DamagedError(
                f"{self._directory} lacks the array {name!r:.200}, or has it in another format than it says",
                found=f"{error!s:.300}", next="copy the whole directory again",
            ) from error

    def _text(self, name: str) -> object:
        if self._strings is None:
            try:
                self._strings = json.loads(read_whole(self._directory, _STRINGS, METADATA_BYTES_MAX))
            except (ValueError, RecursionError) as error:
                raise DamagedError(f"{self._directory / _STRINGS} cannot be read", next="copy it again") from error
        if not isinstance(self._strings, dict) or not isinstance(self._strings.get(name), str):
            raise DamagedError(f"{self._directory / _STRINGS} lacks {name!r:.200}", next="copy it again")
        return self._strings[name]


def _tensorstore() -> ModuleType:
    try:
        import tensorstore
    except ImportError as error:
        raise FrameworkError(
            "checkpoints of Orbax are read by tensorstore, which is not installed",
            next="pip install 'flowstone[orbax]', or pip install tensorstore",
        ) from error
    return tensorstore


def _row_bytes(store: Any) -> int:
    """Of one row of chunks: all that begin at the same index of the first dimension."""
    if not store.shape:
        return 0
    chunk = store.chunk_layout.read_chunk.shape or store.shape
    sides = [-(-side // part) * part for side, part in zip(store.shape[1:], chunk[1:], strict=True)]  # of whole chunks
    return int(math.prod((chunk[0], *sides)) * store.dtype.numpy_dtype.itemsize)


def _tree(leaves: Sequence[tuple[tuple[_Key, ...], object]], path: str) -> dict[str, object]:
    """The values as they were nested. Keys of a list are its positions, those of anything else are text."""
    root: dict[str, object] = {}
    lists: list[tuple[dict[str, object], str]] = []
    for keys, value in leaves:
        node = root
        for at, key in enumerate(keys[:-1]):
            if key.key not in node:
                node[key.key] = {}
                if keys[at + 1].key_type == 1:
                    lists.append((node, key.key))
            inner = node[key.key]
            if not isinstance(inner, dict):
                raise UnsupportedFormatError(
                    f"{path}: {key.key!r:.60} is a value, and has values below it", next="restore it with Orbax"
                )
            node = inner
        if not keys or keys[-1].key in node:
            name = ".".join(key.key for key in keys)
            raise DamagedError(
                f"{path} has two values under the name {name!r:.200}, or one without a name", next="copy it again"
            )
        node[keys[-1].key] = value
    for node, name in reversed(lists):  # those inside of others first
        inner = node[name]
        assert isinstance(inner, dict), "it was made one"
        if inner.keys() == {str(at) for at in range(len(inner))}:
            node[name] = [inner[str(at)] for at in range(len(inner))]
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
