"""The torch.save files of a checkpoint, read as values with references to storages. Pickles are not executed."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from flowstone.convert.source import SourceFile, open_plain, source_file
from flowstone.convert.sources.restricted_unpickler import KnownFunctions, read_pickle
from flowstone.convert.sources.torch_archive import Archive, ArchiveRange, read_archive
from flowstone.convert.sources.torch_values import KNOWN, StorageRef, TensorView, storage_of, view_bytes
from flowstone.errors import DamagedError
from flowstone.store.os_errors import translated


class PickledFiles:
    """The files of one checkpoint. A storage's key contains its archive's number, so it is unique across files.

    functions, records  the names allowed in pickles, as in read_pickle

    Keeps the file that was read last open, until `close`. For one thread at a time.
    """

    def __init__(self, location: str, functions: KnownFunctions = KNOWN, records: frozenset[str] = frozenset()) -> None:
        self.location = location
        self._known, self._records = functions, records
        self.files: list[SourceFile] = []
        self._numbers: dict[Path, int] = {}
        self._storages: dict[str, tuple[int, ArchiveRange]] = {}
        self._archives: list[int] = []
        # kept open, as a file may have a million archives, one after the other
        self._current: tuple[int, BinaryIO] | None = None

    def file_number(self, path: Path) -> int:
        """The number of a file among the files of the checkpoint. Raises DamagedError if the file is missing."""
        if path not in self._numbers:
            with translated(path.parent, "look at", path.name):
                is_there = path.exists()
            if not is_there:
                name = path.relative_to(self.location) if path.is_relative_to(self.location) else path.name
                raise DamagedError(f"{self.location} lacks {name}", next="copy the whole directory again")
            self._numbers[path] = len(self.files)
            self.files.append(source_file(path))
        return self._numbers[path]

    def read(self, path: Path, place: ArchiveRange | None = None) -> object:
        """The value that torch.save wrote to a file, or to the range `place` of a file.

        raises  DamagedError, UnsupportedFormatError, StorageError
        """
        number, archive, where = self._archive(path, place)
        count = len(self._archives)
        self._archives.append(number)
        self._storages.update({f"{count}:{key}": (number, where) for key, where in archive.storages.items()})

        def storage(identity: object) -> StorageRef:
            reference = storage_of(identity)
            return StorageRef(f"{count}:{reference.key}", reference.dtype, reference.bytes)

        return read_pickle(archive.content, self._known, self._records, persistent=storage, path=where)

    def tensor(self, path: Path, place: ArchiveRange) -> tuple[int, int, TensorView]:
        """The tensor in an archive: the number of its file, the offset of its first element there, and the tensor as a
        view of its storage.

        Nothing is cached: a checkpoint may have millions of tensors. Raises the errors of `read`.
        """
        number, archive, where = self._archive(path, place)
        view = read_pickle(archive.content, KNOWN, persistent=storage_of, path=where)
        storage_place = archive.storages.get(view.storage.key) if isinstance(view, TensorView) else None
        if not isinstance(view, TensorView) or storage_place is None or storage_place.bytes < view.storage.bytes:
            raise DamagedError(f"{where} is not a tensor", next="copy the file again")
        return number, storage_place.offset + view_bytes(view)[0], view

    def _archive(self, path: Path, place: ArchiveRange | None) -> tuple[int, Archive, str]:
        """The number of a file, the archive in the range `place` of it, and a text that describes that range."""
        number = self.file_number(path)
        file = self.files[number]
        whole = ArchiveRange(0, file.bytes)
        part, where = (whole, str(path)) if place is None else (place, f"{path} at {place.offset}")
        if part.offset + part.bytes > file.bytes:
            raise DamagedError(
                f"{path} is truncated", expected=f"at least {part.offset + part.bytes} bytes",
                found=f"{file.bytes} bytes", next="copy the file again",
            )
        with translated(path.parent, "read", path.name):
            if self._current is None or self._current[0] != number:
                self.close()
                self._current = number, open_plain(Path(file.path))
            return number, read_archive(self._current[1], part, where), where

    def storage_range(self, reference: StorageRef) -> tuple[int, ArchiveRange]:
        """The number of the file, and the range in it, where a storage is. Raises DamagedError."""
        location = self._storages.get(reference.key)
        if location is None:
            count, _, key = reference.key.partition(":")
            file = self.files[self._archives[int(count)]]
            raise DamagedError(
                f"{file.path} lacks the storage {key!r:.40}, to which a tensor refers", next="copy the file again"
            )
        return location

    def close(self) -> None:
        """Close the file that was read last."""
        if self._current is not None:
            self._current[1].close()
            self._current = None
