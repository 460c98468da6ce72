"""A directory of torch.distributed.checkpoint as a source: what its .metadata says, and nothing executed to read it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import msgspec

from flowstone.convert.source import METADATA_BYTES_MAX, Source, check_source, in_file_order, is_inner, read_whole
from flowstone.convert.sources.pickled_files import PickledFiles
from flowstone.convert.sources.restricted_unpickler import Global, Known, Record, read_pickle
from flowstone.convert.sources.torch_archive import Place
from flowstone.convert.sources.torch_values import KNOWN, sides
from flowstone.convert.sources.tree import Tree, check_sections
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format.objects import TensorRef
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES, DType
from flowstone.table.stored import SourceTensor, StoredBox

METADATA_NAME = ".metadata"
SHARD = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")  # Megatron's: an object's place among its likes, how many there are
_MODULE = "torch.distributed.checkpoint.metadata"
TENSOR, _BYTES = f"{_MODULE}.TensorStorageMetadata", f"{_MODULE}.BytesStorageMetadata"
_RECORDS = frozenset({
    *(f"{_MODULE}.{name}" for name in (
        "Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata",
        "TensorProperties", "StorageMeta",
    )),
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
})
_METADATA_KNOWN: Known = {name: KNOWN[name] for name in (
    "torch.Size", "torch.serialization._get_layout", "collections.OrderedDict",
)}


class Item(msgspec.Struct, frozen=True):
    """Where an item lies: the file's name, and its place there."""

    file: str
    place: Place


class Metadata(msgspec.Struct, frozen=True):
    """What .metadata says.

    entries  what each name is
    items    where each item lies: by name, and by offset in the tensor (None for what is no tensor)
    paths    the keys that led to each name
    megatron what Megatron-core adds, by name
    """

    entries: Mapping[str, Record]
    items: Mapping[tuple[str, tuple[int, ...] | None], Item]
    paths: Mapping[str, tuple[str | int, ...]]
    megatron: Mapping[object, object]

    @property
    def is_megatrons(self) -> bool:
        """Whether Megatron-core has written it: only that has parts of objects."""
        return bool(self.megatron) or any(SHARD.fullmatch(name) for name in self.entries)


def is_dcp(path: Path) -> bool:
    """Whether a directory has DCP's metadata."""
    return path.is_dir() and (path / METADATA_NAME).is_file()


def read_dcp(path: Path) -> Source:
    """What the directory holds.

    raises  DamagedError            a file is missing or torn, or the metadata contradicts itself
            UnsupportedFormatError  items that extensions have transformed, or types that are not known
    """
    metadata = read_metadata(path)
    if metadata.is_megatrons:
        raise DamagedError(
            f"{path} is of Megatron-core, and has no metadata.json: the save was not finished",
            next="copy it whole, or take an older one",
        )
    if len({tuple(map(str, keys)) for keys in metadata.paths.values()}) != len(metadata.paths):
        raise contradiction(path, "two of its values have one path")
    with closing(PickledFiles(str(path))) as files:
        return _source(path, metadata, files)


def _source(path: Path, metadata: Metadata, files: PickledFiles) -> Source:
    tensors, objects = [], dict[str, object]()
    trees = Tree(files.place, str(path))
    for name, entry in metadata.entries.items():
        keys = metadata.paths[name]
        if entry.kind == TENSOR:
            tensors.append(stored_tensor(path, name, entry, metadata, files))
            put(objects, keys, TensorRef(name, "tensor"), path)
        else:
            item = metadata.items.get((name, None))
            if item is None:
                raise contradiction(path, f"nothing says where {name!r:.80} lies")
            put(objects, keys, trees.section(name, files.read(path / item.file, item.place)), path)
    is_flat = all(len(keys) == 1 for keys in metadata.paths.values()) and not trees.tensors and all(
        entry.kind == TENSOR for entry in metadata.entries.values()
    )
    gone = {one.name for one in trees.unmapped}
    kept = {} if is_flat else {key: _listed(value) for key, value in objects.items() if key not in gone}
    check_sections(kept, str(path))
    return check_source(Source(
        "dcp", str(path), tuple(files.opened), in_file_order((*tensors, *trees.tensors)), tuple(trees.aliases), kept,
        is_flat=is_flat, unmapped=tuple(trees.unmapped),
    ))


