"""How much disk space a store occupies, and how much of it is freed by removing steps. Files are identified by inode,
and not read.

In stores that are not directories, each file has only one name, and its length counts as its disk space.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import msgspec

from flowstone.commit.entries import EntryKind, parse_entry
from flowstone.errors import NoCheckpointError, StorageError
from flowstone.store.base import Names
from flowstone.store.os_errors import translated

_SIZE_REQUESTS = 16


class StepUsage(msgspec.Struct, frozen=True):
    """The disk space of a step, in bytes that the file system has allocated.

    bytes          space of all files in its directory
    alone_bytes    space that removing only this step frees
    up_to_bytes    space that removing this step and all earlier steps frees
    journal_bytes  space of journals that begin after this step; it is not a part of `bytes`, and the next full save
                   frees it
    """

    step: int
    bytes: int
    alone_bytes: int
    up_to_bytes: int
    journal_bytes: int = 0


class DiskUsage(msgspec.Struct, frozen=True):
    """The disk space of a store, each file counted once.

    journal_bytes  space of all journals
    other_bytes    space of all other files: unfinished saves, steps that were set aside, the store's marker
    """

    steps: tuple[StepUsage, ...]
    bytes: int
    journal_bytes: int
    other_bytes: int


class _File(msgspec.Struct, frozen=True):
    """A file, identified by its inode: its allocated bytes, and how many names (hard links) it has in the whole file
    system.
    """

    bytes: int
    links: int


_NamedFiles: TypeAlias = Iterator[tuple[str | None, tuple[int, int], _File]]
"""For each name of a file: the store's entry that contains it (None: the store itself), its inode, and the file."""


class Disk:
    """The files of a store, as they are now."""

    def __init__(self, store: Names, root: Path | None = None) -> None:
        """`root`: the directory of a local store, in which inodes are read; None for other stores. Raises StorageError.
        """
        self._files: dict[tuple[int, int], _File] = {}
        # step -> file -> how many names the file has in the step. The key None is for names outside of all steps.
        self._names: dict[int | None, dict[tuple[int, int], int]] = {None: {}}
        # step after which journals begin -> file -> number of its names in these journals
        self._journals: dict[int, dict[tuple[int, int], int]] = {}
        for head, identity, file in _in_store(store) if root is None else _on_disk(root):
            entry = parse_entry(head) if head is not None else None
            if entry is not None and entry.kind is EntryKind.JOURNAL and entry.step is not None:
                counts = self._journals.setdefault(entry.step, {})
            else:
                step = entry.step if entry is not None and entry.kind is EntryKind.STEP else None
                counts = self._names.setdefault(step, {})
            self._files[identity] = file
            counts[identity] = counts.get(identity, 0) + 1

    @property
    def steps(self) -> list[int]:
        return sorted(step for step in self._names if step is not None)

    def freed_bytes(self, steps: Collection[int]) -> int:
        """How many bytes are freed if all these steps are removed: the space of files that have no name elsewhere.

        raises  NoCheckpointError  a step does not exist
        """
        for step in steps:
            if step not in self._names:
                raise NoCheckpointError(
                    f"the store has no checkpoint of step {step}", found=", ".join(map(str, self.steps)) or "none",
                    next="run `flowstone ls` to list the checkpoints",
                )
        return self._freed({}, sorted(set(steps)))

    def _freed(self, gone: dict[tuple[int, int], int], steps: Sequence[int]) -> int:
        """How many bytes are freed by removing these steps, too. `gone`: file -> how many of its names were removed
        before; it is updated.
        """
        total = 0
        for identity, count in (item for step in steps for item in self._names[step].items()):
            gone[identity] = gone.get(identity, 0) + count
            if gone[identity] >= self._files[identity].links:
                total += self._files[identity].bytes
        return total

    def usage(self) -> DiskUsage:
        """The usage of each step, and of the store."""
        rows, gone, freed = [], dict[tuple[int, int], int](), 0
        for step in self.steps:
            size = sum(self._files[identity].bytes for identity in self._names[step])
            freed += self._freed(gone, [step])
            journal = sum(self._files[identity].bytes for identity in self._journals.get(step, {}))
            rows.append(StepUsage(step, size, self._freed({}, [step]), freed, journal))
        in_steps = {identity for step in self.steps for identity in self._names[step]}
        in_journals = {identity for names in self._journals.values() for identity in names} - in_steps
        journals = sum(self._files[identity].bytes for identity in in_journals)
        other = sum(self._files[identity].bytes for identity in self._names[None].keys() - in_steps - in_journals)
        return DiskUsage(tuple(rows), sum(file.bytes for file in self._files.values()), journals, other)


def _on_disk(root: Path) -> _NamedFiles:
    def refused(error: OSError) -> None:
        """Raise an error if a directory cannot be listed, as all sums would be too small without its files."""
        head = Path(error.filename).relative_to(root).parts[:1]
        # false, for example, for the directory lost+found of a file system
        is_ours = not head or parse_entry(head[0]) is not None
        # if it was not found, a writer has removed it meanwhile
        if is_ours and not isinstance(error, FileNotFoundError):
            raise error

    with translated(root, "look at", str(root)):
        for directory, _, names in os.walk(root, onerror=refused):
            head = Path(directory).relative_to(root).parts[:1]
            for name in names:
                try:
                    stats = os.stat(os.path.join(directory, name), follow_symlinks=False)
                except FileNotFoundError:
                    continue  # a writer has removed it meanwhile
                if stat.S_ISREG(stats.st_mode):
                    file = _File(stats.st_blocks * 512, stats.st_nlink)
                    yield head[0] if head else None, (stats.st_dev, stats.st_ino), file


def _in_store(store: Names) -> _NamedFiles:
    """The files of a store that reports only sizes, and in which each file has one name. Many sizes are requested at
    the same time.
    """
    inner = [(entry, name) for entry in store.names() if parse_entry(entry) is not None for name in store.names(entry)]
    files = [*inner, *((None, name) for name in store.names() if parse_entry(name) is None)]

    def size(file: tuple[str | None, str]) -> int | None:
        try:
            return store.size(file[1] if file[0] is None else f"{file[0]}/{file[1]}")
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.EISDIR):
                return None  # a writer has removed the file meanwhile, or it is not Flowstone's
            raise

    with ThreadPoolExecutor(_SIZE_REQUESTS, thread_name_prefix="flowstone-du") as threads:
        for number, ((head, _), length) in enumerate(zip(files, threads.map(size, files), strict=True)):
            if length is not None:
                yield head, (0, number), _File(length, 1)
