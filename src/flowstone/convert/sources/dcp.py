"""A directory of torch.distributed.checkpoint (DCP) as a source. Its file .metadata says where each value is. No pickle
is executed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import msgspec

from flowstone.convert.source import (
    METADATA_BYTES_MAX,
    SourceCheckpoint,
    check_source,
    in_file_order,
    is_path_inside,
    read_small_file,
)
from flowstone.convert.sources.pickled_files import PickledFiles
from flowstone.convert.sources.restricted_unpickler import Global, KnownFunctions, PickledInstance, read_pickle
from flowstone.convert.sources.torch_archive import ArchiveRange
from flowstone.convert.sources.torch_values import KNOWN, size_of
from flowstone.convert.sources.tree import PickleTree, check_sections
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format.objects import TensorRef
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES, DType
from flowstone.table.stored import SourceTensor, StoredBox

METADATA_NAME = ".metadata"
# Megatron-core splits objects into parts: the numbers are the part's position and the number of parts
OBJECT_SHARD = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
_MODULE = "torch.distributed.checkpoint.metadata"
TENSOR_KIND, _BYTES = f"{_MODULE}.TensorStorageMetadata", f"{_MODULE}.BytesStorageMetadata"
_RECORDS = frozenset({
    *(f"{_MODULE}.{name}" for name in (
        "Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata",
        "TensorProperties", "StorageMeta",
    )),
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
})
_METADATA_KNOWN: KnownFunctions = {name: KNOWN[name] for name in (
    "torch.Size", "torch.serialization._get_layout", "collections.OrderedDict",
)}


class StoredItem(msgspec.Struct, frozen=True):
    """Where an item is stored: the name of the file, and the range in it."""

    file: str
    place: ArchiveRange


class DcpMetadata(msgspec.Struct, frozen=True):
    """The content of .metadata.

    entries  the metadata of each name
    items    the location of each item: by name, and by offset in the tensor (None for other values)
    paths    for each name, the keys that led to its value before DCP flattened the state
    megatron additional metadata of Megatron-core, by name
    """

    entries: Mapping[str, PickledInstance]
    items: Mapping[tuple[str, tuple[int, ...] | None], StoredItem]
    paths: Mapping[str, tuple[str | int, ...]]
    megatron: Mapping[object, object]

    @property
    def is_megatron(self) -> bool:
        """Whether Megatron-core wrote the directory: only Megatron-core adds its own metadata, or splits objects into
        parts.
        """
        return bool(self.megatron) or any(OBJECT_SHARD.fullmatch(name) for name in self.entries)


def is_dcp(path: Path) -> bool:
    """Whether a directory has DCP's file .metadata."""
    return path.is_dir() and (path / METADATA_NAME).is_file()


def read_dcp(path: Path) -> SourceCheckpoint:
    """Read the directory.

    raises  DamagedError            a file is missing or incomplete, or the metadata contradicts itself
            UnsupportedFormatError  there are items that DCP's extensions have transformed, or unknown types
    """
    metadata = read_metadata(path)
    if metadata.is_megatron:
        raise DamagedError(
            f"{path} was written by Megatron-core, but has no metadata.json: the save was not finished",
            next="copy the whole directory again, or use an older checkpoint",
        )
    if len({tuple(map(str, keys)) for keys in metadata.paths.values()}) != len(metadata.paths):
        raise contradiction(path, "two of the values in it have the same path")
    with closing(PickledFiles(str(path))) as files:
        return _source(path, metadata, files)


def _source(path: Path, metadata: DcpMetadata, files: PickledFiles) -> SourceCheckpoint:
    tensors, objects = [], dict[str, object]()
    trees = PickleTree(files.storage_range, str(path))
    for name, entry in metadata.entries.items():
        keys = metadata.paths[name]
        if entry.kind == TENSOR_KIND:
            tensors.append(stored_tensor(path, name, entry, metadata, files))
            put_at_keys(objects, keys, TensorRef(name, "tensor"), path)
        else:
            item = metadata.items.get((name, None))
            if item is None:
                raise contradiction(path, f"it does not list the location of {name!r:.80}")
            put_at_keys(objects, keys, trees.section(name, files.read(path / item.file, item.place)), path)
    is_flat = all(len(keys) == 1 for keys in metadata.paths.values()) and not trees.tensors and all(
        entry.kind == TENSOR_KIND for entry in metadata.entries.values()
    )
    gone = {value.name for value in trees.unmapped}
    shown = {} if is_flat else {key: _with_lists(value) for key, value in objects.items() if key not in gone}
    check_sections(shown, str(path))
    return check_source(SourceCheckpoint(
        "dcp", str(path), tuple(files.files), in_file_order((*tensors, *trees.tensors)), tuple(trees.aliases), shown,
        is_flat=is_flat, unmapped=tuple(trees.unmapped),
    ))


