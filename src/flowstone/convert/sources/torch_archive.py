"""Reads the zip archives of torch.save: finds the range of each storage in the file, without torch."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Mapping
from typing import BinaryIO

import msgspec

from flowstone.config import MIB
from flowstone.errors import DamagedError, FormatError, UnsupportedFormatError

_PICKLE_BYTES_MAX = 512 * MIB
_DIRECTORY_BYTES_MAX = 256 * MIB  # longest directory of an archive: names and offsets of two million storages
_LOCAL_BYTES = 30  # length of an entry's own header, without its name
_ZIP = b"PK\x03\x04"
_LEGACY = (b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19")


class ArchiveRange(msgspec.Struct, frozen=True):
    """A range of bytes in a file."""

    offset: int
    bytes: int


class Archive(msgspec.Struct, frozen=True):
    """The content of an archive: the pickle, and the ranges of the storages in the file (key of a storage -> range)."""

    content: bytes
    storages: Mapping[str, ArchiveRange]


class FileSlice(io.RawIOBase):
    """A range of a file, as a separate file object."""

    def __init__(self, file: BinaryIO, place: ArchiveRange) -> None:
        self._file, self._place, self._at = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.bytes}[whence]
        if base + offset < 0:
            raise OSError(22, "the position is before the beginning of the file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: bytearray | memoryview) -> int:  # type: ignore[override]
        length = max(0, min(len(target), self._place.bytes - self._at))
        self._file.seek(self._place.offset + self._at)
        content = self._file.read(length)
        target[: len(content)] = content
        self._at += len(content)
        return len(content)


class _BoundedReader(io.BufferedReader):
    """Limits the reads of zipfile, which reads an archive's directory in one call, with the length that the archive
    states.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _DIRECTORY_BYTES_MAX:
            raise ValueError(f"the directory of the zip archive takes {size} bytes, more than {_DIRECTORY_BYTES_MAX}")
        return super().read(size)


def read_archive(file: BinaryIO, place: ArchiveRange, path: str) -> Archive:
    """Read the archive in the range `place` of a file.

    raises  UnsupportedFormatError  this is not an archive of torch.save, or has an older format
            DamagedError            the archive is incomplete, or torch.save cannot have written it
    """
    part = FileSlice(file, place)
    start = bytearray(16)
    del start[part.readinto(start) :]
    if not bytes(start).startswith(_ZIP):
        raise _not_an_archive(bytes(start), path)
    try:
        part.seek(0)
        with zipfile.ZipFile(_BoundedReader(part)) as opened:
            return _read(opened, file, place, path)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, KeyError, OverflowError) as error:
        if isinstance(error, FormatError):
            raise
        raise DamagedError(
            f"{path} is truncated, or was not written by torch.save: {error!s:.200}", next="copy the file again"
        ) from error


def _read(opened: zipfile.ZipFile, file: BinaryIO, place: ArchiveRange, path: str) -> Archive:
    entries = opened.infolist()
    pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl") and entry.filename.count("/") == 1]
    if len(pickles) != 1:
        raise DamagedError(
            f"{path} has {len(pickles)} entries named data.pkl instead of one",
            next="save the file again with torch.save",
        )
    root = pickles[0].filename.removesuffix("data.pkl")
    names = {entry.filename: entry for entry in entries}
    if len(names) != len(entries):
        raise DamagedError(
            f"{path} has two entries with the same name, which torch.save never writes",
            next="save the file again with torch.save",
        )
    if f"{root}constants.pkl" in names or any(name.startswith(f"{root}code/") for name in names):
        raise UnsupportedFormatError(
            f"{path} is a TorchScript program", next="load it with torch.jit.load, and save its state_dict()"
        )
    marked = names.get(f"{root}byteorder")
    order = b"little" if marked is None else _bytes_of(file, place, marked, path).strip()
    if order != b"little":
        raise UnsupportedFormatError(
            f"{path} was written on a machine with another byte order", found=repr(order)[:40],
            next="load it with torch, and save it on this machine",
        )
    if pickles[0].file_size > _PICKLE_BYTES_MAX or pickles[0].compress_type != zipfile.ZIP_STORED:
        raise DamagedError(
            f"{path}: data.pkl is too large, or is compressed", next="save the file again with torch.save"
        )
    prefix = f"{root}data/"
    storages = {
        name.removeprefix(prefix): _range_of(file, place, entry, path)
        for name, entry in names.items() if name.startswith(prefix) and not name.endswith("/")
    }
    return Archive(_bytes_of(file, place, pickles[0], path), storages)


def _bytes_of(file: BinaryIO, place: ArchiveRange, entry: zipfile.ZipInfo, path: str) -> bytes:
    """The content of an entry, after a check of its CRC. A CRC of 0 is not checked, as torch writes that with
    `set_crc32_options(False)`.
    """
    stored = _range_of(file, place, entry, path)
    file.seek(stored.offset)
    content = file.read(stored.bytes)
    if entry.CRC and zlib.crc32(content) != entry.CRC:
        raise DamagedError(f"{path}: {entry.filename!r:.80} does not match its CRC", next="copy the file again")
    return content


def _range_of(file: BinaryIO, place: ArchiveRange, entry: zipfile.ZipInfo, path: str) -> ArchiveRange:
    """The range of an entry's bytes in the file."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise DamagedError(
            f"{path}: {entry.filename!r:.80} is compressed; torch.save never compresses",
            next="save the file again with torch.save",
        )
    file.seek(place.offset + entry.header_offset)
    header = file.read(_LOCAL_BYTES)
    if len(header) < _LOCAL_BYTES or not header.startswith(_ZIP):
        raise DamagedError(f"{path}: the entry {entry.filename!r:.80} has no header", next="copy the file again")
    skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = entry.header_offset + _LOCAL_BYTES + skipped
    if begin + entry.file_size > place.bytes:
        raise DamagedError(
            f"{path}: the entry {entry.filename!r:.80} ends after the end of the file", next="copy the file again"
        )
    return ArchiveRange(place.offset + begin, entry.file_size)


def _not_an_archive(start: bytes, path: str) -> FormatError:
    if not start.strip(b"\0"):
        return DamagedError(
            f"{path} {'begins with zeros' if start else 'is empty'}, as after a crash",
            expected="a zip archive", next="copy the file again, or use another checkpoint",
        )
    is_old = start.startswith(_LEGACY) or start[:1] == b"\x80"
    reason = "has the format of torch.save before 1.6" if is_old else "was not written by torch.save"
    remedy = "load it with torch, and save it again: torch.save(torch.load(path, weights_only=True), new_path)"
    return UnsupportedFormatError(f"{path} {reason}", expected="a zip archive", found=f"{start[:8]!r}", next=remedy)
