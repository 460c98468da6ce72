"""A checkpoint's own files, checked against its manifest before their content is used."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from flowstone.commit.manifests import inside
from flowstone.config import CHUNK_BYTES, OBJECTS_BYTES_MAX, OBJECTS_CONTAINERS_MAX, READ_PART_BYTES
from flowstone.errors import DamagedError, StorageError, UnsupportedStateError
from flowstone.format import objects
from flowstone.format.bounds import containers
from flowstone.format.codec import announced
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
from flowstone.store.at_once import at_once
from flowstone.store.base import Names


class Objects(msgspec.Struct, frozen=True):
    """All values that are not tensors: section to value; in `per_rank`, section to one value per rank."""

    replicated: dict[str, object]
    per_rank: dict[str, list[object]]


class _Texts(msgspec.Struct, frozen=True):
    """The file as JSON: each value's own text."""

    replicated: dict[str, msgspec.Raw]
    per_rank: dict[str, list[msgspec.Raw]]


_TEXTS = msgspec.json.Decoder(_Texts)


def read_index(store: Names, directory: str, manifest: Manifest) -> Index:
    """The index, with every byte verified and every row checked."""
    return decoded_index(store, directory, manifest, index_text(store, directory, manifest))


def index_text(store: Names, directory: str, manifest: Manifest) -> bytearray:
    """The file of the index, verified."""
    path = f"{store.location}/{inside(directory, INDEX_NAME)}"
    with _memory_enough(path):
        return _vouched(
            store, directory, manifest.index, INDEX_NAME,
            check_first=lambda part: check_index_header(part, manifest.index.bytes, path=path),
        )


def decoded_index(store: Names, directory: str, manifest: Manifest, text: bytearray) -> Index:
    """The index that its file's bytes are, with every row checked."""
    path = f"{store.location}/{inside(directory, INDEX_NAME)}"
    with _memory_enough(path):
        return decode_index(
            memoryview(text).toreadonly(), segments=manifest.segments, path=path, is_delta=DELTA in manifest.critical,
            codecs=announced(manifest.critical), has_copies=COPIES in manifest.critical,
        )


def read_objects(store: Names, directory: str, manifest: Manifest, text: bytearray | None = None) -> Objects:
    """All values that are not tensors, verified and decoded. `text`: the file's, if it is read already."""
    path = f"{store.location}/{inside(directory, OBJECTS_NAME)}"
    with _memory_enough(path):
        return _decoded(objects_text(store, directory, manifest) if text is None else text, path)


def objects_text(store: Names, directory: str, manifest: Manifest) -> bytearray:
    """The file of all values that are not tensors, verified."""
    with _memory_enough(f"{store.location}/{inside(directory, OBJECTS_NAME)}"):
        return _vouched(store, directory, manifest.objects, OBJECTS_NAME)


def _decoded(data: bytearray, path: str) -> Objects:
    count = containers(data)
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
    return Objects(replicated, per_rank)


def encode_sections(sections: Mapping[str, object]) -> dict[str, bytes]:
    """The text of each section. Raises UnsupportedStateError naming the path of a value without an encoding."""
    return {name: bytes(objects.encode_text(value, name)) for name, value in sections.items()}


def join_objects(replicated: Mapping[str, bytes], per_rank: Mapping[str, Sequence[bytes]]) -> bytes:
    """The text of objects.json, from the sections' texts."""
    text = msgspec.json.encode({
        "replicated": {name: msgspec.Raw(text) for name, text in replicated.items()},
        "per_rank": {name: [msgspec.Raw(text) for text in texts] for name, texts in per_rank.items()},
    })
    count = containers(text)
    if count > OBJECTS_CONTAINERS_MAX or len(text) > OBJECTS_BYTES_MAX:
        raise UnsupportedStateError(
            f"the state has too many plain values for {OBJECTS_NAME}",
            expected=f"at most {OBJECTS_CONTAINERS_MAX} lists and dicts, and {OBJECTS_BYTES_MAX} bytes of text",
            found=f"{count} and {len(text)}", next="put long lists of numbers into a tensor or a numpy array",
        )
    return text


def check_segments(store: Names, directory: str, manifest: Manifest) -> None:
    """Each segment's size and header digest. Raises DamagedError or StorageError."""
    for row in manifest.segments:
        check_segment(store, directory, row)


def check_segment(store: Names, directory: str, row: SegmentRow) -> None:
    """The size of a segment, and the digest of its header. Raises DamagedError or StorageError."""
    path = inside(directory, row.name)

    def header() -> bytes:
        return store.read(path, length=row.header_bytes)

    _, text = at_once(store, [lambda: _check_size(store, path, row.bytes), header])
    found = digest(text or b"")
    if found != row.header_digest:
        raise DamagedError(
            f"the header of {store.location}/{path} is not what was written",
            range=f"bytes 0..{row.header_bytes}", expected=row.header_digest, found=found,
            next="restore the file from a copy, or load an older step",
        )


@contextmanager
def _memory_enough(path: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise StorageError(
            f"there is not enough memory to read {path}", errno=errno.ENOMEM,
            next="free some memory, or raise the limits on it (ulimit -v, memory.max)",
        ) from error


def _vouched(
    store: Names, directory: str, row: FileRow, expected_name: str,
    check_first: Callable[[bytes], None] | None = None,
) -> bytearray:
    """A file's bytes, verified against its chunk digests. It is read in parts: damage in the first part is found before
    memory for the whole length that the manifest claims is allocated.
    """
    if row.name != expected_name:
        raise DamagedError(f"the manifest names {row.name!r} instead of {expected_name!r}", next="use an older step")
    path = inside(directory, row.name)
    data = bytearray()
    while len(data) < row.bytes or not row.bytes:
        at, wanted = len(data), READ_PART_BYTES if data else CHUNK_BYTES
        length = min(wanted, row.bytes - at)
        is_last = at + length == row.bytes
        part = _part(store, path, row.bytes, at, length + is_last)  # a byte more: a file that is longer has one
        if len(part) != length:
            _check_size(store, path, row.bytes)
            _check_length(store, path, at + len(part), row.bytes)  # it has become shorter, or longer, meanwhile
        chunks = row.chunks[at // CHUNK_BYTES : -(-(at + len(part)) // CHUNK_BYTES)]
        check_chunks(part, chunks, path=f"{store.location}/{path}", offset=at)
        if at == 0 and check_first is not None:
            check_first(part)
        data += part
        if not row.bytes:
            break
    return data


def _part(store: Names, path: str, expected_bytes: int, offset: int, length: int) -> bytes:
    """Bytes of a file that should have `expected_bytes`. Raises DamagedError if there is none."""
    try:
        return store.read(path, offset=offset, length=length)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            _check_size(store, path, expected_bytes)
        raise


def _check_size(store: Names, path: str, expected_bytes: int) -> None:
    try:
        found = store.size(path)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise DamagedError(f"{store.location}/{path} is missing", next=(
            "it was saved on another path of a striped store: mount that path, or say where it is by fs.Striped"
            if path_of(path) else "restore the file from a copy, or load an older step"
        )) from error
    _check_length(store, path, found, expected_bytes)


def _check_length(store: Names, path: str, found: int, expected_bytes: int) -> None:
    if found != expected_bytes:
        raise DamagedError(
            f"{store.location}/{path} is too {'short' if found < expected_bytes else 'long'}",
            expected=f"{expected_bytes} bytes", found=f"{found} bytes",
            next="restore the file from a copy, or load an older step",
        )
