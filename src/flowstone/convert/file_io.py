"""Read and write ranges of files. The native engine makes long aligned requests, with O_DIRECT if possible; the
unaligned end of a file goes through the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone import _native
from flowstone.config import BLOCK_BYTES, KIB, MIB, EngineOptions
from flowstone.convert.source import SourceFile
from flowstone.errors import DamagedError, FlowstoneError
from flowstone.store.descriptors import Descriptors
from flowstone.store.engines import EngineChoice, open_file
from flowstone.store.os_errors import explain, translated
from flowstone.store.system import System

_OPEN_FILES_MAX = 16  # for each reader: a diff has eight readers, and a file may take two descriptors, so 256 in all
REQUEST_BYTES = 8 * MIB
QUEUE_DEPTH = 16
_GAP_BYTES = 64 * KIB  # if the gap between two ranges is smaller than this, they are read by one request


class AlignedMemory:
    """Memory that begins at a page, as O_DIRECT needs it. `array` has its bytes."""

    def __init__(self, length: int) -> None:
        # Private memory, as most systems have huge pages turned off for shared memory.
        self._map = mmap.mmap(-1, max(BLOCK_BYTES, _round_up(length)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # without huge pages, requests only cost more
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class FileRun(msgspec.Struct, frozen=True):
    """The bytes `begin` to `end` - 1 of a file. `file`: the file's position among the source's files."""

    file: int
    begin: int
    end: int


class _OpenFile(msgspec.Struct, frozen=True, eq=False):
    """An open file. The descriptor `end` reads through the page cache, for the unaligned end of the file."""

    descriptors: Descriptors
    native: _native.File
    end: int


def backend() -> str:
    """The name of the engine: "io_uring" if the system allows it, else "posix" (threads)."""
    return "io_uring" if _native.has_io_uring() else "posix"


class FileReader:
    """Reads ranges of a source's files. Keeps a few files open. For one thread at a time."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files, self._requests = files, RequestEngine()
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self._engines: dict[Path, EngineChoice] = {}

    def read(self, runs: Sequence[FileRun], memory: AlignedMemory) -> list[NDArray[np.uint8]]:
        """The bytes of each range, valid until the next call. `memory` must be large enough (`staging_bytes_max`).

        raises  DamagedError  a file has become shorter
                StorageError
        """
        merged, owner = merge_runs(runs)
        offset, begins = 0, []
        for merged_run in merged:
            begins.append(offset)
            offset += _aligned_length(merged_run)
        assert offset <= len(memory.array), "a batch is larger than the memory that it is read into"
        for batch_begin in range(0, len(merged), _OPEN_FILES_MAX):
            part = slice(batch_begin, batch_begin + _OPEN_FILES_MAX)
            self._read(merged[part], begins[part], memory)
        arrays = []
        for run, which in zip(runs, owner, strict=True):
            start = begins[which] + run.begin - _round_down(merged[which].begin)
            arrays.append(memory.array[start : start + run.end - run.begin])
        return arrays

    def _read(self, runs: Sequence[FileRun], begins: Sequence[int], memory: AlignedMemory) -> None:
        numbers: dict[int, int] = {}
        rows: list[tuple[int, int, int, int]] = []
        opened: list[_OpenFile] = []
        ends = []
        for run, offset in zip(runs, begins, strict=True):
            decoded = self._files[run.file].decoded
            if decoded is not None:
                start = offset + run.begin - _round_down(run.begin)
                decoded.read(run.begin, memory.array[start : start + run.end - run.begin])
                continue
            if run.file not in numbers:
                numbers[run.file] = len(opened)
                opened.append(self._opened(run.file))
            size = self._files[run.file].bytes
            begin, end = _round_down(run.begin), min(_round_up(run.end), _round_down(size))
            rows += [
                (numbers[run.file], start, memory.address + offset + start - begin, min(REQUEST_BYTES, end - start))
                for start in range(begin, end, REQUEST_BYTES)
            ]
            if run.end > end:
                ends.append((run, max(begin, end), offset + max(begin, end) - begin))
        if rows:
            self._request([file.native for file in opened], rows)
        for run, begin, offset in ends:
            self._read_end(opened[numbers[run.file]], run, begin, memory.array[offset : offset + run.end - begin])

    def _request(self, files: Sequence[_native.File], rows: Sequence[tuple[int, int, int, int]]) -> None:
        fault = self._requests.transfer("read", files, rows)
        if fault is not None:
            if fault.operation == "end of file":
                raise _shrank_error(fault.path, fault.offset, fault.length)
            reach = f"bytes {fault.offset}..{fault.offset + fault.length}"
            raise explain(Path(fault.path).parent, "read", fault.errno, fault.path, reach=reach)

    def _read_end(self, opened: _OpenFile, run: FileRun, begin: int, target: NDArray[np.uint8]) -> None:
        path = Path(self._files[run.file].path)
        done = 0
        with translated(path.parent, "read", path.name):
            while done < len(target):
                got = os.preadv(opened.end, [target[done:].data], begin + done)
                if got == 0:
                    raise _shrank_error(str(path), begin + done, len(target) - done)
                done += got

    def _opened(self, number: int) -> _OpenFile:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        while len(self._open) >= _OPEN_FILES_MAX:
            self._open.popitem(last=False)[1].descriptors.close()
        path = Path(self._files[number].path)
        engines = self._engines.setdefault(path.parent, EngineChoice(path.parent, EngineOptions()))
        descriptors = Descriptors()
        with translated(path.parent, "open", path.name):
            direct = engines.settings("read").direct_at(self._files[number].bytes)
            fd, alignment = engines.open_to_read(path, direct, descriptors)
            end = fd if alignment == 1 else open_file(path, descriptors)
            status = os.fstat(end)
        if status.st_size != self._files[number].bytes:
            raise DamagedError(
                f"{path} changed while it was being converted", expected=f"{self._files[number].bytes} bytes",
                found=f"{status.st_size} bytes", next="start the conversion again once no program writes to this file",
            )
        native = _native.File(fd=fd, path=str(path), alignment=alignment)
        self._open[number] = _OpenFile(descriptors, native, end)
        return self._open[number]

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].descriptors.close()


