"""What a store takes of its disk, and what removing steps would free. Files are counted by inode, and none is read.

In a store that is no directory each file has one name, and takes its length.
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

from flowstone.commit.entries import Kind, parse
from flowstone.errors import NoCheckpointError, StorageError
from flowstone.store.base import Names
from flowstone.store.os_errors import translated

_ASKED_AT_ONCE = 16


class StepUsage(msgspec.Struct, frozen=True):
    """What a step takes. Bytes are those that the file system has allocated.

    bytes        of all files in its directory
    alone_bytes  that would be freed if this step alone were removed
    up_to_bytes  that would be freed if this step, and every one before it, were removed
    journal_bytes  of journals that begin after this step, which is no part of `bytes`: what the next whole save frees
    """

    step: int
    bytes: int
    alone_bytes: int
    up_to_bytes: int
    journal_bytes: int = 0


class DiskUsage(msgspec.Struct, frozen=True):
    """What a store takes, each file counted once.

    journal_bytes  of all journals
    other_bytes    of what is in no step, and no journal: unfinished saves, what was set aside, the marker
    """

    steps: tuple[StepUsage, ...]
    bytes: int
    journal_bytes: int
    other_bytes: int


class _File(msgspec.Struct, frozen=True):
    """A file, by inode: what it takes, and how many names it has, wherever they are."""

    bytes: int
    links: int


_Found: TypeAlias = Iterator[tuple[str | None, tuple[int, int], _File]]
"""Each name of a file: the entry of the store that it is in, None for the store itself; which file it is."""


class Disk:
    """The files of a store, as they are now."""

    def __init__(self, store: Names, root: Path | None = None) -> None:
        """`root`: of a store in a directory, whose files are looked at themselves. Raises StorageError."""
        self._files: dict[tuple[int, int], _File] = {}
        # Of each step, and of what is in none: how many names a file has there.
        self._names: dict[int | None, dict[tuple[int, int], int]] = {None: {}}
        self._journals: dict[int, dict[tuple[int, int], int]] = {}  # by the step after which they begin
        for head, identity, file in _in_store(store) if root is None else _on_disk(root):
            entry = parse(head) if head is not None else None
            if entry is not None and entry.kind is Kind.JOURNAL and entry.step is not None:
                counts = self._journals.setdefault(entry.step, {})
            else:
                step = entry.step if entry is not None and entry.kind is Kind.STEP else None
                counts = self._names.setdefault(step, {})
            self._files[identity] = file
            counts[identity] = counts.get(identity, 0) + 1

    @property
    def steps(self) -> list[int]:
        return sorted(step for step in self._names if step is not None)

    def freed(self, steps: Collection[int]) -> int:
        """Bytes that would be free if these steps were removed together: of files that have no name elsewhere.

        raises  NoCheckpointError  a step is not there
        """
        for step in steps:
            if step not in self._names:
                raise NoCheckpointError(
                    f"there is no step {step}", found=", ".join(map(str, self.steps)) or "none",
                    next="run `flowstone ls` to see what is there",
                )
        return self._freed({}, sorted(set(steps)))

    def _freed(self, gone: dict[tuple[int, int], int], steps: Sequence[int]) -> int:
        """Bytes that go with the last names of files in these steps. `gone`: names that went before; updated."""
        found = 0
        for identity, count in (one for step in steps for one in self._names[step].items()):
            gone[identity] = gone.get(identity, 0) + count
            if gone[identity] >= self._files[identity].links:
                found += self._files[identity].bytes
        return found

    def usage(self) -> DiskUsage:
        """What each step takes, and all together."""
        found, gone, freed = [], dict[tuple[int, int], int](), 0
        for step in self.steps:
            size = sum(self._files[one].bytes for one in self._names[step])
            freed += self._freed(gone, [step])
            journal = sum(self._files[one].bytes for one in self._journals.get(step, {}))
            found.append(StepUsage(step, size, self._freed({}, [step]), freed, journal))
        in_steps = {one for step in self.steps for one in self._names[step]}
        in_journals = {one for names in self._journals.values() for one in names} - in_steps
        journals = sum(self._files[one].bytes for one in in_journals)
        other = sum(self._files[one].bytes for one in self._names[None].keys() - in_steps - in_journals)
        return DiskUsage(tuple(found), sum(file.bytes for file in self._files.values()), journals, other)


def _on_disk(root: Path) -> _Found:
    def refused(error: OSError) -> None:
        """Of a directory that cannot be listed: without what is in it, each sum would be too small."""
        head = Path(error.filename).relative_to(root).parts[:1]
        is_ours = not head or parse(head[0]) is not None  # not a file system's lost+found, say
        if is_ours and not isinstance(error, FileNotFoundError):  # which a writer has removed meanwhile
            raise error

    with translated(root, "look at", str(root)):
        for place, _, names in os.walk(root, onerror=refused):
            head = Path(place).relative_to(root).parts[:1]
            for name in names:
                try:
                    found = os.stat(os.path.join(place, name), follow_symlinks=False)
                except FileNotFoundError:
                    continue  # a writer has removed it meanwhile
                if stat.S_ISREG(found.st_mode):
                    file = _File(found.st_blocks * 512, found.st_nlink)
                    yield head[0] if head else None, (found.st_dev, found.st_ino), file


def _in_store(store: Names) -> _Found:
    """Of a store that tells sizes alone, where a file has one name: many are asked for at once."""
    inner = [(entry, name) for entry in store.names() if parse(entry) is not None for name in store.names(entry)]
    files = [*inner, *((None, name) for name in store.names() if parse(name) is None)]

    def size(place: tuple[str | None, str]) -> int | None:
        try:
            return store.size(place[1] if place[0] is None else f"{place[0]}/{place[1]}")
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.EISDIR):
                return None  # a writer has removed it meanwhile, or it is none of ours
            raise

    with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="flowstone-du") as threads:
        for number, ((head, _), length) in enumerate(zip(files, threads.map(size, files), strict=True)):
            if length is not None:
                yield head, (0, number), _File(length, 1)
