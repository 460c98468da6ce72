"""Runs of files into memory and out of it: long aligned requests by the native engine, past the page cache where that
works; and the unaligned end of a file through the page cache."""

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

_OPEN_FILES_MAX = 16  # of one reader; a diff has eight, and a file may take two descriptors: 256 in all
REQUEST_BYTES = 8 * MIB
QUEUE_DEPTH = 16
_GAP_BYTES = 64 * KIB  # between two runs that are read as one


class AlignedMemory:
    """Memory of its own pages, for requests past the page cache; `array` is its bytes."""

    def __init__(self, length: int) -> None:
        # Private: huge pages of shared memory are a setting of their own, which most systems have off.
        self._map = mmap.mmap(-1, max(BLOCK_BYTES, _round_up(length)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # where there are none: requests of small pages cost more
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class Run(msgspec.Struct, frozen=True):
    """Bytes [begin, end) of a file, by its position."""

    file: int
    begin: int
    end: int


class _Open(msgspec.Struct, frozen=True, eq=False):
    """A file that is open; `end` is a descriptor through the page cache, for what is not aligned."""

    descriptors: Descriptors
    native: _native.File
    end: int


def backend() -> str:
    """How requests are made: io_uring where the system allows it, else by POSIX threads."""
    return "io_uring" if _native.has_io_uring() else "posix"


class Reads:
    """Reads runs of the source's files. One thread at a time. Keeps a few files open."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files, self._requests = files, Requests()
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._engines: dict[Path, EngineChoice] = {}

    def read(self, runs: Sequence[Run], memory: AlignedMemory) -> list[NDArray[np.uint8]]:
        """The bytes of each run, in `memory`, which has room for them (`room`). Valid until the next call.

        raises  StorageError; DamagedError where a file has become shorter
        """
        merged, owner = merge(runs)
        at, begins = 0, []
        for one in merged:
            begins.append(at)
            at += _aligned_length(one)
        assert at <= len(memory.array), "a batch is larger than the memory that it is read into"
        for batch_begin in range(0, len(merged), _OPEN_FILES_MAX):
            part = slice(batch_begin, batch_begin + _OPEN_FILES_MAX)
            self._read(merged[part], begins[part], memory)
        found = []
        for run, which in zip(runs, owner, strict=True):
            start = begins[which] + run.begin - _round_down(merged[which].begin)
            found.append(memory.array[start : start + run.end - run.begin])
        return found

    def _read(self, runs: Sequence[Run], begins: Sequence[int], memory: AlignedMemory) -> None:
        numbers: dict[int, int] = {}
        rows: list[tuple[int, int, int, int]] = []
        opened: list[_Open] = []
        ends = []
        for run, at in zip(runs, begins, strict=True):
            decoded = self._files[run.file].decoded
            if decoded is not None:
                start = at + run.begin - _round_down(run.begin)
                decoded.read(run.begin, memory.array[start : start + run.end - run.begin])
                continue
            if run.file not in numbers:
                numbers[run.file] = len(opened)
                opened.append(self._opened(run.file))
            size = self._files[run.file].bytes
            begin, end = _round_down(run.begin), min(_round_up(run.end), _round_down(size))
            rows += [
                (numbers[run.file], start, memory.address + at + start - begin, min(REQUEST_BYTES, end - start))
                for start in range(begin, end, REQUEST_BYTES)
            ]
            if run.end > end:
                ends.append((run, max(begin, end), at + max(begin, end) - begin))
        if rows:
            self._request([one.native for one in opened], rows)
        for run, begin, at in ends:
            self._read_end(opened[numbers[run.file]], run, begin, memory.array[at : at + run.end - begin])

    def _request(self, files: Sequence[_native.File], rows: Sequence[tuple[int, int, int, int]]) -> None:
        fault = self._requests.move("read", files, rows)
        if fault is not None:
            if fault.operation == "end of file":
                raise _shorter(fault.path, fault.offset, fault.length)
            reach = f"bytes {fault.offset}..{fault.offset + fault.length}"
            raise explain(Path(fault.path).parent, "read", fault.errno, fault.path, reach=reach)

    def _read_end(self, opened: _Open, run: Run, begin: int, target: NDArray[np.uint8]) -> None:
        path = Path(self._files[run.file].path)
        at = 0
        with translated(path.parent, "read", path.name):
            while at < len(target):
                got = os.preadv(opened.end, [target[at:].data], begin + at)
                if got == 0:
                    raise _shorter(str(path), begin + at, len(target) - at)
                at += got

    def _opened(self, number: int) -> _Open:
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
            found = os.fstat(end)
        if found.st_size != self._files[number].bytes:
            raise DamagedError(
                f"{path} has changed since it was looked at", expected=f"{self._files[number].bytes} bytes",
                found=f"{found.st_size} bytes", next="convert it once nothing writes into it any more",
            )
        native = _native.File(fd=fd, path=str(path), alignment=alignment)
        self._open[number] = _Open(descriptors, native, end)
        return self._open[number]

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].descriptors.close()


class Writes:
    """Writes windows of a target's files, which get their full size first.

    Threads may write at once, and while another syncs: what is written before a sync begins is durable after it. A file
    is opened and finished by one thread, before its first write and after its last.
    """

    def __init__(self, draft: Path, total_bytes: int) -> None:
        self._draft, self._requests, self._system = draft, Requests(), System()
        self._total_bytes = total_bytes
        self._engines = EngineChoice(draft, EngineOptions())
        self._open: dict[str, _Open] = {}
        self._touched: set[str] = set()
        self._lock = threading.Lock()

    def create(self, name: str, length: int) -> None:
        """Make a file of its full size: a full disk is found before a byte is written."""
        path = self._draft / name
        with translated(self._draft, "create", name, needed_bytes=self._total_bytes):
            fd = self._system.create(path, os.O_RDWR | os.O_EXCL)
            try:
                self._system.reserve(fd, length)
                self._system.sync(fd)
            finally:
                os.close(fd)

    def make_directories(self, names: Sequence[str]) -> None:
        """Make directories in the draft, those that are missing; each comes after the one that it is in."""
        for name in names:
            with translated(self._draft, "make", name), contextlib.suppress(FileExistsError):
                self._system.make_directory(self._draft / name)

    def write(self, name: str, offset: int, memory: AlignedMemory, length: int) -> None:
        """Put the first `length` bytes of `memory` at `offset`, a multiple of BLOCK_BYTES. Durable after `sync`."""
        opened = self._open[name]
        whole = _round_down(length)
        rows = [
            (0, offset + at, memory.address + at, min(REQUEST_BYTES, whole - at))
            for at in range(0, whole, REQUEST_BYTES)
        ]
        if rows:
            fault = self._requests.move("write", [opened.native], rows)
            if fault is not None:
                raise self._explained("write", fault.errno, fault.path, (fault.offset, fault.length))
        at = whole
        with translated(self._draft, "write", name, needed_bytes=self._total_bytes):
            while at < length:
                at += os.pwrite(opened.end, memory.array[at:length].data, offset + at)
        with self._lock:  # now, not before: a sync meanwhile may have missed it
            self._touched.add(name)

    def sync(self) -> None:
        """Make all that is written durable."""
        with self._lock:
            touched, self._touched = self._touched, set()
        for name in touched:
            with translated(self._draft, "fsync", name, needed_bytes=self._total_bytes):
                self._system.sync(self._open[name].end)

    def finished(self, name: str) -> None:
        """Nothing more will be written into that file. Makes durable what was."""
        self.sync()
        if name in self._open:
            self._open.pop(name).descriptors.close()

    def open(self, name: str) -> None:
        """Open a file that was created; nothing where it is open."""
        if name in self._open:
            return
        path, descriptors = self._draft / name, Descriptors()
        with translated(self._draft, "open", name):
            end = descriptors.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fd, alignment = end, 1
            wanted = self._engines.settings("write").direct_at(self._total_bytes)
            if self._engines.alignment_to_write(wanted) > 1:
                fd = descriptors.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
                alignment = BLOCK_BYTES
        self._open[name] = _Open(descriptors, _native.File(fd=fd, path=str(path), alignment=alignment), end)

    def _explained(self, operation: str, code: int, path: str, reach: tuple[int, int]) -> FlowstoneError:
        words = f"bytes {reach[0]}..{reach[0] + reach[1]}"
        return explain(self._draft, operation, code, path, reach=words, needed_bytes=self._total_bytes)

    @property
    def alignment(self) -> int:
        """BLOCK_BYTES where files are written past the page cache, else 1."""
        return self._engines.alignment_to_write(self._engines.settings("write").direct_at(self._total_bytes))

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].descriptors.close()


class Requests:
    """Moves bytes between files and memory in long requests. Any thread.

    The first of these that the system allows: a ring with registered memory, a ring, POSIX threads. With registered
    memory the kernel does not look up the pages of each request. It counts as locked memory, of which containers often
    allow little.
    """

    def __init__(self) -> None:
        with_ring = [("io_uring", True), ("io_uring", False)] if _native.has_io_uring() else []
        self._ways = (*with_ring, ("posix", False))
        self._refused = 0  # so many of them

    def move(
        self, direction: str, files: Sequence[_native.File], rows: Sequence[tuple[int, int, int, int]]
    ) -> _native.Fault | None:
        """Move rows of (file, offset, address, length); returns the first fault. Blocks.

        raises  StorageError where the system allows none of these
        """
        columns = np.array(rows, np.uint64).T
        for number in range(self._refused, len(self._ways)):
            engine, registers = self._ways[number]
            try:
                return _native.run_requests(
                    backend="io_uring" if engine == "io_uring" else "posix",
                    direction="read" if direction == "read" else "write", queue_depth=QUEUE_DEPTH, files=files,
                    file=columns[0].astype(np.uint32), offset=np.ascontiguousarray(columns[1]),
                    address=np.ascontiguousarray(columns[2]), length=np.ascontiguousarray(columns[3]),
                    register=registers,
                )
            except OSError as error:
                if number == len(self._ways) - 1:
                    reason = error.errno or errno.EIO
                    raise explain(Path(), f"start the engine to {direction}", reason, "") from error
                self._refused = max(self._refused, number + 1)
        raise AssertionError("the last one returns or raises")


def merge(runs: Sequence[Run]) -> tuple[list[Run], list[int]]:
    """Runs that lie close to each other as one; and of each of `runs`, which of these it is in."""
    merged: list[Run] = []
    owner = [0] * len(runs)
    for at in sorted(range(len(runs)), key=lambda at: (runs[at].file, runs[at].begin)):
        run = runs[at]
        last = merged[-1] if merged else None
        if last is not None and last.file == run.file and run.begin <= last.end + _GAP_BYTES:
            merged[-1] = Run(run.file, last.begin, max(last.end, run.end))
        else:
            merged.append(run)
        owner[at] = len(merged) - 1
    return merged, owner


def room(length: int) -> int:
    """How much of the memory a run of so many bytes takes at most."""
    return length + 2 * BLOCK_BYTES + _GAP_BYTES


def _aligned_length(run: Run) -> int:
    return _round_up(run.end) - _round_down(run.begin)


def _round_up(n: int) -> int:
    return -(-n // BLOCK_BYTES) * BLOCK_BYTES


def _round_down(n: int) -> int:
    return n // BLOCK_BYTES * BLOCK_BYTES


def _shorter(path: str, offset: int, length: int) -> DamagedError:
    return DamagedError(
        f"{path} became shorter while it was read", range=f"bytes {offset}..{offset + length}",
        next="copy or download the file again",
    )
