"""Safetensors headers: writing those of our segments, with reserved room, and strict parsing of any.

A safetensors file is 8 bytes of header length, a JSON header, and data without holes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flowstone.config import BLOCK_BYTES, HEADER_BYTES_MAX, NDIM_MAX
from flowstone.errors import DamagedError
from flowstone.format.digest import digest
from flowstone.table.box import Box
from flowstone.table.dtype import DType

PAD_PREFIX = "__pad__."
METADATA_KEY = "__metadata__"
CHUNKS_ENTRY = "__chunks__"
CHUNKS_HEADER_BYTES = BLOCK_BYTES
METADATA: Mapping[str, str] = {"format": "pt", "flowstone": "1"}
LENGTH_BYTES = 8
_LINKED_CHARS = len("from-0123456789abcdef-")  # before the name of a linked segment
_ON_PATH = re.compile(r"-path(\d{1,4})\.safetensors$", re.ASCII)
_PAD_ENTRY_BYTES = len(f',"{PAD_PREFIX}":{{"dtype":"U8","shape":[],"data_offsets":[,]}}')  # without its four numbers


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a header: `begin` and `end` in bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def entry_name(tensor: str, box: Box, shape: Sequence[int]) -> str:
    """The tensor's name if the box is the whole tensor, else the name with begin:end for each dimension."""
    return tensor if box == Box.whole(shape) else f"{tensor}{box}"


def segment_name(rank: int, number: int, path: int = 0) -> str:
    """The name of a rank's segment; `number`: among those of one save; `path`: of a store with several, where it is."""
    return f"rank-{rank:05d}" + (f".{number:04d}" if number else "") + (f"-path{path}" if path else "") + ".safetensors"


def path_of(name: str) -> int:
    """The number of the path that a segment was written for: 0, unless its name says another one."""
    found = _ON_PATH.search(name)
    return 0 if found is None else int(found[1])


def linked_name(home: str, name: str) -> str:
    """The name of a segment in a checkpoint that refers to it. `home`: identity of the one that wrote it."""
    return f"from-{digest(home.encode())}-{name}"


def written_as(name: str) -> str:
    """The name of a linked segment where it was written; of any other its own."""
    return name[_LINKED_CHARS * name.startswith("from-") :]


def is_of_rank(name: str, rank: int) -> bool:
    """Whether a segment, of whichever checkpoint, was written by that rank."""
    return written_as(name).startswith((f"rank-{rank:05d}.", f"rank-{rank:05d}-"))


def reserved(entry: str) -> bool:
    """Whether an entry of that name would be mistaken for padding, for all chunks, or for a header's metadata."""
    return entry in (METADATA_KEY, CHUNKS_ENTRY) or entry.startswith(PAD_PREFIX)


def entry_text(name: str, dtype: DType, shape: Sequence[int]) -> str:
    """An entry's JSON up to its offsets, which are known only once the bytes have been placed."""
    stored = (*shape, dtype.item_bytes) if dtype.as_bytes else tuple(shape)
    lengths = ",".join(map(str, stored))
    return f'{json.dumps(name, ensure_ascii=False)}:{{"dtype":"{dtype.stored}","shape":[{lengths}],"data_offsets":['


class Packed(msgspec.Struct, frozen=True):
    """The finished text of consecutive entries from `begin` to `end`, which no other entry moves."""

    text: str
    begin: int
    end: int


def pack_entries(texts: Iterable[str], lengths: Iterable[int], *, header_bytes: int, begin: int) -> Packed:
    """Consecutive entries of `lengths` bytes from offset `begin` in the file; `texts` from `entry_text`."""
    parts, at = [], begin - header_bytes
    for text, length in zip(texts, lengths, strict=True):
        parts.append(f"{text}{at},{at + length}]}}")
        at += length
    return Packed(",".join(parts), begin, header_bytes + at)