class FileWriter:
    """Writes windows (ranges) of a target's files, which are created at full size.

    Threads may write in parallel, and also during a sync. A sync makes all writes durable that ended before it began.
    One thread calls `open` before a file's first write, and `finish` after its last one.
    """

    def __init__(self, draft: Path, total_bytes: int) -> None:
        self._draft, self._requests, self._system = draft, RequestEngine(), System()
        self._total_bytes = total_bytes
        self._engines = EngineChoice(draft, EngineOptions())
        self._open: dict[str, _OpenFile] = {}
        self._touched: set[str] = set()
        self._lock = threading.Lock()

    def create(self, name: str, length: int) -> None:
        """Create a file at its full size, so that a full disk is found before a byte is written."""
        path = self._draft / name
        with translated(self._draft, "create", name, needed_bytes=self._total_bytes):
            fd = self._system.create(path, os.O_RDWR | os.O_EXCL)
            try:
                self._system.reserve(fd, length)
                self._system.sync(fd)
            finally:
                os.close(fd)

    def make_directories(self, names: Sequence[str]) -> None:
        """Create the missing directories of the draft. In `names`, parents come before their children."""
        for name in names:
            with translated(self._draft, "make", name), contextlib.suppress(FileExistsError):
                self._system.make_directory(self._draft / name)

    def write(self, name: str, offset: int, memory: AlignedMemory, length: int) -> None:
        """Write the first `length` bytes of `memory` at `offset`, which is a multiple of BLOCK_BYTES. Durable after the
        next `sync`.
        """
        opened = self._open[name]
        whole = _round_down(length)
        rows = [
            (0, offset + start, memory.address + start, min(REQUEST_BYTES, whole - start))
            for start in range(0, whole, REQUEST_BYTES)
        ]
        if rows:
            fault = self._requests.transfer("write", [opened.native], rows)
            if fault is not None:
                raise self._error_of("write", fault.errno, fault.path, (fault.offset, fault.length))
        position = whole
        with translated(self._draft, "write", name, needed_bytes=self._total_bytes):
            while position < length:
                position += os.pwrite(opened.end, memory.array[position:length].data, offset + position)
        with self._lock:  # noted after the write, as a sync during the write may have missed it
            self._touched.add(name)

    def sync(self) -> None:
        """Make all writes so far durable."""
        with self._lock:
            touched, self._touched = self._touched, set()
        for name in touched:
            with translated(self._draft, "fsync", name, needed_bytes=self._total_bytes):
                self._system.sync(self._open[name].end)

    def finish(self, name: str) -> None:
        """Sync and close a file that will not be written any more."""
        self.sync()
        if name in self._open:
            self._open.pop(name).descriptors.close()

    def open(self, name: str) -> None:
        """Open a file that `create` has created, unless it is open."""
        if name in self._open:
            return
        path, descriptors = self._draft / name, Descriptors()
        with translated(self._draft, "open", name):
            end = descriptors.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fd, alignment = end, 1
            is_direct = self._engines.settings("write").direct_at(self._total_bytes)
            if self._engines.alignment_to_write(is_direct) > 1:
                fd = descriptors.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
                alignment = BLOCK_BYTES
        self._open[name] = _OpenFile(descriptors, _native.File(fd=fd, path=str(path), alignment=alignment), end)

    def _error_of(self, operation: str, code: int, path: str, reach: tuple[int, int]) -> FlowstoneError:
        words = f"bytes {reach[0]}..{reach[0] + reach[1]}"
        return explain(self._draft, operation, code, path, reach=words, needed_bytes=self._total_bytes)

    @property
    def alignment(self) -> int:
        """BLOCK_BYTES if files are written with O_DIRECT, else 1."""
        return self._engines.alignment_to_write(self._engines.settings("write").direct_at(self._total_bytes))

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].descriptors.close()


