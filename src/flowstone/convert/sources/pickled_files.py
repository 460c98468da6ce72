"""The files of a checkpoint that has many: values with references to storages, and nothing executed."""

from __future__ import annotations

from pathlib import Path

from flowstone.convert.source import SourceFile, source_file
from flowstone.convert.sources.restricted_unpickler import Known, read_pickle
from flowstone.convert.sources.torch_archive import Place, read_archive
from flowstone.convert.sources.torch_values import KNOWN, StorageRef, storage_of
from flowstone.errors import DamagedError
from flowstone.store.os_errors import translated


class PickledFiles:
    """The files of one checkpoint. A storage's key has the number of its archive, so values of several files mix.

    known, records  what their pickles may name, as read_pickle has it
    """

    def __init__(self, location: str, known: Known = KNOWN, records: frozenset[str] = frozenset()) -> None:
        self.location = location
        self._known, self._records = known, records
        self.opened: list[SourceFile] = []
        self._numbers: dict[Path, int] = {}
        self._storages: dict[str, tuple[int, Place]] = {}
        self._archives: list[int] = []

    def number(self, path: Path) -> int:
        """The number of a file among those of the checkpoint. Raises DamagedError where it is missing."""
        if path not in self._numbers:
            with translated(path.parent, "look at", path.name):
                is_there = path.is_file()
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
        number, count = self.number(path), len(self._archives)
        self._archives.append(number)
        file = self.opened[number]
        with translated(path.parent, "read", path.name), open(file.path, "rb") as opened:
            archive = read_archive(opened, place or Place(0, file.bytes), str(path))
        self._storages.update({f"{count}:{key}": (number, found) for key, found in archive.storages.items()})

        def storage(identity: object) -> StorageRef:
            found = storage_of(identity)
            return StorageRef(f"{count}:{found.key}", found.dtype, found.bytes)

        return read_pickle(archive.content, self._known, self._records, persistent=storage, path=str(path))

    def place(self, wanted: StorageRef) -> tuple[int, Place]:
        """Where a storage lies. Raises DamagedError."""
        found = self._storages.get(wanted.key)
        if found is None:
            count, _, key = wanted.key.partition(":")
            file = self.opened[self._archives[int(count)]]
            raise DamagedError(f"{file.path} lacks the storage {key!r:.40}", next="copy it again")
        return found
