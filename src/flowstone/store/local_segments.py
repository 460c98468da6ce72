"""Segments created in a directory, and files of it opened to be read: what a job of any store needs of them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

from flowstone.config import Direct
from flowstone.errors import FlowstoneError
from flowstone.store.base import FilePlan
from flowstone.store.directories import parent
from flowstone.store.engines import EngineChoice
from flowstone.store.open_files import OpenFiles
from flowstone.store.os_errors import explain, translated
from flowstone.store.system import System

if TYPE_CHECKING:
    from flowstone import _native


class LocalSegments:
    """Segments of one save; owns their descriptors. Raises if the system refuses to create them.

    bytes  of all of them, for messages
    """

    def __init__(self, system: System, engines: EngineChoice, files: Sequence[FilePlan], direct: Direct) -> None:
        self._root, self._system, self._engines, self.files = engines.root, system, engines, files
        self._direct = direct
        self.bytes = sum(file.bytes for file in files)
        self.opened = OpenFiles()
        try:
            for file in files:
                self._create(file)
        except BaseException:
            self.opened.close()
            raise

    def _create(self, file: FilePlan) -> None:
        path = self._root / file.path
        with translated(self._root, "probe", ""):
            alignment = self._engines.alignment_to_write(self._direct)
        flags = os.O_RDWR | os.O_EXCL | (os.O_DIRECT if alignment > 1 else 0)
        with translated(self._root, "create", file.path, needed_bytes=self.bytes), parent(self._root, file.path) as at:
            fd = self._system.create(path, flags, at)
        self.opened.add(path, fd, alignment)

    @property
    def alignment(self) -> int:
        """The alignment of all segments: once one cannot be written with O_DIRECT, none of them is."""
        return min((opened.alignment for opened in self.opened), default=1)

    def reserve(self) -> None:
        """Give them their full size; those of which an encoder decides it reserve nothing. Raises StorageError."""
        for number, (opened, file) in enumerate(zip(self.opened, self.files, strict=True)):
            with translated(self._root, "allocate", file.path, needed_bytes=self.bytes):
                if file.header is None:
                    self._system.reserve(opened.fd, file.bytes)
                else:
                    self._system.resize(opened.fd, file.bytes)
            if opened.alignment > 1 and not self._engines.takes_direct(opened.fd):
                with translated(self._root, "open", file.path):
                    self.opened.go_through_cache(number)

    def make_durable(self, ends: Sequence[int]) -> FlowstoneError | None:
        """Give the files whose size an encoder has decided that size, and their beginning; then sync all.

        ends  their sizes
        """
        for opened, file, size in zip(self.opened, self.files, ends, strict=True):
            if file.header is None:
                continue
            try:
                self._system.resize(opened.fd, size)
                self._system.write(opened.fd, _aligned(file.header(size)))
            except OSError as error:
                return explain(self._root, "write", error.errno or 0, str(opened.path), needed_bytes=self.bytes)
        for opened in self.opened:
            try:
                self._system.sync(opened.fd)
            except OSError as error:
                return explain(self._root, "fsync", error.errno or 0, str(opened.path), needed_bytes=self.bytes)
        return None

    def close(self) -> None:
        self.opened.close()


def _aligned(content: bytes) -> memoryview:
    """The same bytes at the begin of a page, as O_DIRECT needs them."""
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    return memoryview(memory)


class LocalPart:
    """Segments of a job of another store's (see Parts)."""

    def __init__(
        self, segments: LocalSegments, engine: _native.Engine, *, of_path: int, may_move: bool
    ) -> None:
        self._segments, self.engine = segments, engine
        self.natives = [one.native(of_path=of_path, may_move=may_move) for one in segments.opened]

    def begin(self, job: _native.WriteJob, numbers: Sequence[int]) -> None:
        """Nothing to do: the engine has descriptors."""

    def reserve(self) -> None:
        self._segments.reserve()

    def error(self) -> FlowstoneError | None:
        return None  # the job knows

    def refusal(self, at: int) -> FlowstoneError | None:  # noqa: ARG002  (of uploads)
        return None

    def end(self, job: _native.WriteJob, ends: Sequence[int]) -> FlowstoneError | None:  # noqa: ARG002  (of uploads)
        return self._segments.make_durable(ends)

    def open_written(self, at: int) -> BinaryIO:
        return open(self.natives[at].path, "rb", 0)

    def close(self) -> None:
        self._segments.close()


class LocalExtents:
    """Files that are read by a job of another store's (see Parts)."""

    def __init__(
        self, engines: EngineChoice, paths: Sequence[str], direct: Direct, engine: _native.Engine, *, of_path: int
    ) -> None:
        self.engine = engine
        self._opened = OpenFiles()
        try:
            for path in paths:
                with translated(engines.root, "open", path):
                    fd, alignment = engines.open_to_read(engines.root / path, direct, self._opened.descriptors)
                self._opened.add(engines.root / path, fd, alignment)
        except BaseException:
            self._opened.close()
            raise
        self.natives = [one.native(of_path=of_path) for one in self._opened]

    def begin(self, job: _native.ReadJob) -> None:
        """Nothing to do: the engine has descriptors."""

    def error(self) -> FlowstoneError | None:
        return None  # the job knows

    def close(self) -> None:
        self._opened.close()
