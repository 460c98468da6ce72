"""A torch.save file with a state_dict as a target. It is written without torch."""

from __future__ import annotations

from collections.abc import Sequence

from flowstone.convert.layout import Output, TargetFile, TargetLayout
from flowstone.convert.sources.torch_values import STORAGE_DTYPES
from flowstone.convert.targets.pickle_writer import Name, Persistent, PickledCall, write_pickle
from flowstone.convert.targets.torch_archive import ArchiveEntry, lay_out_archive
from flowstone.table.pieces import Alias
from flowstone.table.stored import row_major

_STORAGES = {name: storage for storage, name in STORAGE_DTYPES.items()}
_NO_HOOKS = PickledCall(Name("collections", "OrderedDict"))
_SERIAL = b"0" * 40  # always the same, so that the bytes are the same each time


def lay_out_torch(outputs: Sequence[Output], aliases: Sequence[Alias], name: str) -> TargetLayout:
    """The layout of one file, which torch.load reads as a dict of tensors. Tied tensors share their storage."""
    rows = {output.name: position for position, output in enumerate(outputs)}
    tensors = {output.name: tensor_call(output, position) for position, output in enumerate(outputs)}
    tensors |= {alias.name: tensor_call(outputs[rows[alias.target]], rows[alias.target]) for alias in aliases}
    entries = archive_entries(write_pickle(tensors), outputs, range(len(outputs)))
    extents, end = lay_out_archive(entries, 0, 0)
    return TargetLayout(tuple(outputs), (TargetFile(name, end, tuple(extents)),), "crc32")


def archive_entries(pickled: bytes, outputs: Sequence[Output], positions: Sequence[int]) -> list[ArchiveEntry]:
    """All entries of an archive. `positions`: the positions of the outputs that are its storages, in order."""
    return [
        ArchiveEntry("archive/data.pkl", pickled), ArchiveEntry("archive/.format_version", b"1"),
        ArchiveEntry("archive/.storage_alignment", b"64"), ArchiveEntry("archive/byteorder", b"little"),
        *(
            ArchiveEntry(f"archive/data/{position}", output=position, bytes=outputs[position].bytes)
            for position in positions
        ),
        ArchiveEntry("archive/version", b"3\n"), ArchiveEntry("archive/.data/serialization_id", _SERIAL),
    ]


def size_call(sides: Sequence[int]) -> PickledCall:
    """The call that makes a torch.Size, for a pickle."""
    return PickledCall(Name("torch", "Size"), (tuple(sides),))


def tensor_call(output: Output, key: int) -> PickledCall:
    """The call that rebuilds a dense tensor from the storage with this key, for a pickle."""
    shape, dtype, storage = output.tensor.shape, output.dtype, _STORAGES.get(output.dtype.name)
    elements = output.bytes // dtype.item_bytes
    kind = Name("torch", storage) if storage else Name("torch.storage", "UntypedStorage")
    reference = Persistent(("storage", kind, str(key), "cpu", elements if storage else output.bytes))
    strides = tuple(max(1, stride) for stride in row_major(shape))
    arguments = (reference, 0, shape, strides, False, _NO_HOOKS)
    if storage:
        return PickledCall(Name("torch._utils", "_rebuild_tensor_v2"), arguments)
    return PickledCall(Name("torch._utils", "_rebuild_tensor_v3"), (*arguments, Name("torch", dtype.name)))