def reserve(text_bytes: int, *, entries: int, pads: int, file_bytes_max: int) -> int:
    """Bytes to reserve for a header (its length included): a multiple of BLOCK_BYTES.

    text_bytes      of the entries' texts, in UTF-8
    pads            upper bound of the number of padding entries
    file_bytes_max  upper bound of offsets
    """
    digits = len(str(file_bytes_max))
    fixed = LENGTH_BYTES + len(json.dumps({METADATA_KEY: METADATA})) + 2
    most = fixed + text_bytes + entries * (2 * digits + len(",,]}")) + pads * (_PAD_ENTRY_BYTES + 4 * digits)
    return -(-most // BLOCK_BYTES) * BLOCK_BYTES


def encode_header(
    rows: Iterable[tuple[str, int, int]], *, header_bytes: int, file_bytes: int, packed: Packed | None = None
) -> bytes:
    """The first `header_bytes` bytes of a segment.

    rows    (entry text, offset_bytes in the file, length in bytes), ascending, disjoint; gaps become padding entries
    packed  further entries, after all rows
    """
    parts = [json.dumps({METADATA_KEY: METADATA}, separators=(",", ":"))[:-1]]
    at, pads = header_bytes, 0

    def skip_to(offset: int) -> None:
        nonlocal pads
        assert offset >= at, "rows overlap or are not ascending"
        if offset > at:
            parts.append(_pad_entry(pads, at - header_bytes, offset - header_bytes))
            pads += 1

    for text, offset, length in rows:
        skip_to(offset)
        at = offset + length
        parts.append(f"{text}{offset - header_bytes},{at - header_bytes}]}}")
    if packed is not None and packed.text:
        skip_to(packed.begin)
        parts.append(packed.text)
        at = packed.end
    skip_to(file_bytes)
    header = (",".join(parts) + "}").encode()
    room = header_bytes - LENGTH_BYTES
    assert len(header) <= room, "a plan reserved too little for its header"
    return room.to_bytes(LENGTH_BYTES, "little") + header.ljust(room)


def encode_chunks_header(file_bytes: int) -> bytes:
    """The first CHUNKS_HEADER_BYTES of a segment that holds chunks, not pieces."""
    count = file_bytes - CHUNKS_HEADER_BYTES
    entry = {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}
    header = json.dumps({METADATA_KEY: METADATA, CHUNKS_ENTRY: entry}, separators=(",", ":")).encode()
    room = CHUNKS_HEADER_BYTES - LENGTH_BYTES
    return room.to_bytes(LENGTH_BYTES, "little") + header.ljust(room)


def _pad_entry(number: int, begin: int, end: int) -> str:
    return f'"{PAD_PREFIX}{number}":{{"dtype":"U8","shape":[{end - begin}],"data_offsets":[{begin},{end}]}}'


def parse_header(data: bytes | memoryview, *, path: str) -> tuple[dict[str, Entry], dict[str, str], int]:
    """Entries, metadata and the offset of the data, for the file that begins with `data`.

    Raises DamagedError if this is not a safetensors header. Checks offsets against each other (ascending, no holes, no
    overlap), not against the file's size.
    """
    try:
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        if len(data) < LENGTH_BYTES or length > HEADER_BYTES_MAX or LENGTH_BYTES + length > len(data):
            raise ValueError(f"a header of {length} bytes does not fit in {len(data)}")
        # Each entry is parsed with its exact type, so that other content allocates no memory.
        raw = _PARTS.decode(memoryview(data)[LENGTH_BYTES : LENGTH_BYTES + length])
        metadata = _METADATA.decode(raw.pop(METADATA_KEY, b"{}"))
        entries = [_entry(name, _FIELDS.decode(fields)) for name, fields in raw.items()]
        at = 0
        for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
            if entry.begin != at or entry.end < entry.begin:
                raise ValueError(f"{entry.name!r} begins at {entry.begin}, not at {at}")
            at = entry.end
    except (ValueError, RecursionError) as error:
        raise DamagedError(
            f"{path} has no valid safetensors header: {error!s:.300}", next="restore the file from a copy"
        ) from error
    return {entry.name: entry for entry in entries}, metadata, LENGTH_BYTES + length


class _Fields(msgspec.Struct, gc=False):
    """An entry as it is in the file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA = msgspec.json.Decoder(dict[str, str])
_FIELDS = msgspec.json.Decoder(_Fields)


def _entry(name: str, fields: _Fields) -> Entry:
    begin, end = fields.data_offsets
    if len(fields.shape) > NDIM_MAX + 1:  # what is stored as bytes has one more
        raise ValueError(f"entry {name!r:.80} has {len(fields.shape)} dimensions")
    numbers = (*fields.shape, begin, end)
    if min(numbers) < 0 or max(numbers) >= 1 << 63:
        raise ValueError(f"entry {name!r:.80} has a negative or too large number")
    return Entry(name, fields.dtype, fields.shape, begin, end)
