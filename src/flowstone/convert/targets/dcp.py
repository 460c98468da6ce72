"""A directory as torch.distributed.checkpoint writes it: archives, one for each tensor, and .metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowstone.convert.layout import Extent, Layout, Output, TargetFile
from flowstone.convert.sources.dcp import METADATA_NAME
from flowstone.convert.targets.pickle_writer import Call, Instance, Name, write_pickle
from flowstone.convert.targets.torch_archive import lay_out_archive
from flowstone.convert.targets.torch_file import archive_entries, described, size
from flowstone.table.pieces import Alias

_METADATA = "torch.distributed.checkpoint.metadata"
_ALIGNMENT = 64  # of each archive, so that storages lie as aligned in the file as in it


def lay_out_dcp(
    outputs: Sequence[Output], aliases: Sequence[Alias], shard_bytes: int
) -> tuple[Layout, Mapping[str, bytes]]:
    """The files, and the metadata. A file has at most `shard_bytes`, or one tensor. Tied tensors name one item."""
    files: list[TargetFile] = []
    extents: list[Extent] = []
    places: list[tuple[str, int, int]] = []
    at = checks = 0
    for position, output in enumerate(outputs):
        if extents and at + output.bytes > shard_bytes:
            files.append(TargetFile(_name(len(files)), at, tuple(extents)))
            extents, at = [], 0
        entries = archive_entries(write_pickle(described(output, position)), outputs, [position])
        found, end = lay_out_archive(entries, at, checks)
        checks += bool(output.bytes)
        extents += found
        places.append((_name(len(files)), at, end - at))
        at = -(-end // _ALIGNMENT) * _ALIGNMENT
    files.append(TargetFile(_name(len(files)), at, tuple(extents)))
    names = {output.name: row for row, output in enumerate(outputs)}
    names |= {alias.name: names[alias.target] for alias in aliases}
    return Layout(tuple(outputs), tuple(files), "crc32"), {METADATA_NAME: _metadata(names, outputs, places)}


def _name(number: int) -> str:
    return f"__0_{number}.distcp"


def _metadata(
    names: Mapping[str, int], outputs: Sequence[Output], places: Sequence[tuple[str, int, int]]
) -> bytes:
    entries: dict[object, object] = {}
    paths: dict[object, object] = {}
    items: dict[object, object] = {}
    for name, row in names.items():
        tensor, dtype = outputs[row].tensor, outputs[row].dtype
        origin = size((0,) * len(tensor.shape))
        chunk = Instance(Name(_METADATA, "ChunkStorageMetadata"), {"offsets": origin, "sizes": size(tensor.shape)})
        entries[name] = Instance(Name(_METADATA, "TensorStorageMetadata"), {
            "properties": _properties(dtype.name), "size": size(tensor.shape), "chunks": [chunk],
        })
        paths[name] = (name,)
        file, begin, length = places[row]
        index = Instance(Name(_METADATA, "MetadataIndex"), {"fqn": name, "offset": origin, "index": 0})
        items[index] = Instance(
            Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            {"relative_path": file, "offset": begin, "length": length},
        )
    return write_pickle(Instance(Name(_METADATA, "Metadata"), {
        "state_dict_metadata": entries, "planner_data": paths, "storage_data": items,
    }))


def _properties(dtype: str) -> Instance:
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    state = (Name("torch", dtype), layout, False, contiguous, False)
    return Instance(Name(_METADATA, "TensorProperties"), state)
