"""The draft of a conversion: its unfinished target, in a directory beside the target's path, and a journal of what is
durable. Once the draft is complete, it is renamed to the target.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flowstone.convert.journal import ConversionJournal
from flowstone.convert.layout import TargetLayout
from flowstone.errors import ArgumentError, DamagedError, StorageError
from flowstone.store.os_errors import translated
from flowstone.store.system import System

_DRAFT = re.compile(r"(?:[0-9a-f]{16}\.)?flowstone-draft", re.ASCII)  # earlier versions wrote the name without digits
_JOURNAL = "flowstone-journal"


class TargetDraft:
    """The draft of a target at `path`, which is a directory or a single file. Use it in a `with` statement.

    After an error the draft stays, so that the same command can resume. After DamagedError the draft is removed: the
    damaged file has to be replaced, so the conversion starts from the beginning.

    directory  the directory with the files. Each new draft has a unique name: a cluster's task that outlives its job
               may still write into an earlier draft, but never into this one
    journal    records which windows (ranges) of the files are durable
    """

    def __init__(self, path: Path, *, is_file: bool) -> None:
        self.path = Path(os.path.abspath(path))
        if not self.path.name:
            raise ArgumentError(
                f"cannot write to {path}: this is the root of the file system", next="give the path of a new directory"
            )
        self._is_file = is_file
        self.directory = self.path.parent / f".{self.path.name}.{secrets.token_hex(8)}.flowstone-draft"
        self._journal_path = self.path.parent / f".{self.path.name}.{_JOURNAL}"
        self.journal = ConversionJournal(self._journal_path)
        self._system = System()

    def __enter__(self) -> TargetDraft:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None and issubclass(kind, DamagedError):
                with suppress(StorageError):  # the same command finds the draft, and starts from the beginning
                    self._clear()
                    self.journal.remove()
        finally:
            self.journal.close()

    def begin(self, plan: str, windows: int) -> bool:
        """Lock the target. Continue an earlier draft with the same plan, or start a new one. Returns whether the target
        is already complete.

        plan     identifies the conversion (layout.plan_digest)
        windows  number of windows (ranges of files) that the conversion writes

        raises  StorageError  the target exists
                LockedError   another conversion has locked the target
        """
        parent = self.path.parent
        with translated(parent, "make", str(parent)):
            parent.mkdir(parents=True, exist_ok=True)
        is_taken = self._is_taken()
        if is_taken and not self._journal_path.is_file():
            self._refuse()
        self.journal.open()
        begun = self.journal.start
        is_same = begun is not None and begun.plan == plan
        if begun is not None and is_same and self._is_draft(begun.draft):
            self.directory = parent / begun.draft
        if is_taken:
            durable = self.journal.durable
            if is_same and durable and durable[-1].windows == windows and not self._has_files():
                return True  # an earlier conversion crashed between the rename and the removal of the journal
            self._refuse()
        if not is_same or not self.directory.is_dir():
            self._clear()
            self.journal.begin(plan, self.directory.name)
            with translated(parent, "make", self.directory.name):
                self._system.make_directory(self.directory)
        return False

    def _is_draft(self, name: str) -> bool:
        """Whether `name` is the name of a draft of this target."""
        mine = f".{self.path.name}."
        return name.startswith(mine) and _DRAFT.fullmatch(name[len(mine) :]) is not None

    def _has_files(self) -> bool:
        return self.directory.is_dir() and any(os.scandir(self.directory))

    def _is_taken(self) -> bool:
        with translated(self.path.parent, "look at", self.path.name):
            if not os.path.lexists(self.path):
                return False
            return self._is_file or not self.path.is_dir() or self.path.is_symlink() or any(os.scandir(self.path))

    def _refuse(self) -> None:
        reason = "it already exists" if self._is_file or not self.path.is_dir() else "the directory is not empty"
        raise StorageError(
            f"cannot export to {self.path}: {reason}", errno=errno.EEXIST,
            next="give a new path, or first remove what is there",
        )

    def _clear(self) -> None:
        """Remove earlier drafts of this target. Only conversions write files into drafts."""
        parent = self.path.parent
        for name in filter(self._is_draft, os.listdir(parent)):
            with translated(parent, "remove", name):
                if (parent / name).is_symlink() or not (parent / name).is_dir():
                    continue
                for place, directories, files in os.walk(parent / name, topdown=False):
                    for file in files:
                        os.unlink(os.path.join(place, file))
                    for directory in directories:
                        inner = os.path.join(place, directory)
                        os.unlink(inner) if os.path.islink(inner) else os.rmdir(inner)
                (parent / name).rmdir()

    def put(self, documents: Mapping[str, bytes]) -> None:
        """Write small files into the draft, and make them durable."""
        for name, content in documents.items():
            with translated(self.directory, "write", name, needed_bytes=len(content)):
                fd = self._system.create(self.directory / name, os.O_WRONLY | os.O_TRUNC)
                try:
                    self._system.write(fd, content)
                    self._system.sync(fd)
                finally:
                    os.close(fd)

    def finish(self, layout: TargetLayout) -> None:
        """Rename the draft to the target. The target is durable on return."""
        parent = self.path.parent
        with translated(parent, "rename", self.directory.name):
            for directory in layout.directories:
                self._system.sync_directory(self.directory / directory)
            self._system.sync_directory(self.directory)
            source = self.directory / layout.files[0].name if self._is_file else self.directory
            self._system.rename(source, self.path)
            self._system.sync_directory(parent)
        self.end()

    def end(self) -> None:
        """Remove the journal and what is left of the draft."""
        if self._is_file:
            self._clear()
        self.journal.remove()
