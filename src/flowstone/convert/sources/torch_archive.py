"""The zip archives that torch.save writes: where each storage lies, without torch."""

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
_DIRECTORY_BYTES_MAX = 256 * MIB  # of an archive: names and places of two million storages
_LOCAL_BYTES = 30  # of an entry's own header, before its name
_ZIP = b"PK\x03\x04"
_LEGACY = (b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19")


class Place(msgspec.Struct, frozen=True):
    """A run of bytes of a file."""

    offset: int
    bytes: int


class Archive(msgspec.Struct, frozen=True):
    """What is in an archive: the pickle, and where each storage lies in the file, by its key."""

    content: bytes
    storages: Mapping[str, Place]


class Slice(io.RawIOBase):
    """A part of a file as a file by itself."""

    def __init__(self, file: BinaryIO, place: Place) -> None:
        self._file, self._place, self._at = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.bytes}[whence]
        if base + offset < 0:
            raise OSError(22, "before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: bytearray | memoryview) -> int:  # type: ignore[override]
        length = max(0, min(len(target), self._place.bytes - self._at))
        self._file.seek(self._place.offset + self._at)
        found = self._file.read(length)
        target[: len(found)] = found
        self._at += len(found)
        return len(found)


class _Bounded(io.BufferedReader):
    """Limits zipfile's reads: it reads a whole directory at once, with the length that the archive states."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _DIRECTORY_BYTES_MAX:
            raise ValueError(f"its directory takes {size} bytes, more than {_DIRECTORY_BYTES_MAX}")
        return super().read(size)


def read_archive(file: BinaryIO, place: Place, path: str) -> Archive:
    """The archive that lies at a place of a file.

    raises  UnsupportedFormatError  what is there is no archive of torch's, or of an older kind
            DamagedError            it is torn, or not as torch writes it
    """
    part = Slice(file, place)
    start = bytearray(16)
    del start[part.readinto(start) :]
    if not bytes(start).startswith(_ZIP):
        raise _no_archive(bytes(start), path)
    try:
        part.seek(0)
        with zipfile.ZipFile(_Bounded(part)) as opened:
            return _read(opened, file, place, path)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, KeyError, OverflowError) as error:
        if isinstance(error, FormatError):
            raise
        raise DamagedError(
            f"{path} is torn, or no archive that torch.save wrote: {error!s:.200}", next="copy the file again"
        ) from error


def _read(opened: zipfile.ZipFile, file: BinaryIO, place: Place, path: str) -> Archive:
    entries = opened.infolist()
    pickles = [one for one in entries if one.filename.endswith("/data.pkl") and one.filename.count("/") == 1]
    if len(pickles) != 1:
        raise DamagedError(f"{path} has {len(pickles)} entries data.pkl, not one", next="save it with torch.save")
    root = pickles[0].filename.removesuffix("data.pkl")
    names = {one.filename: one for one in entries}
    if len(names) != len(entries):
        raise DamagedError(f"{path} has two entries of one name, which torch never writes", next="save it again")
    if f"{root}constants.pkl" in names or any(name.startswith(f"{root}code/") for name in names):
        raise UnsupportedFormatError(
            f"{path} is a TorchScript program", next="load it with torch.jit.load, and save its state_dict()"
        )
    marked = names.get(f"{root}byteorder")
    order = b"little" if marked is None else _bytes_of(file, place, marked, path).strip()
    if order != b"little":
        raise UnsupportedFormatError(
            f"{path} was written on a machine of another byte order", found=repr(order)[:40],
            next="load it with torch, and save it on this machine",
        )
    if pickles[0].file_size > _PICKLE_BYTES_MAX or pickles[0].compress_type != zipfile.ZIP_STORED:
        raise DamagedError(f"{path}: data.pkl is too long or compressed, which torch never does", next="save it again")
    prefix = f"{root}data/"
    storages = {
        name.removeprefix(prefix): _stored(file, place, one, path)
        for name, one in names.items() if name.startswith(prefix) and not name.endswith("/")
    }
    return Archive(_bytes_of(file, place, pickles[0], path), storages)


def _bytes_of(file: BinaryIO, place: Place, entry: zipfile.ZipInfo, path: str) -> bytes:
    """An entry, checked: but torch writes a CRC of 0 where `set_crc32_options(False)` was called, and reads none."""
    stored = _stored(file, place, entry, path)
    file.seek(stored.offset)
    found = file.read(stored.bytes)
    if entry.CRC and zlib.crc32(found) != entry.CRC:
        raise DamagedError(f"{path}: {entry.filename!r:.80} is not what was written", next="copy the file again")
    return found


def _stored(file: BinaryIO, place: Place, entry: zipfile.ZipInfo, path: str) -> Place:
    """Where the bytes of an entry lie in the file."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise DamagedError(f"{path}: {entry.filename!r:.80} is compressed, as torch never does", next="save it again")
    file.seek(place.offset + entry.header_offset)
    header = file.read(_LOCAL_BYTES)
    if len(header) < _LOCAL_BYTES or not header.startswith(_ZIP):
        raise DamagedError(f"{path}: {entry.filename!r:.80} has no header", next="copy the file again")
    skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = entry.header_offset + _LOCAL_BYTES + skipped
    if begin + entry.file_size > place.bytes:
        raise DamagedError(f"{path}: {entry.filename!r:.80} ends beyond the file", next="copy the file again")
    return Place(place.offset + begin, entry.file_size)


def _no_archive(start: bytes, path: str) -> FormatError:
    if not start.strip(b"\0"):
        return DamagedError(
            f"{path} {'begins with zeros' if start else 'is empty'}, as a crash leaves a file",
            expected="a zip archive", next="copy the file again, or take another checkpoint",
        )
    is_old = start.startswith(_LEGACY) or start[:1] == b"\x80"
    what = "is of the kind that torch.save wrote before 1.6" if is_old else "is no file that torch.save writes"
    remedy = "load it with torch, and save it again: torch.save(torch.load(path, weights_only=True), new_path)"
    return UnsupportedFormatError(f"{path} {what}", expected="a zip archive", found=f"{start[:8]!r}", next=remedy)
