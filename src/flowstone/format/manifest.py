"""The store's marker and the commit record (docs/FORMAT.md, Marker and Manifest)."""

from __future__ import annotations

import re
from collections import Counter
from typing import TypeVar

import msgspec

from flowstone.config import (
    FORMAT_VERSION,
    HEADER_BYTES_MAX,
    INDEX_BYTES_MAX,
    OBJECTS_BYTES_MAX,
    STEP_MAX,
    TEXT_CHARS_MAX,
)
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format.checksummed import add_checksum, verify_checksum
from flowstone.format.codec import FEATURES

MARKER_NAME = "flowstone.json"
MANIFEST_NAME = "manifest.json"
OBJECTS_NAME = "objects.json"
INDEX_NAME = "index.safetensors"

DELTA = "delta"
"""The critical feature of a checkpoint in which each chunk has a place of its own, maybe in an earlier one's file."""

COPIES = "copies"
"""The critical feature of one in which several chunks may have one place."""

PATHS = "paths"
"""The critical feature of one with segments that may lie on further paths of its store."""

KNOWN_FEATURES: frozenset[str] = frozenset({DELTA, COPIES, PATHS}) | FEATURES
"""Critical features that this reader knows."""

_IO_NUMBERS = (
    "alignment", "request_bytes", "queue_depth", "copied_bytes", "direct_bytes", "workers", "requests",
)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}", re.ASCII)


class Marker(msgspec.Struct, frozen=True):
    flowstone: int
    store: str
    created: str


class SegmentRow(msgspec.Struct, frozen=True):
    """One data file. `home`: the id of the earlier checkpoint that wrote it; None: this one has."""

    id: int
    home: str | None
    name: str
    bytes: int
    header_bytes: int
    header_digest: str


class FileRow(msgspec.Struct, frozen=True):
    """A file, with the digests of its chunks."""

    name: str
    bytes: int
    chunks: tuple[str, ...]


class IoRecord(msgspec.Struct, frozen=True):
    """How the segments were written; for people. None: the writer did not record it.

    alignment     4096: page cache bypassed; 1: through the page cache
    copied_bytes  through the arena; direct_bytes without it, which earlier writers did (docs/decisions/011)
    origin        of the settings that the caller did not give: "default" or "tuned"; "explicit" if all were given
    explicit      the settings that the caller gave, by name
    exact_bytes, sampled_bytes  of pieces captured after `save` had returned: bytes all of which were watched (by
                  written pages, or a device's digests), and those of which samples were; and the reason for sampling
    huge_bytes    of exact_bytes: in huge pages of the host when `save` was called
    compress      what was encoded, and why; of several ranks, that of rank 0
    """

    backend: str
    alignment: int
    request_bytes: int
    queue_depth: int
    copied_bytes: int
    direct_bytes: int = 0
    workers: int | None = None
    requests: int | None = None
    origin: str | None = None
    explicit: tuple[str, ...] | None = None
    exact_bytes: int | None = None
    sampled_bytes: int | None = None
    sampled_because: str | None = None
    huge_bytes: int | None = None
    compress: str | None = None


