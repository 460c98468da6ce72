"""The layout of archives of torch.save (zip files without compression), which is planned before the content of their
storages is known.

Each storage is an entry that begins at a multiple of 64 bytes. Its CRC, computed from the copied bytes, follows the
entry (as a data descriptor), and is also in the directory at the end of the archive.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence

import msgspec

from flowstone.convert.layout import Extent

_ALIGNMENT = 64
_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64, _LOCATOR64, _DESCRIPTOR = b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08"
_VERSION, _VERSION64 = 20, 45
_UTF8, _DESCRIBED = 1 << 11, 1 << 3
_DATE = 0x21  # 1 January 1980, as torch writes it, so that the bytes are the same each time
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF


class ArchiveEntry(msgspec.Struct, frozen=True):
    """An entry of an archive: the bytes `literal`, or the output number `output` with `bytes` bytes."""

    name: str
    literal: bytes | None = None
    output: int | None = None
    bytes: int = 0

    @property
    def length(self) -> int:
        return self.bytes if self.literal is None else len(self.literal)


class _EntryPosition(msgspec.Struct, frozen=True):
    """An entry, the offset of its header, and the position of its CRC among all checksums."""

    entry: ArchiveEntry
    offset: int
    check: int | None


def lay_out_archive(entries: Sequence[ArchiveEntry], begin: int, checks: int) -> tuple[list[Extent], int]:
    """The extents (ranges of the file) of an archive that begins at offset `begin` of a file, and the offset of its
    end.

    checks  how many extents before the archive have a CRC
    """
    extents: list[Extent] = []
    placed: list[_EntryPosition] = []
    offset = begin
    for entry in entries:
        check = None
        if entry.output is not None and entry.length:
            check, checks = checks, checks + 1
        header = _local_header(entry, offset - begin)
        placed.append(_EntryPosition(entry, offset - begin, check))
        extents.append(Extent(offset, len(header), literal=header))
        offset += len(header)
        if entry.literal is not None:
            extents.append(Extent(offset, len(entry.literal), literal=entry.literal))
        elif entry.length:
            extents.append(Extent(offset, entry.length, output=entry.output))
        offset += entry.length
        describe = _descriptor(entry, check)
        length = len(describe([0] * checks))
        extents.append(Extent(offset, length, from_checks=describe))
        offset += length
    directory = _directory(placed, offset - begin)
    length = len(directory([0] * checks))
    extents.append(Extent(offset, length, from_checks=directory))
    return extents, offset + length


def _crc(entry: ArchiveEntry, check: int | None, checks: Sequence[int]) -> int:
    return zlib.crc32(entry.literal or b"") if check is None else checks[check]


def _local_header(entry: ArchiveEntry, offset: int) -> bytes:
    """The header before an entry's bytes. It is padded, so that the bytes begin at a multiple of 64 in the archive."""
    name, large = entry.name.encode(), entry.length >= _MAX32
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if large else b""
    begin = offset + 30 + len(name) + len(extra) + 4
    extra += struct.pack("<2sH", b"FB", -begin % _ALIGNMENT) + b"Z" * (-begin % _ALIGNMENT)
    size = _MAX32 if large else 0
    version = _VERSION64 if large else _VERSION
    return struct.pack(
        "<4s5H3I2H", _LOCAL, version, _UTF8 | _DESCRIBED, 0, 0, _DATE, 0, size, size, len(name), len(extra)
    ) + name + extra


def _descriptor(entry: ArchiveEntry, check: int | None) -> Callable[[Sequence[int]], bytes]:
    form = "<4sIQQ" if entry.length >= _MAX32 else "<4sIII"
    return lambda checks: struct.pack(form, _DESCRIPTOR, _crc(entry, check, checks), entry.length, entry.length)


def _directory(placed: Sequence[_EntryPosition], begin: int) -> Callable[[Sequence[int]], bytes]:
    """Returns a function that makes the directory at the end of the archive from all checksums. `begin`: the
    directory's offset in the archive.
    """

    def make(checks: Sequence[int]) -> bytes:
        entries = b"".join(_central(entry, checks) for entry in placed)
        count, length = len(placed), len(entries)
        end = b""
        if count >= _MAX16 or length >= _MAX32 or begin >= _MAX32:
            end += struct.pack(
                "<4sQ2H2I4Q", _END64, 44, _VERSION64, _VERSION64, 0, 0, count, count, length, begin
            ) + struct.pack("<4sIQI", _LOCATOR64, 0, begin + length, 1)
        end += struct.pack(
            "<4s4H2IH", _END, 0, 0, min(count, _MAX16), min(count, _MAX16), min(length, _MAX32), min(begin, _MAX32), 0
        )
        return entries + end

    return make


def _central(entry: _EntryPosition, checks: Sequence[int]) -> bytes:
    name, length = entry.entry.name.encode(), entry.entry.length
    large, far = length >= _MAX32, entry.offset >= _MAX32
    numbers = ([length, length] if large else []) + ([entry.offset] if far else [])
    extra = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    version = _VERSION64 if numbers else _VERSION
    size = _MAX32 if large else length
    return struct.pack(
        "<4s6H3I5H2I", _CENTRAL, version, version, _UTF8 | _DESCRIBED, 0, 0, _DATE,
        _crc(entry.entry, entry.check, checks), size, size, len(name), len(extra), 0, 0, 0, 0,
        _MAX32 if far else entry.offset,
    ) + name + extra
