"""The files of a checkpoint that has many: values with references to storages, and nothing executed."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from flowstone.convert.source import SourceFile, open_plain, source_file
from flowstone.convert.sources.restricted_unpickler import Known, read_pickle
from flowstone.convert.sources.torch_archive import Archive, Place, read_archive
from flowstone.convert.sources.torch_values import KNOWN, StorageRef, TensorView, storage_of, view_bytes
from flowstone.errors import DamagedError
from flowstone.store.os_errors import translated


class PickledFiles:
    """The files of one checkpoint. A storage's key has the number of its archive, so values of several files mix.

    known, records  what their pickles may name, as read_pickle has it

    Holds the file open that was read last, until `close`. One thread at a time.
    """

    def __init__(self, location: str, known: Known = KNOWN, records: frozenset[str] = frozenset()) -> None:
        self.location = location
        self._known, self._records = known, records
        self.opened: list[SourceFile] = []
        self._numbers: dict[Path, int] = {}
        self._storages: dict[str, tuple[int, Place]] = {}
        self._archives: list[int] = []
        self._current: tuple[int, BinaryIO] | None = None  # a file may have a million archives, one after the other

    def number(self, path: Path) -> int:
        """The number of a file among those of the checkpoint. Raises DamagedError where it is missing."""
        if path not in self._numbers:
            with translated(path.parent, "look at", path.name):
                is_there = path.exists()
            if not is_there:
                name = path.relative_to(self.location) if path.is_relative_to(self.location) else path.name
                raise DamagedError(f"{self.location} lacks {name}", next="copy the whole directory again")
            self._numbers[path] = len(self.opened)
            self.opened.append(source_file(path))
        return self._numbers[path]

    def read(self, path: Path, place: Place | None = None) -> object:
        """What torch.save has written to a file, or to a place in one.

        raises  DamagedError, UnsupportedFormatError, StorageError
        """
        number, archive, where = self._archive(path, place)
        count = len(self._archives)
        self._archives.append(number)
        self._storages.update({f"{count}:{key}": (number, found) for key, found in archive.storages.items()})

        def storage(identity: object) -> StorageRef:
            found = storage_of(identity)
            return StorageRef(f"{count}:{found.key}", found.dtype, found.bytes)

        return read_pickle(archive.content, self._known, self._records, persistent=storage, path=where)

    def tensor(self, path: Path, place: Place) -> tuple[int, int, TensorView]:
        """The file of an archive that is a tensor, where its first element lies, and what it is.

        Nothing is kept of it: a checkpoint may have millions. Raises as `read`.
        """
        number, archive, where = self._archive(path, place)
        view = read_pickle(archive.content, KNOWN, persistent=storage_of, path=where)
        found = archive.storages.get(view.storage.key) if isinstance(view, TensorView) else None
        if not isinstance(view, TensorView) or found is None or found.bytes < view.storage.bytes:
            raise DamagedError(f"{where} is no tensor", next="copy the file again")
        return number, found.offset + view_bytes(view)[0], view

    def _archive(self, path: Path, place: Place | None) -> tuple[int, Archive, str]:
        """The number of a file, the archive at a place of it, and how to call that place."""
        number = self.number(path)
        file = self.opened[number]
        whole = Place(0, file.bytes)
        part, where = (whole, str(path)) if place is None else (place, f"{path} at {place.offset}")
        if part.offset + part.bytes > file.bytes:
            raise DamagedError(
                f"{path} is torn", expected=f"at least {part.offset + part.bytes} bytes",
                found=f"{file.bytes} bytes", next="copy the file again",
            )
        with translated(path.parent, "read", path.name):
            if self._current is None or self._current[0] != number:
                self.close()
                self._current = number, open_plain(Path(file.path))
            return number, read_archive(self._current[1], part, where), where

    def place(self, wanted: StorageRef) -> tuple[int, Place]:
        """Where a storage lies. Raises DamagedError."""
        found = self._storages.get(wanted.key)
        if found is None:
            count, _, key = wanted.key.partition(":")
            file = self.opened[self._archives[int(count)]]
            raise DamagedError(f"{file.path} lacks the storage {key!r:.40}", next="copy it again")
        return found

    def close(self) -> None:
        """Close the file that was read last."""
        if self._current is not None:
            self._current[1].close()
            self._current = None
