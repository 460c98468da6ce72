"""Reads a checkpoint's own files, and checks them against its manifest before their content is used."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from flowstone.commit.manifests import path_inside
from flowstone.config import CHUNK_BYTES, OBJECTS_BYTES_MAX, OBJECTS_CONTAINERS_MAX, READ_PART_BYTES
from flowstone.errors import DamagedError, StorageError, UnsupportedStateError
from flowstone.format import objects
from flowstone.format.bounds import count_containers
from flowstone.format.codec import allowed_codecs
from flowstone.format.digest import check_chunks, digest
from flowstone.format.index import Index, check_index_header, decode_index
from flowstone.format.manifest import (
    COPIES,
    DELTA,
    INDEX_NAME,
    OBJECTS_NAME,
    FileRow,
    Manifest,
    SegmentRow,
)
from flowstone.format.segment import path_of
from flowstone.store.base import Names
from flowstone.store.run_concurrently import run_concurrently


class PlainObjects(msgspec.Struct, frozen=True):
    """All values that are not tensors: section -> value. `per_rank`: section -> one value for each rank."""

    replicated: dict[str, object]
    per_rank: dict[str, list[object]]


class _Texts(msgspec.Struct, frozen=True):
    """The file of all values that are not tensors, as parsed JSON in which each value is still text."""

    replicated: dict[str, msgspec.Raw]
    per_rank: dict[str, list[msgspec.Raw]]


_TEXTS = msgspec.json.Decoder(_Texts)


def read_index(store: Names, directory: str, manifest: Manifest) -> Index:
    """Read and decode the index. Every byte is verified, and every entry is checked."""
    return decode_index_bytes(store, directory, manifest, read_index_bytes(store, directory, manifest))


def read_index_bytes(store: Names, directory: str, manifest: Manifest) -> bytearray:
    """Read the bytes of the index file, and verify them."""
    path = f"{store.location}/{path_inside(directory, INDEX_NAME)}"
    with _memory_errors_reported(path):
        return _read_verified(
            store, directory, manifest.index, INDEX_NAME,
            check_first=lambda part: check_index_header(part, manifest.index.bytes, path=path),
        )


def decode_index_bytes(store: Names, directory: str, manifest: Manifest, text: bytearray) -> Index:
    """Decode the index from its file's bytes, and check every entry."""
    path = f"{store.location}/{path_inside(directory, INDEX_NAME)}"
    with _memory_errors_reported(path):
        return decode_index(
            memoryview(text).toreadonly(), segments=manifest.segments, path=path, is_delta=DELTA in manifest.critical,
            codecs=allowed_codecs(manifest.critical), has_copies=COPIES in manifest.critical,
        )


def read_objects(store: Names, directory: str, manifest: Manifest, text: bytearray | None = None) -> PlainObjects:
    """All values that are not tensors, verified and decoded. `text`: the file's bytes, if they were read already."""
    path = f"{store.location}/{path_inside(directory, OBJECTS_NAME)}"
    with _memory_errors_reported(path):
        return _decode_objects(read_objects_bytes(store, directory, manifest) if text is None else text, path)


def read_objects_bytes(store: Names, directory: str, manifest: Manifest) -> bytearray:
    """The verified bytes of the file that has all values that are not tensors."""
    with _memory_errors_reported(f"{store.location}/{path_inside(directory, OBJECTS_NAME)}"):
        return _read_verified(store, directory, manifest.objects, OBJECTS_NAME)


def _decode_objects(data: bytearray, path: str) -> PlainObjects:
    count = count_containers(data)
    if count > OBJECTS_CONTAINERS_MAX:
        raise DamagedError(
            f"{path} holds too many lists and dicts",
            expected=f"at most {OBJECTS_CONTAINERS_MAX}", found=count, next="use an older step",
        )
    try:
        texts = _TEXTS.decode(data)
        replicated = {name: objects.decode_text(text, name) for name, text in texts.replicated.items()}
        per_rank = {
            name: [objects.decode_text(text, name) for text in entries] for name, entries in texts.per_rank.items()
        }
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise DamagedError(
            f"{path} matches its digest, but its content is not valid: {error!s:.300}", next="use an older step"
        ) from error
    return PlainObjects(replicated, per_rank)


def encode_sections(sections: Mapping[str, object]) -> dict[str, bytes]:
    """The JSON of each section. Raises UnsupportedStateError, with the path of the value, if a value cannot be encoded.
    """
    return {name: bytes(objects.encode_text(value, name)) for name, value in sections.items()}


