"""A draft (unfinished target of an export) in a bucket. Objects cannot be renamed, so files are written under their
final names.

Each file appears when it is complete. A marker object lists the names of all files; it is written first and removed
last. An export that finds a marker removes the listed files, and starts from the beginning.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from flowstone.convert.layout import TargetLayout
from flowstone.convert.window_store_writer import StoreDraft
from flowstone.errors import DamagedError, FlowstoneError, LockedError, StorageError
from flowstone.store.base import Store
from flowstone.store.holders import has_ended, machine_and_process
from flowstone.store.urls import ObjectUrl
from flowstone.stores.arguments import store_at

_NOTE_BYTES_MAX = 64 << 20


class _ExportMarker(msgspec.Struct, frozen=True):
    """The marker object. `holder` describes the export for messages; `machine` and `process` identify its process
    (store/holders.py); `files` are the names of all files.
    """

    holder: str
    machine: str
    process: str
    files: list[str]


class BucketDraft:
    """The draft of a target whose URL is a prefix or a single object. Use it in a `with` statement."""

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
            with suppress(FlowstoneError):  # the next export finds the marker, and removes the files, too
                self._remove_files()
        self._store.close()

    @property
    def store_draft(self) -> StoreDraft:
        """The store and prefix that the files are written to."""
        return StoreDraft(self._store, "")

    def begin(self, names: Sequence[str]) -> None:
        """Reserve the target for files of these names, by writing the marker. Removes the files of an export that was
        killed.

        raises  StorageError  the target exists
                LockedError   another export to this target is running
        """
        note = self._read_note()
        if note is not None:
            self._check_dead(note)
            self._remove_files(note)
        taken = self._store.exists(self.name) if self._is_file else self._store.exists()
        if taken:
            raise StorageError(
                f"cannot export to {self.url.shown}: it already exists", errno=errno.EEXIST,
                next="give a new URL, or first remove what is stored there",
            )
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        self._store.put(self._note, msgspec.json.encode(_ExportMarker(holder, *machine_and_process(), [*names])))
        self._has_note = True

    def _read_note(self) -> _ExportMarker | None:
        if not self._store.exists(self._note):
            return None
        try:
            return msgspec.json.decode(self._store.read(self._note, bytes_max=_NOTE_BYTES_MAX), type=_ExportMarker)
        except (msgspec.DecodeError, DamagedError):
            raise StorageError(
                f"cannot export to {self.url.shown}: {self._note} exists, but was not written by an export",
                errno=errno.EEXIST, next="remove this file, or give another URL",
            ) from None

    def _check_dead(self, note: _ExportMarker) -> None:
        """Raise LockedError unless the export that wrote the marker `note` has certainly ended."""
        if has_ended(note.machine, note.process):
            return
        raise LockedError(
            f"cannot export to {self.url.shown}: another export is running, or was killed on another machine",
            holder=note.holder,
            next=f"wait until that export ends; if it was killed, remove {self._note} and the files beside it",
        )

    def _remove_files(self, note: _ExportMarker | None = None) -> None:
        note = note or self._read_note()
        for name in () if note is None else note.files:
            if self._store.exists(name):
                self._store.remove(name)
        self._store.remove(self._note)

    def put(self, documents: Mapping[str, bytes]) -> None:
        """Write small files in this order, so that a file that refers to others comes after them."""
        for name, content in documents.items():
            self._store.put(name, content)

    def finish(self, layout: TargetLayout) -> None:
        """Complete the target: write the files that have no bytes, and remove the marker."""
        for file in layout.files:
            if not file.bytes:
                self._store.put(file.name, b"")
        self._store.remove(self._note)
        self._has_note = False
