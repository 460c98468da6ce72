"""The store's marker and the commit record (docs/FORMAT.md, Marker and Manifest)."""

from __future__ import annotations

import re
from collections import Counter
from typing import TypeVar

import msgspec

from flowstone.config import FORMAT_VERSION
from flowstone.errors import DamagedError, UnsupportedFormatError
from flowstone.format.sealed import seal, unseal

MARKER_NAME = "flowstone.json"
MANIFEST_NAME = "manifest.json"
OBJECTS_NAME = "objects.json"
INDEX_NAME = "index.safetensors"

KNOWN_FEATURES: frozenset[str] = frozenset()
"""Critical features that this reader understands; version 1 has none."""

_STEP_DIRECTORY = re.compile(r"step-(\d{8,})", re.ASCII)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)


class Marker(msgspec.Struct, frozen=True):
    flowstone: int
    store: str
    created: str


class SegmentRow(msgspec.Struct, frozen=True):
    """One data file. `home` is null while the file lies in this checkpoint's own directory."""

    id: int
    home: str | None
    name: str
    bytes: int
    header_bytes: int
    header_digest: str


class FileRow(msgspec.Struct, frozen=True):
    """A file that the manifest vouches for, chunk by chunk."""

    name: str
    bytes: int
    chunks: tuple[str, ...]


class IoRecord(msgspec.Struct, frozen=True):
    """How the segments were written; for people. None: the writer did not say.

    alignment     4096: past the page cache, 1: through it
    copied_bytes  through the arena; direct_bytes from where they lay
    origin        of the settings that the caller left open: "default" or "tuned"; "explicit" when none was
    explicit      the settings that the caller gave, by name
    exact_bytes, sampled_bytes  of what was captured after `save` had returned: every write in between would have been
                  noticed, or some bytes were compared; and why not all the former
    """

    backend: str
    alignment: int
    request_bytes: int
    queue_depth: int
    copied_bytes: int
    direct_bytes: int
    workers: int | None = None
    requests: int | None = None
    origin: str | None = None
    explicit: tuple[str, ...] | None = None
    exact_bytes: int | None = None
    sampled_bytes: int | None = None
    sampled_because: str | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The commit record: a checkpoint exists once this is in place."""

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


class _Version(msgspec.Struct):
    flowstone: int
    critical: tuple[str, ...] = ()


def step_directory(step: int) -> str:
    return f"step-{step:08d}"


def step_of_directory(name: str) -> int | None:
    """The step that a directory's name stands for; None when it is no checkpoint's name."""
    match = _STEP_DIRECTORY.fullmatch(name)
    if match is None or step_directory(int(match[1])) != name:
        return None
    return int(match[1])


_Document = TypeVar("_Document", Marker, Manifest)


def _decode(data: bytes, kind: type[_Document], *, path: str) -> _Document:
    """Seal, then version, then fields: a newer version is named before its fields are misread."""
    text = unseal(data, path=path)
    try:
        version = msgspec.json.decode(text, type=_Version)
        unknown = sorted(set(version.critical) - KNOWN_FEATURES)
        if version.flowstone > FORMAT_VERSION or unknown:
            raise UnsupportedFormatError(
                f"{path} needs a newer reader",
                expected=f"format version up to {FORMAT_VERSION}, features {sorted(KNOWN_FEATURES) or 'none'}",
                found=f"format version {version.flowstone}" + "".join(f", critical feature {n!r}" for n in unknown),
                next="upgrade flowstone",
            )
        if version.flowstone < 1:
            raise msgspec.ValidationError(f"format version {version.flowstone} never existed")
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DamagedError(
            f"{path} is not what its seal promises: {error}",
            next="the file was made by a faulty writer; use an older step",
        ) from error


def encode_marker(marker: Marker) -> bytes:
    return seal(marker)


def decode_marker(data: bytes, *, path: str) -> Marker:
    return _decode(data, Marker, path=path)


def encode_manifest(manifest: Manifest) -> bytes:
    check_manifest(manifest, path=MANIFEST_NAME)
    return seal(manifest)


def decode_manifest(data: bytes, *, path: str) -> Manifest:
    manifest = _decode(data, Manifest, path=path)
    check_manifest(manifest, path=path)
    return manifest


def check_manifest(manifest: Manifest, *, path: str) -> None:
    """Refuse a manifest that contradicts itself or points outside its directory.

    Called before writing and after reading.
    """
    for reason in _faults(manifest):
        raise DamagedError(f"{path} is not valid: {reason}", next="do not load this checkpoint; use an older step")


def _faults(manifest: Manifest) -> list[str]:
    faults = []
    files: tuple[SegmentRow | FileRow, ...] = (*manifest.segments, manifest.index, manifest.objects)
    faults += [f"{row.name!r} is not a plain file name" for row in files if not _PLAIN_NAME.fullmatch(row.name)]
    counts = Counter(row.name for row in files)
    faults += [f"{name!r} is listed twice" for name, count in counts.items() if count > 1]
    faults += [f"{row.name!r} has {row.bytes} bytes" for row in files if row.bytes < 0]
    faults += [f"segment {row.id} is at position {at}" for at, row in enumerate(manifest.segments) if row.id != at]
    for row in manifest.segments:
        if row.home is not None:
            faults.append(f"segment {row.name!r} lies in {row.home!r}, without the critical feature 'delta'")
        if not 8 <= row.header_bytes <= row.bytes:
            faults.append(f"segment {row.name!r} has a header of {row.header_bytes} in {row.bytes} bytes")
    for file in (manifest.index, manifest.objects):
        if len(file.chunks) != -(-file.bytes // (1 << 20)):
            faults.append(f"{file.name!r} has {len(file.chunks)} digests for {file.bytes} bytes")
    if manifest.step < 0:
        faults.append(f"step {manifest.step} is negative")
    return faults