def read_metadata(path: Path) -> Metadata:
    """What a directory's .metadata says. Raises DamagedError, UnsupportedFormatError."""
    where = path / METADATA_NAME
    content = read_whole(path, METADATA_NAME, METADATA_BYTES_MAX)
    value = read_pickle(content, _METADATA_KNOWN, _RECORDS, path=str(where))
    if not isinstance(value, Record) or value.kind != f"{_MODULE}.Metadata":
        raise DamagedError(f"{where} is no metadata of torch.distributed.checkpoint", next="check the path")
    try:
        entries = cast("dict[str, Record]", value.field("state_dict_metadata"))
        storage = cast("dict[Record, Record]", value.field("storage_data"))
        planner = value.state.get("planner_data") if isinstance(value.state, dict) else None
        items = dict(_item(index, found) for index, found in storage.items())
        if len(items) != len(storage):
            raise ValueError("an item that lies in two places")
        paths = {name: _keys(name, planner) for name in entries}
        added = value.state.get("mcore_data") if isinstance(value.state, dict) else None
        unknown = [name for name, entry in entries.items() if entry.kind not in (TENSOR, _BYTES)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise contradiction(path, f"a field is missing or of another type: {error!s:.100}") from error
    if unknown:
        raise UnsupportedFormatError(f"{where}: {unknown[0]!r:.80} is of an unknown kind", next="convert it with torch")
    return Metadata(entries, items, paths, added if isinstance(added, dict) else {})


def _keys(name: str, planner: object) -> tuple[str | int, ...]:
    keys = planner.get(name, (name,)) if isinstance(planner, dict) else (name,)
    if not isinstance(keys, tuple) or not keys or not all(isinstance(key, str | int) for key in keys):
        raise ValueError(f"the path of {name!r:.80}")
    return keys


def _item(index: Record, found: Record) -> tuple[tuple[str, tuple[int, ...] | None], Item]:
    offset = index.state.get("offset") if isinstance(index.state, dict) else None
    file, begin, length = (found.field(name) for name in ("relative_path", "offset", "length"))
    transforms = found.state.get("transform_descriptors") if isinstance(found.state, dict) else None
    name = index.field("fqn")
    if transforms:
        raise UnsupportedFormatError(
            f"{name!r:.80} is stored by the extensions {transforms!r:.80}", next="save it with dcp.save without them"
        )
    is_plain = is_inner(file) and isinstance(name, str)
    if not is_plain or not all(isinstance(n, int) and n >= 0 for n in (begin, length)):
        raise ValueError(f"the place of {name!r:.80}")
    place = Place(cast("int", begin), cast("int", length))
    return (cast("str", name), None if offset is None else sides(offset)), Item(cast("str", file), place)


def stored_tensor(path: Path, name: str, entry: Record, metadata: Metadata, files: PickledFiles) -> SourceTensor:
    """A tensor, and where each of its chunks lies. Raises DamagedError, UnsupportedFormatError."""
    try:
        shape, dtype = sides(entry.field("size")), _dtype(entry.field("properties"), name)
        chunks = [
            Box(sides(chunk.field("offsets")), sides(chunk.field("sizes")))
            for chunk in cast("list[Record]", entry.field("chunks"))
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise contradiction(path, f"{name!r:.80}: {error!s:.100}") from error
    boxes = []
    for box in chunks:
        item = metadata.items.get((name, box.offset))
        if item is None:
            raise contradiction(path, f"nothing says where {name!r:.80} {box} lies")
        file, begin, view = files.tensor(path / item.file, item.place)
        if (view.shape, view.dtype) != (box.shape, dtype):
            raise contradiction(
                path, f"{name!r:.80} {box} is {dtype.name} {box.shape} in the metadata, "
                f"{view.dtype.name} {view.shape} in {item.file}",
            )
        boxes.append(StoredBox(box, file, begin, view.strides))
    return SourceTensor(name, dtype, shape, tuple(boxes))


def _dtype(properties: object, name: str) -> DType:
    """Of the properties of a tensor, which pickle themselves as a tuple, and once as fields."""
    state = cast("Record", properties).state
    found = state[0] if isinstance(state, tuple) else cast("dict[str, object]", state)["dtype"]
    kind = found.name.removeprefix("torch.") if isinstance(found, Global) else ""
    if kind not in DTYPES:
        raise UnsupportedFormatError(f"{name!r:.80} has the unknown type {kind!r:.40}", next="convert it with torch")
    return DTYPES[kind]


def put(objects: dict[str, object], keys: Sequence[str | int], value: object, path: Path) -> None:
    """Put a value where its keys lead: the tree that DCP has flattened. Raises DamagedError if something is there."""
    at: dict[object, object] = cast("dict[object, object]", objects)
    for key in keys[:-1]:
        inner = at.setdefault(key, {})
        if not isinstance(inner, dict):
            raise contradiction(path, f"{'.'.join(map(str, keys))!r:.80} lies inside of a value")
        at = inner
    if keys[-1] in at:
        raise contradiction(path, f"{'.'.join(map(str, keys))!r:.80} is there twice")
    at[keys[-1]] = value


def _listed(value: object) -> object:
    """The same with lists where the keys are 0, 1, 2, ..."""
    if not isinstance(value, dict):
        return value
    found = {key: _listed(inner) for key, inner in value.items()}
    is_list = found and all(type(key) is int for key in found) and sorted(found) == list(range(len(found)))
    return [found[at] for at in range(len(found))] if is_list else found


def contradiction(path: Path, what: str) -> DamagedError:
    return DamagedError(
        f"{path / METADATA_NAME} contradicts itself, or its files: {what}", next="copy the whole directory again"
    )
