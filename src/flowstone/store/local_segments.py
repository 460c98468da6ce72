"""Creates segments in a directory, or opens files to read. The reads and writes are made by a job of this store or of a
striped store.
"""

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
    from flowstone._native import Engine, ReadJob, WriteJob


class LocalSegments:
    """Creates the segments of one save, and owns their descriptors. Raises an error if the system refuses to create
    them.

    bytes  total size in bytes, for messages
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
        translating = translated(self._root, "create", file.path, needed_bytes=self.bytes)
        with translating, parent(self._root, file.path) as dir_fd:
            fd = self._system.create(path, flags, dir_fd)
        self.opened.add(path, fd, alignment)

    @property
    def alignment(self) -> int:
        """The alignment of writes to all segments, in bytes. If one segment does not accept O_DIRECT, none is written
        with it.
        """
        return min((opened.alignment for opened in self.opened), default=1)

    def reserve(self) -> None:
        """Give the segments their full size. Files whose size an encoder decides get no space yet. Raises StorageError.
        """
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
        """Set the size of files whose size an encoder has decided, and write their headers; then sync all files.

        ends  the sizes of all files in bytes
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
    """The same bytes in memory that begins at a page boundary, as O_DIRECT requires."""
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    return memoryview(memory)


class LocalOpenSegments:
    """Open segments of this store that a job of another store writes (see StripeMember)."""

    def __init__(
        self, segments: LocalSegments, engine: Engine, *, of_path: int, may_move: bool
    ) -> None:
        self._segments, self.engine = segments, engine
        self.natives = [file.native(of_path=of_path, may_move=may_move) for file in segments.opened]

    def begin(self, job: WriteJob, numbers: Sequence[int]) -> None:
        """Does nothing, as the engine writes to the descriptors itself."""

    def reserve(self) -> None:
        self._segments.reserve()

    def error(self) -> FlowstoneError | None:
        return None  # the job reports any error

    def refusal(self, index: int) -> FlowstoneError | None:  # noqa: ARG002  (of uploads)
        return None

    def end(self, job: WriteJob, ends: Sequence[int]) -> FlowstoneError | None:  # noqa: ARG002  (of uploads)
        return self._segments.make_durable(ends)

    def open_written(self, index: int) -> BinaryIO:
        return open(self.natives[index].path, "rb", 0)

    def close(self) -> None:
        self._segments.close()


class LocalOpenExtents:
    """Open files of this store that a job of another store reads (see StripeMember)."""

    def __init__(
        self, engines: EngineChoice, paths: Sequence[str], direct: Direct, engine: Engine, *, of_path: int
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
        self.natives = [file.native(of_path=of_path) for file in self._opened]

    def begin(self, job: ReadJob) -> None:
        """Does nothing, as the engine reads from the descriptors itself."""

    def error(self) -> FlowstoneError | None:
        return None  # the job reports any error

    def close(self) -> None:
        self._opened.close()
