"""A directory of torch.distributed.checkpoint (DCP) as a target: one archive for each tensor, and .metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowstone.convert.layout import Extent, Output, TargetFile, TargetLayout
from flowstone.convert.sources.dcp import METADATA_NAME
from flowstone.convert.targets.pickle_writer import Instance, Name, PickledCall, write_pickle
from flowstone.convert.targets.torch_archive import lay_out_archive
from flowstone.convert.targets.torch_file import archive_entries, size_call, tensor_call
from flowstone.table.pieces import Alias

_METADATA = "torch.distributed.checkpoint.metadata"
# each archive begins at a multiple of this, so that storages have the same alignment in the file as in the archive
_ALIGNMENT = 64


def lay_out_dcp(
    outputs: Sequence[Output], aliases: Sequence[Alias], shard_bytes: int
) -> tuple[TargetLayout, Mapping[str, bytes]]:
    """The layout of the files, and the content of .metadata. A file has at most `shard_bytes`, unless it has a single
    tensor. Tied tensors are stored once.
    """
    files: list[TargetFile] = []
    extents: list[Extent] = []
    places: list[tuple[str, int, int]] = []
    offset = checks = 0
    for position, output in enumerate(outputs):
        if extents and offset + output.bytes > shard_bytes:
            files.append(TargetFile(_name(len(files)), offset, tuple(extents)))
            extents, offset = [], 0
        entries = archive_entries(write_pickle(tensor_call(output, position)), outputs, [position])
        archive_extents, end = lay_out_archive(entries, offset, checks)
        checks += bool(output.bytes)
        extents += archive_extents
        places.append((_name(len(files)), offset, end - offset))
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
    files.append(TargetFile(_name(len(files)), offset, tuple(extents)))
    names = {output.name: row for row, output in enumerate(outputs)}
    names |= {alias.name: names[alias.target] for alias in aliases}
    return TargetLayout(tuple(outputs), tuple(files), "crc32"), {METADATA_NAME: _metadata(names, outputs, places)}


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
        origin = size_call((0,) * len(tensor.shape))
        chunk = Instance(Name(_METADATA, "ChunkStorageMetadata"), {"offsets": origin, "sizes": size_call(tensor.shape)})
        entries[name] = Instance(Name(_METADATA, "TensorStorageMetadata"), {
            "properties": _properties(dtype.name), "size": size_call(tensor.shape), "chunks": [chunk],
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
    layout = PickledCall(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = PickledCall(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    state = (Name("torch", dtype), layout, False, contiguous, False)
    return Instance(Name(_METADATA, "TensorProperties"), state)