def read_metadata(path: Path) -> DcpMetadata:
    """Read a directory's .metadata. Raises DamagedError, UnsupportedFormatError."""
    where = path / METADATA_NAME
    content = read_small_file(path, METADATA_NAME, METADATA_BYTES_MAX)
    value = read_pickle(content, _METADATA_KNOWN, _RECORDS, path=str(where))
    if not isinstance(value, PickledInstance) or value.kind != f"{_MODULE}.Metadata":
        raise DamagedError(f"{where} is not metadata of torch.distributed.checkpoint", next="check the path")
    try:
        entries = cast("dict[str, PickledInstance]", value.field("state_dict_metadata"))
        storage = cast("dict[PickledInstance, PickledInstance]", value.field("storage_data"))
        planner = value.state.get("planner_data") if isinstance(value.state, dict) else None
        items = dict(_item(index, entry) for index, entry in storage.items())
        if len(items) != len(storage):
            raise ValueError("a tensor or object is listed with two locations")
        paths = {name: _keys(name, planner) for name in entries}
        added = value.state.get("mcore_data") if isinstance(value.state, dict) else None
        unknown = [name for name, entry in entries.items() if entry.kind not in (TENSOR_KIND, _BYTES)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise contradiction(path, f"a field is missing or not valid: {error!s:.100}") from error
    if unknown:
        raise UnsupportedFormatError(
            f"{where}: {unknown[0]!r:.80} is neither a tensor nor an object",
            next="load the checkpoint with torch, and save it with fs.Checkpointer",
        )
    return DcpMetadata(entries, items, paths, added if isinstance(added, dict) else {})


def _keys(name: str, planner: object) -> tuple[str | int, ...]:
    keys = planner.get(name, (name,)) if isinstance(planner, dict) else (name,)
    if not isinstance(keys, tuple) or not keys or not all(isinstance(key, str | int) for key in keys):
        raise ValueError(f"the path of {name!r:.80} is not a tuple of keys")
    return keys


def _item(index: PickledInstance, entry: PickledInstance) -> tuple[tuple[str, tuple[int, ...] | None], StoredItem]:
    offset = index.state.get("offset") if isinstance(index.state, dict) else None
    file, begin, length = (entry.field(name) for name in ("relative_path", "offset", "length"))
    transforms = entry.state.get("transform_descriptors") if isinstance(entry.state, dict) else None
    name = index.field("fqn")
    if transforms:
        raise UnsupportedFormatError(
            f"{name!r:.80} was stored with the extensions {transforms!r:.80}",
            next="save the checkpoint again with dcp.save, without extensions",
        )
    is_plain = is_path_inside(file) and isinstance(name, str)
    if not is_plain or not all(isinstance(n, int) and n >= 0 for n in (begin, length)):
        raise ValueError(f"the location of {name!r:.80} is not a file name, an offset and a length")
    place = ArchiveRange(cast("int", begin), cast("int", length))
    return (cast("str", name), None if offset is None else size_of(offset)), StoredItem(cast("str", file), place)


def stored_tensor(
    path: Path, name: str, entry: PickledInstance, metadata: DcpMetadata, files: PickledFiles
) -> SourceTensor:
    """The tensor `name`, with the location of each of its chunks (the parts that DCP stores). Raises DamagedError,
    UnsupportedFormatError.
    """
    try:
        shape, dtype = size_of(entry.field("size")), _dtype(entry.field("properties"), name)
        chunks = [
            Box(size_of(chunk.field("offsets")), size_of(chunk.field("sizes")))
            for chunk in cast("list[PickledInstance]", entry.field("chunks"))
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise contradiction(path, f"{name!r:.80}: {error!s:.100}") from error
    boxes = []
    for box in chunks:
        item = metadata.items.get((name, box.offset))
        if item is None:
            raise contradiction(path, f"it does not list the location of {name!r:.80} {box}")
        file, begin, view = files.tensor(path / item.file, item.place)
        if (view.shape, view.dtype) != (box.shape, dtype):
            raise contradiction(
                path, f"{name!r:.80} {box} is {dtype.name} {box.shape} in the metadata, "
                f"{view.dtype.name} {view.shape} in {item.file}",
            )
        boxes.append(StoredBox(box, file, begin, view.strides))
    return SourceTensor(name, dtype, shape, tuple(boxes))


def _dtype(properties: object, name: str) -> DType:
    """The dtype in a tensor's stored properties, which are a pickled tuple, or fields in older versions."""
    state = cast("PickledInstance", properties).state
    dtype = state[0] if isinstance(state, tuple) else cast("dict[str, object]", state)["dtype"]
    kind = dtype.name.removeprefix("torch.") if isinstance(dtype, Global) else ""
    if kind not in DTYPES:
        raise UnsupportedFormatError(
            f"{name!r:.80} has the unknown dtype {kind!r:.40}",
            next="load the checkpoint with torch, and save it with fs.Checkpointer",
        )
    return DTYPES[kind]


def put_at_keys(objects: dict[str, object], keys: Sequence[str | int], value: object, path: Path) -> None:
    """DCP has flattened nested dicts. Put a value back at its keys in `objects`. Raises DamagedError if a value is
    there already.
    """
    node: dict[object, object] = cast("dict[object, object]", objects)
    for key in keys[:-1]:
        inner = node.setdefault(key, {})
        if not isinstance(inner, dict):
            raise contradiction(path, f"{'.'.join(map(str, keys))!r:.80} is below a value that is not a dict")
        node = inner
    if keys[-1] in node:
        raise contradiction(path, f"it has {'.'.join(map(str, keys))!r:.80} twice")
    node[keys[-1]] = value


def _with_lists(value: object) -> object:
    """The same value, in which dicts with the keys 0, 1, 2, ... are replaced by lists."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(inner) for key, inner in value.items()}
    is_list = items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items)))
    return [items[number] for number in range(len(items))] if is_list else items


def contradiction(path: Path, reason: str) -> DamagedError:
    return DamagedError(
        f"{path / METADATA_NAME} contradicts itself, or the files beside it: {reason}",
        next="copy the whole directory again",
    )