class LossyRow(msgspec.Struct, frozen=True):
    """A codec by which an element may be off by `relative` of itself, or by `of_block` of the largest of its block."""

    codec: str
    relative: float
    of_block: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The commit record: a checkpoint exists once this file is in place."""

    flowstone: int = FORMAT_VERSION
    critical: tuple[str, ...] = ()
    step: int
    id: str
    store: str
    created: str
    writer: str
    ranks: int
    segments: tuple[SegmentRow, ...]
    index: FileRow
    objects: FileRow
    tensors: int
    pieces: int
    data_bytes: int
    io: IoRecord
    lossy: tuple[LossyRow, ...] | msgspec.UnsetType = msgspec.UNSET


class _Version(msgspec.Struct):
    flowstone: int
    critical: tuple[str, ...] = ()


_Document = TypeVar("_Document", Marker, Manifest)


def _decode(data: bytes, kind: type[_Document], *, path: str) -> _Document:
    """Check the digest, then the version, then decode: a newer version is reported before its fields are misread."""
    text = verify_checksum(data, path=path)
    try:
        version = msgspec.json.decode(text, type=_Version)
        unknown = sorted(set(version.critical) - KNOWN_FEATURES)
        if version.flowstone > FORMAT_VERSION or unknown:
            features = "".join(f", critical feature {n!r:.80}" for n in unknown[:20])
            raise UnsupportedFormatError(
                f"{path} needs a newer reader",
                expected=f"format version up to {FORMAT_VERSION}, features {sorted(KNOWN_FEATURES) or 'none'}",
                found=f"format version {version.flowstone}{features}",
                next="upgrade flowstone",
            )
        if version.flowstone < 1:
            raise msgspec.ValidationError(f"format version {version.flowstone} never existed")
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 raises ValueError too
        raise DamagedError(
            f"{path} matches its digest, but its content is not valid: {error!s:.300}",
            next="a faulty writer made this file; use an older step",
        ) from error


def encode_marker(marker: Marker) -> bytes:
    return add_checksum(marker)


def decode_marker(data: bytes, *, path: str) -> Marker:
    marker = _decode(data, Marker, path=path)
    if not _is_shown(marker.store) or not _is_shown(marker.created):
        raise DamagedError(f"{path} is not valid: its text cannot be shown", next="restore the file from a copy")
    return marker


def encode_manifest(manifest: Manifest) -> bytes:
    check_manifest(manifest, path=MANIFEST_NAME)
    return add_checksum(manifest)


def decode_manifest(data: bytes, *, path: str) -> Manifest:
    manifest = _decode(data, Manifest, path=path)
    check_manifest(manifest, path=path)
    return manifest


def check_manifest(manifest: Manifest, *, path: str) -> None:
    """Raise for a manifest that contradicts itself or refers to files outside its directory.

    Called before writing and after reading.
    """
    for reason in _faults(manifest):
        raise DamagedError(f"{path} is not valid: {reason}", next="do not load this checkpoint; use an older step")


def _faults(manifest: Manifest) -> list[str]:
    faults = []
    files: tuple[SegmentRow | FileRow, ...] = (*manifest.segments, manifest.index, manifest.objects)
    faults += [f"{row.name!r:.80} is not a plain file name" for row in files if not _PLAIN_NAME.fullmatch(row.name)]
    counts = Counter(row.name for row in files)
    faults += [f"{name!r} is listed twice" for name, count in counts.items() if count > 1]
    faults += [f"{row.name!r} has {row.bytes} bytes" for row in files if row.bytes < 0]
    faults += [f"segment {row.id} is at position {at}" for at, row in enumerate(manifest.segments) if row.id != at]
    for row in manifest.segments:
        if row.home is not None and DELTA not in manifest.critical:
            faults.append(f"segment {row.name!r} is of {row.home!r:.80}, without the critical feature 'delta'")
        if not 8 <= row.header_bytes <= min(row.bytes, HEADER_BYTES_MAX):
            faults.append(f"segment {row.name!r} has a header of {row.header_bytes} in {row.bytes} bytes")
    for file in (manifest.index, manifest.objects):
        if len(file.chunks) != -(-file.bytes // (1 << 20)):
            faults.append(f"{file.name!r} has {len(file.chunks)} digests for {file.bytes} bytes")
    for file, most in ((manifest.index, INDEX_BYTES_MAX), (manifest.objects, OBJECTS_BYTES_MAX)):
        if file.bytes > most:
            faults.append(f"{file.name!r} has {file.bytes} bytes, and {most} at most")
    if manifest.step < 0:
        faults.append(f"step {manifest.step} is negative")
    return faults + _faults_of_words_and_numbers(manifest)


def _faults_of_words_and_numbers(manifest: Manifest) -> list[str]:
    """Faults in the texts that people see, and in the numbers used for sizes."""
    faults = []
    words = {name: getattr(manifest, name) for name in ("id", "store", "created", "writer")}
    words |= {"io.backend": manifest.io.backend, "io.origin": manifest.io.origin or ""}
    words |= {"io.explicit": "".join(manifest.io.explicit or ())}
    words |= {f"the home of segment {row.id}": row.home for row in manifest.segments if row.home is not None}
    for name, text in words.items():
        if not _is_shown(text):
            faults.append(f"{name} {text!r:.80} is not a short printable text")
    lossy = manifest.lossy or ()
    faults += [f"lossy codec {row.codec!r:.80} is unknown" for row in lossy if f"codec.{row.codec}" not in FEATURES]
    faults += [f"a bound of {row} is negative" for row in lossy if not (row.relative >= 0 and row.of_block >= 0)]
    if manifest.step > STEP_MAX:
        faults.append(f"step {manifest.step} is above {STEP_MAX}")
    numbers = {name: getattr(manifest, name) for name in ("ranks", "tensors", "pieces", "data_bytes")}
    numbers["the bytes of all segments"] = sum(row.bytes for row in manifest.segments)
    numbers |= {f"io.{name}": getattr(manifest.io, name) for name in _IO_NUMBERS}
    wrong = [name for name, value in numbers.items() if value is not None and not 0 <= value < 1 << 63]
    return faults + [f"{name}: {numbers[name]} is not a valid number" for name in wrong]


def _is_shown(text: str) -> bool:
    """Whether a terminal can show the text safely."""
    return len(text) <= TEXT_CHARS_MAX and text.isprintable()