def join_objects(replicated: Mapping[str, bytes], per_rank: Mapping[str, Sequence[bytes]]) -> bytes:
    """The content of the file objects.json, from the JSON of each section."""
    text = msgspec.json.encode({
        "replicated": {name: msgspec.Raw(text) for name, text in replicated.items()},
        "per_rank": {name: [msgspec.Raw(text) for text in texts] for name, texts in per_rank.items()},
    })
    count = count_containers(text)
    if count > OBJECTS_CONTAINERS_MAX or len(text) > OBJECTS_BYTES_MAX:
        raise UnsupportedStateError(
            f"the state has too many plain values for {OBJECTS_NAME}",
            expected=f"at most {OBJECTS_CONTAINERS_MAX} lists and dicts, and {OBJECTS_BYTES_MAX} bytes of text",
            found=f"{count} and {len(text)}", next="put long lists of numbers into a tensor or a numpy array",
        )
    return text


def check_segments(store: Names, directory: str, manifest: Manifest) -> None:
    """Check each segment's size and header digest. Raises DamagedError or StorageError."""
    for row in manifest.segments:
        check_segment(store, directory, row)


def check_segment(store: Names, directory: str, row: SegmentRow) -> None:
    """Check the size of a segment, and the digest of its header. Raises DamagedError or StorageError."""
    path = path_inside(directory, row.name)

    def header() -> bytes:
        return store.read(path, length=row.header_bytes)

    _, text = run_concurrently(store, [lambda: _check_size(store, path, row.bytes), header])
    actual = digest(text or b"")
    if actual != row.header_digest:
        raise DamagedError(
            f"the header of {store.location}/{path} does not match its digest",
            range=f"bytes 0..{row.header_bytes}", expected=row.header_digest, found=actual,
            next="restore the file from a copy, or load an older step",
        )


@contextmanager
def _memory_errors_reported(path: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise StorageError(
            f"there is not enough memory to read {path}", errno=errno.ENOMEM,
            next="free some memory, or raise the memory limits (ulimit -v, memory.max)",
        ) from error


def _read_verified(
    store: Names, directory: str, row: FileRow, expected_name: str,
    check_first: Callable[[bytes], None] | None = None,
) -> bytearray:
    """Read a file, and verify its bytes against the digests of its chunks. The file is read in parts, so that damage in
    the first part is found before memory for the whole file is allocated. `check_first` is called with the first part.
    """
    if row.name != expected_name:
        raise DamagedError(
            f"the manifest in {store.location}/{directory} names the file {row.name!r} instead of {expected_name!r}",
            next="use an older step",
        )
    path = path_inside(directory, row.name)
    data = bytearray()
    while len(data) < row.bytes or not row.bytes:
        offset, part_bytes = len(data), READ_PART_BYTES if data else CHUNK_BYTES
        length = min(part_bytes, row.bytes - offset)
        is_last = offset + length == row.bytes
        # reads one more byte at the end, to notice a longer file
        part = _read_part(store, path, row.bytes, offset, length + is_last)
        if len(part) != length:
            _check_size(store, path, row.bytes)
            _check_length(store, path, offset + len(part), row.bytes)  # the file's length has changed meanwhile
        chunks = row.chunks[offset // CHUNK_BYTES : -(-(offset + len(part)) // CHUNK_BYTES)]
        check_chunks(part, chunks, path=f"{store.location}/{path}", offset=offset)
        if offset == 0 and check_first is not None:
            check_first(part)
        data += part
        if not row.bytes:
            break
    return data


def _read_part(store: Names, path: str, expected_bytes: int, offset: int, length: int) -> bytes:
    """Part of a file that should have `expected_bytes`. Raises DamagedError if the file is missing."""
    try:
        return store.read(path, offset=offset, length=length)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            _check_size(store, path, expected_bytes)
        raise


def _check_size(store: Names, path: str, expected_bytes: int) -> None:
    try:
        size = store.size(path)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise DamagedError(f"{store.location}/{path} is missing", next=(
            "this file is on another path of a striped store: mount that path, or give its new path in fs.Striped"
            if path_of(path) else "restore the file from a copy, or load an older step"
        )) from error
    _check_length(store, path, size, expected_bytes)


def _check_length(store: Names, path: str, size: int, expected_bytes: int) -> None:
    if size != expected_bytes:
        raise DamagedError(
            f"{store.location}/{path} is too {'short' if size < expected_bytes else 'long'}",
            expected=f"{expected_bytes} bytes", found=f"{size} bytes",
            next="restore the file from a copy, or load an older step",
        )
