"""Safetensors headers: writing the headers of segments into reserved space, and strict parsing of any header.

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
# length of the prefix in the name of a segment that is linked from an earlier checkpoint
_LINKED_CHARS = len("from-0123456789abcdef-")
_ON_PATH = re.compile(r"-path(\d{1,4})\.safetensors$", re.ASCII)
# length of a padding entry without its four numbers
_PAD_ENTRY_BYTES = len(f',"{PAD_PREFIX}":{{"dtype":"U8","shape":[],"data_offsets":[,]}}')


class HeaderEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a header. `begin` and `end`: the range of the tensor's bytes, counted from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def entry_name(tensor: str, box: Box, shape: Sequence[int]) -> str:
    """The name of a header entry for a part of a tensor. It is the tensor's name if the box is the full tensor;
    otherwise begin:end of each dimension is added.
    """
    return tensor if box == Box.whole(shape) else f"{tensor}{box}"


def segment_name(rank: int, number: int, path: int = 0) -> str:
    """The name of a rank's segment. `number`: the segment's number within one save. `path`: the number of the segment's
    path (disk) in a striped store.
    """
    return f"rank-{rank:05d}" + (f".{number:04d}" if number else "") + (f"-path{path}" if path else "") + ".safetensors"


def path_of(name: str) -> int:
    """The number of the path (disk) of a striped store for which a segment was written, from the segment's name; 0 for
    other stores.
    """
    match = _ON_PATH.search(name)
    return 0 if match is None else int(match[1])


def linked_name(home: str, name: str) -> str:
    """The name that a segment has in a later checkpoint which refers to it. `home`: the id of the checkpoint that wrote
    it.
    """
    return f"from-{digest(home.encode())}-{name}"


def original_name(name: str) -> str:
    """The name under which a segment was written, given its name in a later checkpoint. Any other name is returned
    unchanged.
    """
    return name[_LINKED_CHARS * name.startswith("from-") :]


def is_of_rank(name: str, rank: int) -> bool:
    """Whether this rank wrote a segment, possibly in an earlier checkpoint. `name`: the name of the segment."""
    return original_name(name).startswith((f"rank-{rank:05d}.", f"rank-{rank:05d}-"))


def is_reserved(entry: str) -> bool:
    """Whether readers would take an entry with this name for padding, for the entry of chunks, or for metadata."""
    return entry in (METADATA_KEY, CHUNKS_ENTRY) or entry.startswith(PAD_PREFIX)


def entry_text(name: str, dtype: DType, shape: Sequence[int]) -> str:
    """The first part of an entry's JSON, up to its offsets. These are known only once the bytes have been placed in the
    file.
    """
    stored = (*shape, dtype.item_bytes) if dtype.as_bytes else tuple(shape)
    lengths = ",".join(map(str, stored))
    return f'{json.dumps(name, ensure_ascii=False)}:{{"dtype":"{dtype.stored}","shape":[{lengths}],"data_offsets":['


class PackedEntries(msgspec.Struct, frozen=True):
    """The header's JSON for consecutive tensors, whose bytes fill the data from offset `begin` to `end`. This text does
    not depend on other entries.
    """

    text: str
    begin: int
    end: int


def pack_entries(texts: Iterable[str], lengths: Iterable[int], *, header_bytes: int, begin: int) -> PackedEntries:
    """The header's JSON for tensors that are stored one after the other from offset `begin` of the file.

    texts    for each tensor, the first part of its entry, from `entry_text`
    lengths  the length of each tensor in bytes
    """
    parts, offset = [], begin - header_bytes
    for text, length in zip(texts, lengths, strict=True):
        parts.append(f"{text}{offset},{offset + length}]}}")
        offset += length
    return PackedEntries(",".join(parts), begin, header_bytes + offset)


def header_bytes_needed(text_bytes: int, *, entries: int, pads: int, file_bytes_max: int) -> int:
    """How many bytes to reserve for a header, including the 8 bytes of its length. The result is a multiple of
    BLOCK_BYTES.

    text_bytes      length of the entries' texts in UTF-8
    pads            upper bound of the number of padding entries
    file_bytes_max  upper bound of offsets
    """
    digits = len(str(file_bytes_max))
    fixed = LENGTH_BYTES + len(json.dumps({METADATA_KEY: METADATA})) + 2
    most = fixed + text_bytes + entries * (2 * digits + len(",,]}")) + pads * (_PAD_ENTRY_BYTES + 4 * digits)
    return -(-most // BLOCK_BYTES) * BLOCK_BYTES


def encode_header(
    rows: Iterable[tuple[str, int, int]], *, header_bytes: int, file_bytes: int, packed: PackedEntries | None = None
) -> bytes:
    """The first `header_bytes` bytes of a segment.

    rows    for each tensor: (text of its entry, offset in the file, length in bytes), by ascending offset. Gaps between
            them become padding entries
    packed  further entries, after all rows
    """
    parts = [json.dumps({METADATA_KEY: METADATA}, separators=(",", ":"))[:-1]]
    end, pads = header_bytes, 0

    def skip_to(offset: int) -> None:
        nonlocal pads
        assert offset >= end, "rows overlap or are not ascending"
        if offset > end:
            parts.append(_pad_entry(pads, end - header_bytes, offset - header_bytes))
            pads += 1

    for text, offset, length in rows:
        skip_to(offset)
        end = offset + length
        parts.append(f"{text}{offset - header_bytes},{end - header_bytes}]}}")
    if packed is not None and packed.text:
        skip_to(packed.begin)
        parts.append(packed.text)
        end = packed.end
    skip_to(file_bytes)
    header = (",".join(parts) + "}").encode()
    text_bytes = header_bytes - LENGTH_BYTES
    assert len(header) <= text_bytes, "a plan reserved too little for its header"
    return text_bytes.to_bytes(LENGTH_BYTES, "little") + header.ljust(text_bytes)


def encode_chunks_header(file_bytes: int) -> bytes:
    """The first CHUNKS_HEADER_BYTES bytes of a segment that holds chunks in any order, instead of tensors."""
    count = file_bytes - CHUNKS_HEADER_BYTES
    entry = {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}
    header = json.dumps({METADATA_KEY: METADATA, CHUNKS_ENTRY: entry}, separators=(",", ":")).encode()
    text_bytes = CHUNKS_HEADER_BYTES - LENGTH_BYTES
    return text_bytes.to_bytes(LENGTH_BYTES, "little") + header.ljust(text_bytes)


def _pad_entry(number: int, begin: int, end: int) -> str:
    return f'"{PAD_PREFIX}{number}":{{"dtype":"U8","shape":[{end - begin}],"data_offsets":[{begin},{end}]}}'


def parse_header(data: bytes | memoryview, *, path: str) -> tuple[dict[str, HeaderEntry], dict[str, str], int]:
    """Parse the header of a safetensors file that begins with `data`. Returns its entries, its metadata, and the offset
    at which the tensors' data begins.

    Raises DamagedError if this is not a valid header. Checks that the tensors' offsets ascend without holes or
    overlaps, but not that the file is long enough.
    """
    try:
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        if len(data) < LENGTH_BYTES or length > HEADER_BYTES_MAX or LENGTH_BYTES + length > len(data):
            raise ValueError(
                f"its header would have {length} bytes, but only {len(data)} bytes could be read, and "
                f"{HEADER_BYTES_MAX} is the limit for a header"
            )
        # Each entry is parsed with its exact type, so that invalid content allocates no memory.
        raw = _PARTS.decode(memoryview(data)[LENGTH_BYTES : LENGTH_BYTES + length])
        metadata = _METADATA.decode(raw.pop(METADATA_KEY, b"{}"))
        entries = [_entry(name, _FIELDS.decode(fields)) for name, fields in raw.items()]
        expected = 0
        for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
            if entry.begin != expected or entry.end < entry.begin:
                raise ValueError(
                    f"the data of {entry.name!r} is at {entry.begin} to {entry.end}, but must begin at {expected}, and "
                    "not end before that"
                )
            expected = entry.end
    except (ValueError, RecursionError) as error:
        raise DamagedError(
            f"{path} has no valid safetensors header: {error!s:.300}", next="restore the file from a copy"
        ) from error
    return {entry.name: entry for entry in entries}, metadata, LENGTH_BYTES + length


class _Fields(msgspec.Struct, gc=False):
    """The JSON fields of an entry in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA = msgspec.json.Decoder(dict[str, str])
_FIELDS = msgspec.json.Decoder(_Fields)


def _entry(name: str, fields: _Fields) -> HeaderEntry:
    begin, end = fields.data_offsets
    if len(fields.shape) > NDIM_MAX + 1:  # a dtype that is stored as bytes adds one dimension
        raise ValueError(f"entry {name!r:.80} has {len(fields.shape)} dimensions, more than {NDIM_MAX + 1}")
    numbers = (*fields.shape, begin, end)
    if min(numbers) < 0 or max(numbers) >= 1 << 63:
        raise ValueError(f"entry {name!r:.80} has a number that is negative, or 2^63 or more")
    return HeaderEntry(name, fields.dtype, fields.shape, begin, end)
