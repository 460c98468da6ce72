"""A checkpoint's own files, read and checked through its manifest before anything is believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from flowstone.commit.manifests import inside
from flowstone.config import OBJECTS_BYTES_MAX
from flowstone.errors import DamagedError
from flowstone.format import objects
from flowstone.format.digest import check_chunks, digest
from flowstone.format.index import Index, decode_index
from flowstone.format.manifest import (
    INDEX_NAME,
    OBJECTS_NAME,
    FileRow,
    Manifest,
)
from flowstone.store.base import Store


@dataclass(frozen=True, slots=True)
class Objects:
    """Everything that is not a tensor: section to value; in `per_rank`, section to one value a rank."""

    replicated: dict[str, object]
    per_rank: dict[str, list[object]]


def read_index(store: Store, directory: str, manifest: Manifest) -> Index:
    """The table of pieces, every byte of it verified and every row checked."""
    data = _vouched(store, directory, manifest.index, INDEX_NAME)
    return decode_index(data, segments=manifest.segments, path=f"{store.location}/{inside(directory, INDEX_NAME)}")


def read_objects(store: Store, directory: str, manifest: Manifest) -> Objects:
    """Everything that is not a tensor, verified and decoded."""
    if manifest.objects.bytes > OBJECTS_BYTES_MAX:
        raise DamagedError(f"{OBJECTS_NAME} claims {manifest.objects.bytes} bytes", next="use an older step")
    data = _vouched(store, directory, manifest.objects, OBJECTS_NAME)
    path = f"{store.location}/{inside(directory, OBJECTS_NAME)}"
    try:
        nodes = msgspec.json.decode(data)
        replicated = {name: objects.decode(node, name) for name, node in nodes["replicated"].items()}
        per_rank = {
            name: [objects.decode(node, name) for node in entries] for name, entries in nodes["per_rank"].items()
        }
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is not what its digest promises: {error}", next="use an older step") from error
    return Objects(replicated, per_rank)


def encode_sections(sections: Mapping[str, object]) -> dict[str, bytes]:
    """The text of each section. Raises UnsupportedStateError naming the path of what has no encoding."""
    return {name: bytes(objects.encode_text(value, name)) for name, value in sections.items()}


def join_objects(replicated: Mapping[str, bytes], per_rank: Mapping[str, Sequence[bytes]]) -> bytes:
    """The text of objects.json, of the texts of sections."""
    return msgspec.json.encode({
        "replicated": {name: msgspec.Raw(text) for name, text in replicated.items()},
        "per_rank": {name: [msgspec.Raw(text) for text in texts] for name, texts in per_rank.items()},
    })


def check_segments(store: Store, directory: str, manifest: Manifest) -> None:
    """Each segment's size and header digest. Raises DamagedError or StorageError."""
    for row in manifest.segments:
        path = inside(directory, row.name)
        _check_size(store, path, row.bytes)
        found = digest(store.read(path, length=row.header_bytes))
        if found != row.header_digest:
            raise DamagedError(
                f"the header of {store.location}/{path} is not what was written",
                range=f"bytes 0..{row.header_bytes}", expected=row.header_digest, found=found,
                next="restore the file from a copy, or load an older step",
            )


def _vouched(store: Store, directory: str, row: FileRow, expected_name: str) -> bytes:
    if row.name != expected_name:
        raise DamagedError(f"the manifest calls {expected_name} {row.name!r}", next="use an older step")
    path = inside(directory, row.name)
    _check_size(store, path, row.bytes)
    data = store.read(path, length=row.bytes)
    _check_length(store, path, len(data), row.bytes)  # again: a file can shrink after it was looked at
    check_chunks(data, row.chunks, path=f"{store.location}/{path}")
    return data


def _check_size(store: Store, path: str, expected_bytes: int) -> None:
    if not store.exists(path):
        raise DamagedError(
            f"{store.location}/{path} is missing", next="restore the file from a copy, or load an older step"
        )
    _check_length(store, path, store.size(path), expected_bytes)


def _check_length(store: Store, path: str, found: int, expected_bytes: int) -> None:
    if found != expected_bytes:
        raise DamagedError(
            f"{store.location}/{path} is too {'short' if found < expected_bytes else 'long'}",
            expected=f"{expected_bytes} bytes", found=f"{found} bytes",
            next="restore the file from a copy, or load an older step",
        )
