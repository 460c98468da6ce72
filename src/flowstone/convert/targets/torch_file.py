"""A file as torch.save writes it, of a state_dict: laid out, and its pickle written, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from flowstone.convert.layout import Layout, Output, TargetFile
from flowstone.convert.sources.torch_values import STORAGE_DTYPES
from flowstone.convert.targets.pickle_writer import Call, Name, Persistent, write_pickle
from flowstone.convert.targets.torch_archive import Entry, lay_out_archive
from flowstone.table.pieces import Alias
from flowstone.table.stored import row_major

_STORAGES = {name: storage for storage, name in STORAGE_DTYPES.items()}
_NO_HOOKS = Call(Name("collections", "OrderedDict"))
_SERIAL = b"0" * 40  # of nothing: the same bytes each time


def lay_out_torch(outputs: Sequence[Output], aliases: Sequence[Alias], name: str) -> Layout:
    """One file, which torch.load gives back as a dict of tensors. Tied tensors share their storage."""
    rows = {output.name: at for at, output in enumerate(outputs)}
    tensors = {output.name: described(output, at) for at, output in enumerate(outputs)}
    tensors |= {alias.name: described(outputs[rows[alias.target]], rows[alias.target]) for alias in aliases}
    entries = archive_entries(write_pickle(tensors), outputs, range(len(outputs)))
    extents, end = lay_out_archive(entries, 0, 0)
    return Layout(tuple(outputs), (TargetFile(name, end, tuple(extents)),), "crc32")


def archive_entries(pickled: bytes, outputs: Sequence[Output], positions: Sequence[int]) -> list[Entry]:
    """All entries of an archive, those of storages in the order in which they are given."""
    return [
        Entry("archive/data.pkl", pickled), Entry("archive/.format_version", b"1"),
        Entry("archive/.storage_alignment", b"64"), Entry("archive/byteorder", b"little"),
        *(Entry(f"archive/data/{at}", output=at, bytes=outputs[at].bytes) for at in positions),
        Entry("archive/version", b"3\n"), Entry("archive/.data/serialization_id", _SERIAL),
    ]


def size(sides: Sequence[int]) -> Call:
    """A torch.Size."""
    return Call(Name("torch", "Size"), (tuple(sides),))


def described(output: Output, key: int) -> Call:
    """How a dense tensor is rebuilt of the storage of that key."""
    shape, dtype, storage = output.tensor.shape, output.dtype, _STORAGES.get(output.dtype.name)
    elements = output.bytes // dtype.item_bytes
    kind = Name("torch", storage) if storage else Name("torch.storage", "UntypedStorage")
    reference = Persistent(("storage", kind, str(key), "cpu", elements if storage else output.bytes))
    strides = tuple(max(1, stride) for stride in row_major(shape))
    arguments = (reference, 0, shape, strides, False, _NO_HOOKS)
    if storage:
        return Call(Name("torch._utils", "_rebuild_tensor_v2"), arguments)
    return Call(Name("torch._utils", "_rebuild_tensor_v3"), (*arguments, Name("torch", dtype.name)))