class RequestEngine:
    """Reads and writes files in long requests. Can be used on any thread.

    Uses the first of these engines that the system allows: io_uring with registered memory, io_uring, POSIX threads.
    With registered memory, the kernel need not look up the pages of each request. But it counts as locked memory, which
    containers often limit.
    """

    def __init__(self) -> None:
        with_ring = [("io_uring", True), ("io_uring", False)] if _native.has_io_uring() else []
        self._backends = (*with_ring, ("posix", False))
        self._refused = 0  # how many engines the system has refused

    def transfer(
        self, direction: str, files: Sequence[_native.File], rows: Sequence[tuple[int, int, int, int]]
    ) -> _native.Fault | None:
        """Read or write all `rows`, each (position in `files`, offset in the file, address, length). Returns the first
        fault; None if there is none. Blocks.

        raises  StorageError  the system allows neither io_uring nor ordinary reads and writes on threads
        """
        columns = np.array(rows, np.uint64).T
        for number in range(self._refused, len(self._backends)):
            engine, registers = self._backends[number]
            try:
                return _native.run_requests(
                    backend="io_uring" if engine == "io_uring" else "posix",
                    direction="read" if direction == "read" else "write", queue_depth=QUEUE_DEPTH, files=files,
                    columns=(columns[0].astype(np.uint32), columns[1], columns[2], columns[3]), register=registers,
                )
            except OSError as error:
                if number == len(self._backends) - 1:
                    reason = error.errno or errno.EIO
                    raise explain(Path(), f"start the engine to {direction}", reason, "") from error
                self._refused = max(self._refused, number + 1)
        raise AssertionError("the last engine neither returned nor raised an error")


def merge_runs(runs: Sequence[FileRun]) -> tuple[list[FileRun], list[int]]:
    """Merge ranges whose gap is small. Returns the merged ranges, and, for each of `runs`, the position of its merged
    range.
    """
    merged: list[FileRun] = []
    owner = [0] * len(runs)
    for number in sorted(range(len(runs)), key=lambda number: (runs[number].file, runs[number].begin)):
        run = runs[number]
        last = merged[-1] if merged else None
        if last is not None and last.file == run.file and run.begin <= last.end + _GAP_BYTES:
            merged[-1] = FileRun(run.file, last.begin, max(last.end, run.end))
        else:
            merged.append(run)
        owner[number] = len(merged) - 1
    return merged, owner


def staging_bytes_max(length: int) -> int:
    """The most memory, in bytes, that a read of `length` bytes takes."""
    return length + 2 * BLOCK_BYTES + _GAP_BYTES


def _aligned_length(run: FileRun) -> int:
    return _round_up(run.end) - _round_down(run.begin)


def _round_up(n: int) -> int:
    return -(-n // BLOCK_BYTES) * BLOCK_BYTES


def _round_down(n: int) -> int:
    return n // BLOCK_BYTES * BLOCK_BYTES


def _shrank_error(path: str, offset: int, length: int) -> DamagedError:
    return DamagedError(
        f"{path} became shorter while it was read", range=f"bytes {offset}..{offset + length}",
        next="copy or download the file again",
    )
