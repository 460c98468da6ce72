"""A target in a bucket until it is whole: nothing there can be renamed, so its files get their own names one by one.

Each file appears when it is whole. An object beside them says that others are missing: it names them, comes first, and
goes last. A conversion that finds that object removes what it names, and begins anew.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from flowstone.arguments import store_at
from flowstone.convert.layout import Layout
from flowstone.convert.store_writes import StoreDraft
from flowstone.errors import DamagedError, FlowstoneError, LockedError, StorageError
from flowstone.store.base import Store
from flowstone.store.holders import has_ended, here
from flowstone.store.objects.urls import ObjectUrl

_NOTE_BYTES_MAX = 64 << 20


class _Note(msgspec.Struct, frozen=True):
    """What the object says: who writes, for people; the machine and process, as leases have them; all files' names."""

    holder: str
    machine: str
    process: str
    files: list[str]


class BucketDraft:
    """Of a target at a URL: the prefix that it will be, or the one object. Use with `with`."""

    def __init__(self, url: ObjectUrl, *, is_file: bool) -> None:
        self.url = url
        place, _, self.name = url.rpartition("/")
        self._store: Store = store_at(ObjectUrl(place) if is_file else url)
        self._is_file = is_file
        self._note = f".{self.name}.flowstone-export" if is_file else ".flowstone-export"
        self._has_note = False

    def __enter__(self) -> BucketDraft:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._has_note:
            with suppress(FlowstoneError):  # safe: the next one finds the object, and does the same
                self._clear()
        self._store.close()

    @property
    def place(self) -> StoreDraft:
        """Where the files go."""
        return StoreDraft(self._store, "")

    def begin(self, names: Sequence[str]) -> None:
        """Take the place for files of these names. Removes what an export that was killed has left there.

        raises  StorageError where something else is there; LockedError where another export is under way
        """
        known = self._read_note()
        if known is not None:
            self._check_dead(known)
            self._clear(known)
        taken = self._store.exists(self.name) if self._is_file else self._store.exists()
        if taken:
            raise StorageError(
                f"cannot export to {self.url.shown}: it already exists", errno=errno.EEXIST,
                next="give a new URL, or remove it first",
            )
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        self._store.put(self._note, msgspec.json.encode(_Note(holder, *here(), [*names])))
        self._has_note = True

    def _read_note(self) -> _Note | None:
        if not self._store.exists(self._note):
            return None
        try:
            return msgspec.json.decode(self._store.read(self._note, bytes_max=_NOTE_BYTES_MAX), type=_Note)
        except (msgspec.DecodeError, DamagedError):
            raise StorageError(
                f"cannot export to {self.url.shown}: {self._note} exists, and no export wrote it",
                errno=errno.EEXIST, next="remove it, or give another URL",
            ) from None

    def _check_dead(self, known: _Note) -> None:
        """Raise LockedError unless the export that has written this is certainly over."""
        if has_ended(known.machine, known.process):
            return
        raise LockedError(
            f"cannot export to {self.url.shown}: another export is under way, or was killed on another machine",
            holder=known.holder, next=f"wait for it; if it is dead, remove {self._note} and what else is there",
        )

    def _clear(self, note: _Note | None = None) -> None:
        known = note or self._read_note()
        for name in () if known is None else known.files:
            if self._store.exists(name):
                self._store.remove(name)
        self._store.remove(self._note)

    def put(self, documents: Mapping[str, bytes]) -> None:
        """Write small files: those that name others come last by their order."""
        for name, content in documents.items():
            self._store.put(name, content)

    def finish(self, layout: Layout) -> None:
        """All files are there: the target is whole."""
        for file in layout.files:
            if not file.bytes:
                self._store.put(file.name, b"")
        self._store.remove(self._note)
        self._has_note = False
