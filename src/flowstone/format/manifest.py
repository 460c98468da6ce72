"""The marker of a store (a file at its root), and a checkpoint's manifest, which commits it (docs/FORMAT.md, Marker and
Manifest).
"""

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
"""Critical feature: each chunk has its own location, possibly in a file of an earlier checkpoint."""

COPIES = "copies"
"""Critical feature: several chunks may share one location."""

PATHS = "paths"
"""Critical feature: segments may be on other paths of the store."""

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
    """A segment, which is a file of tensor data. `home`: the id of the earlier checkpoint that wrote it; None: this
    checkpoint wrote it.
    """

    id: int
    home: str | None
    name: str
    bytes: int
    header_bytes: int
    header_digest: str


class FileRow(msgspec.Struct, frozen=True):
    """A file of a checkpoint other than a segment: its name, its length in bytes, and the digests of its chunks."""

    name: str
    bytes: int
    chunks: tuple[str, ...]


class IoRecord(msgspec.Struct, frozen=True):
    """How the segments were written, for human readers. None: the writer did not record it.

    alignment     4096 if the writes bypassed the page cache (O_DIRECT), 1 if they went through it
    copied_bytes  bytes that were copied through the arena (staging memory)
    direct_bytes  bytes written without the arena, as earlier versions did (docs/decisions/011)
    origin        the source of those settings that the caller did not give: "default" or "tuned". "explicit": the
                  caller gave all
    explicit      names of the settings that the caller gave
    exact_bytes, sampled_bytes  of memory captured after `save` returned: bytes of which all changes would have been
                  detected (the kernel reports written pages; devices compare digests), and bytes of which only samples
                  were compared
    sampled_because  why only samples of some bytes were compared
    huge_bytes    how many of the exact_bytes were in huge pages of the host when `save` was called
    compress      which data rank 0 encoded, and why
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
    """A lossy codec of this checkpoint and its maximum error: `relative` to the element, and `of_block` relative to the
    largest element of the element's block.
    """

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


class _FormatVersion(msgspec.Struct):
    flowstone: int
    critical: tuple[str, ...] = ()


_Document = TypeVar("_Document", Marker, Manifest)


def _decode(data: bytes, kind: type[_Document], *, path: str) -> _Document:
    """Decode a document after checks of its digest, and then of its version: a newer version is reported as such,
    before its fields are misread.
    """
    text = verify_checksum(data, path=path)
    try:
        version = msgspec.json.decode(text, type=_FormatVersion)
        unknown = sorted(set(version.critical) - KNOWN_FEATURES)
        if version.flowstone > FORMAT_VERSION or unknown:
            features = "".join(f", critical feature {n!r:.80}" for n in unknown[:20])
            raise UnsupportedFormatError(
                f"{path} needs a newer version of Flowstone",
                expected=f"format version up to {FORMAT_VERSION}, features {sorted(KNOWN_FEATURES) or 'none'}",
                found=f"format version {version.flowstone}{features}", next="upgrade flowstone",
            )
        if version.flowstone < 1:
            raise msgspec.ValidationError(f"format version {version.flowstone} never existed")
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 raises ValueError
        raise DamagedError(
            f"{path} matches its digest, but its content is not valid: {error!s:.300}",
            next="a faulty writer made this file; use an older step",
        ) from error


def encode_marker(marker: Marker) -> bytes:
    return add_checksum(marker)


def decode_marker(data: bytes, *, path: str) -> Marker:
    marker = _decode(data, Marker, path=path)
    if not _is_printable(marker.store) or not _is_printable(marker.created):
        raise DamagedError(
            f"{path} is not valid: it contains text that is too long or not printable",
            next="restore the file from a copy",
        )
    return marker


def encode_manifest(manifest: Manifest) -> bytes:
    check_manifest(manifest, path=MANIFEST_NAME)
    return add_checksum(manifest)


def decode_manifest(data: bytes, *, path: str) -> Manifest:
    manifest = _decode(data, Manifest, path=path)
    check_manifest(manifest, path=path)
    return manifest


def check_manifest(manifest: Manifest, *, path: str) -> None:
    """Raise DamagedError for a manifest that contradicts itself or refers to files outside of its directory.

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
    faults += [f"segment {row.id} is listed at position {i}" for i, row in enumerate(manifest.segments) if row.id != i]
    for row in manifest.segments:
        if row.home is not None and DELTA not in manifest.critical:
            faults.append(
                f"segment {row.name!r} is from checkpoint {row.home!r:.80}, but the critical feature 'delta' is missing"
            )
        if not 8 <= row.header_bytes <= min(row.bytes, HEADER_BYTES_MAX):
            faults.append(f"segment {row.name!r} has {row.bytes} bytes, but a header of {row.header_bytes}")
    for file in (manifest.index, manifest.objects):
        if len(file.chunks) != -(-file.bytes // (1 << 20)):
            faults.append(f"{file.name!r} has {len(file.chunks)} digests for {file.bytes} bytes")
    for file, most in ((manifest.index, INDEX_BYTES_MAX), (manifest.objects, OBJECTS_BYTES_MAX)):
        if file.bytes > most:
            faults.append(f"{file.name!r} has {file.bytes} bytes, above the limit of {most}")
    if manifest.step < 0:
        faults.append(f"step {manifest.step} is negative")
    return faults + _faults_of_texts_and_numbers(manifest)


def _faults_of_texts_and_numbers(manifest: Manifest) -> list[str]:
    """Describes what is wrong with the manifest's texts (which are displayed) and numbers (which are used as sizes); []
    if nothing is.
    """
    faults = []
    texts = {name: getattr(manifest, name) for name in ("id", "store", "created", "writer")}
    texts |= {"io.backend": manifest.io.backend, "io.origin": manifest.io.origin or ""}
    texts |= {"io.explicit": "".join(manifest.io.explicit or ())}
    texts |= {f"the home of segment {row.id}": row.home for row in manifest.segments if row.home is not None}
    for name, text in texts.items():
        if not _is_printable(text):
            faults.append(f"{name} {text!r:.80} is not a short printable text")
    lossy = manifest.lossy or ()
    faults += [f"lossy codec {row.codec!r:.80} is unknown" for row in lossy if f"codec.{row.codec}" not in FEATURES]
    faults += [f"an error bound is negative: {row}" for row in lossy if not (row.relative >= 0 and row.of_block >= 0)]
    if manifest.step > STEP_MAX:
        faults.append(f"step {manifest.step} is above {STEP_MAX}")
    numbers = {name: getattr(manifest, name) for name in ("ranks", "tensors", "pieces", "data_bytes")}
    numbers["the bytes of all segments"] = sum(row.bytes for row in manifest.segments)
    numbers |= {f"io.{name}": getattr(manifest.io, name) for name in _IO_NUMBERS}
    wrong = [name for name, value in numbers.items() if value is not None and not 0 <= value < 1 << 63]
    return faults + [f"{name}: {numbers[name]} is not a valid number" for name in wrong]


def _is_printable(text: str) -> bool:
    """Whether the text can be shown safely in a terminal."""
    return len(text) <= TEXT_CHARS_MAX and text.isprintable()
