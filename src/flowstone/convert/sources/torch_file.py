"""A torch.save file as a source. It is read without torch, and its pickle is not executed."""

from __future__ import annotations

from pathlib import Path

from flowstone.convert.source import SourceCheckpoint, open_plain, source_file
from flowstone.convert.sources.restricted_unpickler import read_pickle
from flowstone.convert.sources.torch_archive import ArchiveRange, read_archive
from flowstone.convert.sources.torch_values import KNOWN, StorageRef, TensorView, storage_of
from flowstone.convert.sources.tree import PickleTree, check_sections
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.store.os_errors import translated

_STARTS = (b"PK\x03\x04", b"\x80")
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


def is_torch_file(path: Path) -> bool:
    """Whether a file begins like a file of torch.save, in the current or the old format."""
    if not path.is_file():
        return False
    with translated(path.parent, "read", path.name), open_plain(path) as opened:
        return opened.read(4).startswith(_STARTS) or path.suffix in _SUFFIXES


def read_torch_file(path: Path) -> SourceCheckpoint:
    """Read the file. A state_dict becomes the tensors of one module. In any other dict, each entry becomes a section.

    raises  DamagedError, UnsupportedFormatError, StorageError
    """
    file = source_file(path)
    with translated(path.parent, "read", path.name), open_plain(Path(file.path)) as opened:
        archive = read_archive(opened, ArchiveRange(0, file.bytes), str(path))
    value = read_pickle(archive.content, KNOWN, persistent=storage_of, path=str(path))
    if not isinstance(value, dict):
        raise UnsupportedFormatError(
            f"{path} does not hold a dict", found=type(value).__name__, next="save a state_dict, or a dict of them"
        )

    def place(storage: StorageRef) -> tuple[int, ArchiveRange]:
        location = archive.storages.get(storage.key)
        if location is None:
            raise DamagedError(f"{path} lacks the storage {storage.key!r:.40}", next="copy the file again")
        return 0, location

    check_sections(value, str(path))
    tree = PickleTree(place, str(path))
    is_flat = all(isinstance(inner, TensorView) for inner in value.values())
    objects = {name: tree.section(name, inner) for name, inner in value.items()}
    gone = {value.name for value in tree.unmapped}
    kept_objects = {} if is_flat else {name: node for name, node in objects.items() if name not in gone}
    return tree.source("torch", str(path), (file,), kept_objects, is_flat=is_flat)
