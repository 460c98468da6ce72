"""The index: every tensor, alias, piece and chunk as columns of a safetensors file.

Columns, not records: an index holds millions of rows, and plans are made on it with
vector operations. See docs/FORMAT.md, Index, for each column's meaning.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import NAME_BYTES_MAX, NDIM_MAX
from flowstone.errors import DamagedError
from flowstone.format.codec import CAST, PLANES
from flowstone.format.derived import check_casts
from flowstone.format.manifest import SegmentRow
from flowstone.format.segment import LENGTH_BYTES, METADATA_KEY, parse_header
from flowstone.table.chunks import CODEC_RAW, CODEC_XOR, ChunkBases, Chunks, StoredChunks, run_starts
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Pieces, TensorColumns

U64 = NDArray[np.uint64]
Part: TypeAlias = bytes | memoryview
_Number = TypeVar("_Number", bound=np.generic)

_COLUMNS = {
    "tensor.shape": "<u8", "alias.tensor": "<u8", "piece.tensor": "<u8", "piece.box": "<u8",
    "piece.offset": "<u8", "piece.bytes": "<u8", "chunk.digest": "<u8",
    "tensor.name_bytes": "<u4", "alias.name_bytes": "<u4", "piece.segment": "<u4", "chunk.bytes": "<u4",
    "tensor.dtype": "<u2",
    "tensor.name": "u1", "tensor.ndim": "u1", "alias.name": "u1", "chunk.codec": "u1",
}
"""Column name to numpy type, the widest first so that each lies aligned in the file."""

_DELTA_COLUMNS = {
    name: kind for kind in ("<u8", "<u4", "<u2", "u1")
    for name, of in (*_COLUMNS.items(), ("chunk.offset", "<u8"), ("chunk.segment", "<u4")) if of == kind
}
"""The columns of an index whose chunks each have a place of their own."""

_BASE_COLUMNS = {
    "chunk.base_segment": "<u4", "chunk.base_offset": "<u8", "chunk.base_bytes": "<u4", "chunk.base_codec": "u1",
    "chunk.base_digest": "<u8", "chunk.data_digest": "<u8",
}
"""The further columns of an index with chunks that have a base, in the order of table.chunks.ChunkBases."""

_NEAR_COLUMNS = {
    name: kind for kind in ("<u8", "<u4", "<u2", "u1")
    for name, of in (*_DELTA_COLUMNS.items(), *_BASE_COLUMNS.items()) if of == kind
}

_SAFETENSORS = {"<u8": "U64", "<u4": "U32", "<u2": "U16", "u1": "U8"}


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The content of an index file, and columns that follow from it.

    pieces       of all ranks, grouped by tensor; every piece has its own box, whole ones too
    aliases      (name, tensor row)
    chunks       the extents of the pieces, and the digests of their chunks
    tensors      of the pieces
    first_piece  of each tensor, then the number of pieces
    """

    pieces: Pieces
    aliases: tuple[tuple[str, int], ...]
    chunks: Chunks
    tensors: TensorColumns = field(init=False)
    first_piece: NDArray[np.int64] = field(init=False)
    _rows: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        set_, names = object.__setattr__, self.pieces.tensors.names
        set_(self, "tensors", self.pieces.tensors)
        set_(self, "first_piece", np.searchsorted(self.pieces.tensor, np.arange(len(names) + 1)))
        rows = dict(zip(names, range(len(names)), strict=True))
        rows.update(self.aliases)
        set_(self, "_rows", rows)

    def rows(self) -> Mapping[str, int]:
        """Every name, aliases included, to its tensor's row."""
        return self._rows

    def pieces_of(self, tensor: int) -> range:
        return range(int(self.first_piece[tensor]), int(self.first_piece[tensor + 1]))

    def same_bytes(self, one: int, other: int) -> bool:
        """Whether two tensors are known to have the same bytes in row-major order, with any shapes."""
        a, b = self.pieces_of(one), self.pieces_of(other)
        return one == other or (len(a) == 1 and self.chunks.same_bytes(a, b))

    def equal(self, one: int, other: int) -> bool:
        """Whether two tensors are known to be equal: same dtypes, same boxes, same digests."""

        def boxes(tensor: int) -> list[int]:
            pieces = self.pieces_of(tensor)
            starts = self.pieces.starts
            found: list[int] = self.pieces.boxes[starts[pieces.start] : starts[pieces.stop]].tolist()
            return found

        same = self.tensors.dtypes[one] == self.tensors.dtypes[other] and boxes(one) == boxes(other)
        return same and self.chunks.same_bytes(self.pieces_of(one), self.pieces_of(other))


class Totals(msgspec.Struct, frozen=True):
    """The sizes of an index."""

    tensors: int
    pieces: int
    data_bytes: int


class Frame(msgspec.Struct, frozen=True, eq=False):
    """An index file without the columns that change with every save of a layout: places of pieces, and digests.

    parts     the file's bytes before, between and after the columns that are left out, each in parts
    left_out  names of these columns, in the file's order
    """

    parts: tuple[tuple[Part, ...], ...]
    left_out: tuple[str, ...]
    totals: Totals

    def fill(self, offset: U64, digest: U64, places: ChunkPlaces | None = None) -> bytes:
        """The index file's bytes, from one offset per piece and one digest per chunk, in index order.

        digest  of stored bytes, but for those of which `places` has it
        places  where chunks lie, if this is the frame of a delta; pieces then have none
        """
        columns: dict[str, NDArray[Any]] = {"piece.offset": offset, "chunk.digest": digest}
        if places is not None:
            columns |= {"chunk.segment": places.segment, "chunk.offset": places.offset}
            columns["piece.offset"] = np.zeros(len(offset), np.uint64)
            if (forms := places.forms) is not None:
                columns |= {"chunk.bytes": forms.length, "chunk.codec": forms.codec, "chunk.digest": forms.digest}
                if forms.bases is not None:
                    columns |= zip(_BASE_COLUMNS, forms.bases.columns(), strict=True)
        first, *others = self.parts
        found = [*first]
        for name, parts in zip(self.left_out, others, strict=True):
            found += [_as(columns[name], _NEAR_COLUMNS[name]).data, *parts]
        return b"".join(found)


class ChunkForms(msgspec.Struct, frozen=True, eq=False):
    """How each chunk is stored: its length in bytes, its codec, and the digest of its stored bytes.

    bases  of those that have one; None: none has
    """

    length: NDArray[np.uint32]
    codec: NDArray[np.uint8]
    digest: U64
    bases: ChunkBases | None = None

    def of(self, chunks: NDArray[np.int64]) -> ChunkForms:
        """Those of these chunks."""
        bases = None if self.bases is None else self.bases.of(chunks)
        return ChunkForms(self.length[chunks], self.codec[chunks], self.digest[chunks], bases)


class ChunkPlaces(msgspec.Struct, frozen=True, eq=False):
    """The segment of each chunk, and the offset there, in bytes; `forms`: None if all are stored as they are.

    Of a chunk that is rounded from others, the segment is 0, and the offset the number of the first of these chunks.
    """

    segment: NDArray[np.uint32]
    offset: U64
    forms: ChunkForms | None = None

    def of(self, chunks: NDArray[np.int64]) -> ChunkPlaces:
        """Those of these chunks."""
        forms = None if self.forms is None else self.forms.of(chunks)
        return ChunkPlaces(self.segment[chunks], self.offset[chunks], forms)

    def in_order(self, chunks: NDArray[np.int64]) -> ChunkPlaces:
        """Those of all chunks in another order."""
        found = self.of(chunks)
        if found.forms is None or not (casts := found.forms.codec == CAST.id).any():
            return found
        number = np.empty(len(chunks), np.uint64)
        number[chunks] = np.arange(len(chunks), dtype=np.uint64)
        segment, offset = np.where(casts, 0, found.segment).astype(np.uint32), found.offset.copy()
        offset[casts] = number[offset[casts].astype(np.int64)]
        return ChunkPlaces(segment, offset, found.forms)


def frame_of(
    pieces: Pieces, aliases: Sequence[tuple[str, int]], chunks: Chunks, *, is_delta: bool = False,
    is_coded: bool = False, has_bases: bool = False,
) -> Frame:
    """All of an index file that does not depend on where pieces lie, and on digests. Keeps the columns, not a copy.

    pieces, aliases, chunks  as in Index
    is_delta                 each chunk has a place of its own
    is_coded                 and a codec and a length
    has_bases                and a base
    """
    tensors = pieces.tensors
    kinds = sorted({dtype.name for dtype in tensors.dtypes})
    position = {name: at for at, name in enumerate(kinds)}
    names, tied = [name.encode() for name in tensors.names], [name.encode() for name, _ in aliases]
    columns: dict[str, object] = {
        "tensor.name": np.frombuffer(b"".join(names), np.uint8),
        "tensor.name_bytes": list(map(len, names)),
        "tensor.dtype": [position[dtype.name] for dtype in tensors.dtypes],
        "tensor.ndim": tensors.ndim, "tensor.shape": tensors.sides,
        "alias.name": np.frombuffer(b"".join(tied), np.uint8),
        "alias.name_bytes": list(map(len, tied)),
        "alias.tensor": [row for _, row in aliases],
        "piece.tensor": pieces.tensor, "piece.box": pieces.numbers(),
        "piece.segment": np.zeros_like(chunks.segment) if is_delta else chunks.segment,
        "piece.bytes": chunks.length, "chunk.bytes": chunks.stored_lengths(), "chunk.codec": chunks.codecs(),
    }
    totals = Totals(len(names), len(pieces), int(chunks.length.sum()))
    variable = {"piece.offset": len(pieces), "chunk.digest": len(chunks.digest)}
    if is_delta:
        variable |= {"chunk.segment": len(chunks.digest), "chunk.offset": len(chunks.digest)}
    if is_coded:
        variable |= {"chunk.bytes": len(chunks.digest), "chunk.codec": len(chunks.digest)}
    if has_bases:
        variable |= dict.fromkeys(_BASE_COLUMNS, len(chunks.digest))
    return _framed(columns, variable, " ".join(kinds), totals)


def _framed(columns: Mapping[str, object], variable: Mapping[str, int], dtypes: str, totals: Totals) -> Frame:
    """The frame of these columns. `variable`: lengths of the columns that are left out."""
    header: dict[str, object] = {METADATA_KEY: {"flowstone": "1", "dtypes": dtypes}}
    parts: list[list[Part]] = [[]]
    at, left_out = 0, []
    for name, kind in _NEAR_COLUMNS.items():
        if name in variable:
            count = variable[name]
            parts.append([])
            left_out.append(name)
        elif name in columns:
            column = _as(np.asarray(columns[name]), kind)
            count = len(column)
            parts[-1].append(column.data)
        else:
            continue
        end = at + count * np.dtype(kind).itemsize
        header[name] = {"dtype": _SAFETENSORS[kind], "shape": [count], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts[0][:0] = [len(text).to_bytes(LENGTH_BYTES, "little"), text]
    return Frame(tuple(map(tuple, parts)), tuple(left_out), totals)


def _as(column: NDArray[Any], kind: str) -> NDArray[Any]:
    """The column with that number type; the column itself, if the bytes are the same."""
    column, dtype = np.ascontiguousarray(column), np.dtype(kind)
    if column.dtype.kind in "iu" and column.dtype.isnative and column.itemsize == dtype.itemsize:
        return column.view(column.dtype.str.replace("i", "u")).astype(dtype, copy=False)
    return column.astype(dtype)


def check_index_header(data: Part, file_bytes: int, *, path: str) -> None:
    """Raise DamagedError unless `data` can begin an index file of `file_bytes`; checked before the rest is read."""
    entries, _, start = parse_header(data[: _header_end(data)], path=path)
    end = start + max((entry.end for entry in entries.values()), default=0)
    if end != file_bytes:
        raise DamagedError(
            f"{path} contradicts itself: its columns end at byte {end} of {file_bytes}", next="use an older step"
        )


def decode_index(
    data: Part, *, segments: Sequence[SegmentRow], path: str, is_delta: bool = False,
    codecs: Collection[int] = (CODEC_RAW,), has_copies: bool = False,
) -> Index:
    """Read and check an index whose digests have been verified. Raises DamagedError.

    is_delta  each chunk has a place of its own
    codecs    ids of the codecs that chunks may have
    has_copies  several chunks may have one place
    """
    kinds = _COLUMNS if not is_delta else _NEAR_COLUMNS if CODEC_XOR in codecs else _DELTA_COLUMNS
    entries, metadata, start = parse_header(data[: _header_end(data)], path=path)
    try:
        columns = {}
        for name, kind in kinds.items():
            entry = entries[name]
            if entry.dtype != _SAFETENSORS[kind] or start + entry.end > len(data):
                raise ValueError(f"column {name!r} has type {entry.dtype:.20} or ends past the end of the file")
            (count,) = entry.shape
            if entry.end - entry.begin != count * np.dtype(kind).itemsize:
                raise ValueError(f"the length of column {name!r} does not match its shape")
            columns[name] = np.frombuffer(data, kind, count, start + entry.begin)
        index = _assemble(columns, metadata["dtypes"].split(), codecs if is_delta else (CODEC_RAW,))
        _check(index, segments, has_copies=has_copies)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise DamagedError(f"{path} contradicts itself: {error!s:.300}", next="use an older step") from error
    return index


def _header_end(data: Part) -> int:
    return LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")


def _assemble(columns: dict[str, NDArray[np.generic]], kinds: list[str], codecs: Collection[int]) -> Index:
    unknown = sorted(set(kinds) - set(DTYPES))
    if unknown:
        raise ValueError(f"unknown dtypes {unknown}")
    ndim = columns["tensor.ndim"].astype(np.int64)
    if ndim.max(initial=0) > NDIM_MAX or int(ndim.sum()) != len(columns["tensor.shape"]):
        raise ValueError("tensor.ndim and tensor.shape disagree")
    names = _names(columns["tensor.name"], columns["tensor.name_bytes"])
    aliases = _names(columns["alias.name"], columns["alias.name_bytes"])
    tensor = _own(columns["piece.tensor"], np.int64)  # what is beyond becomes negative
    if len({len(names), len(columns["tensor.dtype"]), len(ndim)}) != 1:
        raise ValueError("the tensor columns differ in length")
    if tensor.min(initial=0) < 0 or tensor.max(initial=-1) >= len(names) or (tensor[1:] < tensor[:-1]).any():
        raise ValueError("piece.tensor is not ascending within the tensors")
    dtypes = tuple(map([DTYPES[kind] for kind in kinds].__getitem__, columns["tensor.dtype"].tolist()))
    tensors = TensorColumns.with_sides(names, dtypes, ndim, _own(columns["tensor.shape"], np.int64))
    return Index(
        pieces=_pieces(tensors, tensor, columns),
        aliases=tuple(zip(aliases, columns["alias.tensor"].tolist(), strict=True)),
        chunks=_chunks(columns, codecs),
    )


def _chunks(columns: Mapping[str, NDArray[Any]], codecs: Collection[int]) -> Chunks:
    """The chunk table, checked as far as that needs no segments. Raises ValueError."""
    found = Chunks(
        _own(columns["piece.segment"], np.uint32), _own(columns["piece.offset"], np.uint64),
        _own(columns["piece.bytes"], np.uint64), _own(columns["chunk.digest"], np.uint64),
    )
    _check_chunks(found, columns["chunk.bytes"], columns["chunk.codec"], codecs)
    if "chunk.segment" not in columns:
        return found
    segment, offset = _own(columns["chunk.segment"], np.uint32), _own(columns["chunk.offset"], np.uint64)
    if {len(segment), len(offset)} != {len(found.digest)}:
        raise ValueError("the chunk columns differ in length")
    if found.segment.any() or found.offset.any():
        raise ValueError("a piece has a place, and its chunks have others")
    length, codec = _own(columns["chunk.bytes"], np.uint32), _own(columns["chunk.codec"], np.uint8)
    bases = _bases(columns, found, codec) if CODEC_XOR in codecs else None
    return replace(found, stored=StoredChunks(segment, offset, length, codec, bases))


def _bases(columns: Mapping[str, NDArray[Any]], chunks: Chunks, codec: NDArray[np.uint8]) -> ChunkBases:
    """The bases of chunks, checked as far as that needs no segments. Raises ValueError."""
    kinds = (np.uint32, np.uint64, np.uint32, np.uint8, np.uint64, np.uint64)
    own: list[NDArray[Any]] = [columns[name].astype(kind) for name, kind in zip(_BASE_COLUMNS, kinds, strict=True)]
    found = ChunkBases.by_columns(own)
    if {len(column) for column in found.columns()} != {len(chunks.digest)}:
        raise ValueError("the columns of bases do not match the chunks")
    near, raw, length = codec == CODEC_XOR, found.codec == CODEC_RAW, chunks.stored_lengths()
    if not np.isin(found.codec[near], [CODEC_RAW, PLANES.id]).all():
        raise ValueError("a base is neither raw nor planes")
    misfit = np.where(raw, found.length != length, (found.length >= length) | (found.length == 0))
    if misfit[near].any():
        raise ValueError("a base's stored length does not fit the chunk")
    return found


def _pieces(tensors: TensorColumns, tensor: NDArray[np.int64], columns: Mapping[str, NDArray[Any]]) -> Pieces:
    """The pieces of these tensors, checked. Raises ValueError."""
    if {len(columns[f"piece.{name}"]) for name in ("segment", "offset", "bytes")} != {len(tensor)}:
        raise ValueError("the piece columns differ in length")
    pieces = Pieces(tensors, np.arange(len(tensor)), _own(columns["piece.box"], np.int64), rows=tensor)
    if int(pieces.starts[-1]) != len(pieces.boxes):
        raise ValueError("piece.box has the wrong length")
    _check_boxes(pieces)
    if (pieces.lengths() != columns["piece.bytes"]).any():
        raise ValueError("the length of an extent does not match its box")
    return pieces


def _own(column: NDArray[Any], kind: type[_Number]) -> NDArray[_Number]:
    """A file's column in the machine's byte order; if that is the file's, a read-only view without a copy."""
    native: NDArray[Any] = column.astype(column.dtype.newbyteorder("="), copy=False)
    return native.view(kind)


def _names(text: NDArray[np.generic], lengths: NDArray[np.generic]) -> tuple[str, ...]:
    sizes = lengths.astype(np.int64)
    if sizes.max(initial=0) > NAME_BYTES_MAX or int(sizes.sum()) != len(text):
        raise ValueError("names and their lengths disagree")
    data, ends = text.tobytes(), run_starts(sizes).tolist()
    if data.isascii():  # slicing text takes half the time of slicing bytes and decoding each
        whole = data.decode()
        return tuple([whole[a:b] for a, b in pairwise(ends)])
    return tuple([data[a:b].decode() for a, b in pairwise(ends)])


def _check(index: Index, segments: Sequence[SegmentRow], *, has_copies: bool) -> None:
    """Check what plans rely on, except for boxes and chunks. Raises ValueError."""
    if len(index.rows()) != len(index.tensors.names) + len(index.aliases):
        raise ValueError("a name occurs twice")
    if any(row >= len(index.tensors.names) for _, row in index.aliases):
        raise ValueError("an alias names no tensor")
    check_casts(index.chunks, index.pieces)
    _check_extents(index.chunks, segments, has_copies=has_copies)


def _check_chunks(
    chunks: Chunks, stored: NDArray[np.uint32], codec: NDArray[np.uint8], codecs: Collection[int]
) -> None:
    """Check that raw chunks are as long as their data, and that those with another of `codecs` are shorter, but there.
    """
    if {len(stored), len(codec), int(chunks.first[-1])} != {len(chunks.digest)}:
        raise ValueError("the chunk columns do not match the pieces")
    if not np.isin(codec, list(codecs)).all():
        raise ValueError(f"unknown codec {int(codec.max())}")
    length, raw = chunks.stored_lengths(), codec == CODEC_RAW
    is_encoded = ~raw & (codec != CAST.id)
    if (stored != length)[raw].any() or (stored >= length)[~raw].any() or not stored[is_encoded].all():
        raise ValueError("a chunk's stored length does not fit its extent")


def _check_boxes(pieces: Pieces) -> None:
    """Raise ValueError for a box outside its tensor."""
    boxes, sides, tensor = pieces.boxes.view(np.uint64), pieces.tensors.sides.view(np.uint64), pieces.tensor
    first_side, ndim = run_starts(pieces.tensors.ndim), np.diff(pieces.starts) // 2
    for dim in range(int(ndim.max(initial=0))):
        has = ndim > dim
        offsets = boxes[pieces.starts[:-1][has] + dim]
        lengths = boxes[pieces.starts[:-1][has] + ndim[has] + dim]
        limits = sides[first_side[tensor[has]] + dim]
        if (offsets > limits).any() or (lengths > limits - offsets).any():
            raise ValueError("a box lies outside its tensor")
    if sides.max(initial=0) >= 1 << 63 or _is_immense(sides, first_side[:-1], pieces.tensors.ndim):
        raise ValueError("a tensor has too many elements")  # else products of lengths would wrap


def _is_immense(sides: U64, starts: NDArray[np.int64], ndim: NDArray[np.int64]) -> bool:
    """Whether a shape has 2^59 elements or more, within the precision of doubles."""
    bits, empty = np.zeros(len(ndim)), np.zeros(len(ndim), np.bool_)
    for dim in range(int(ndim.max(initial=0))):
        has = ndim > dim
        side = sides[starts[has] + dim]
        bits[has] += np.log2(np.maximum(side, 1))
        empty[has] |= side == 0
    return bool((bits[~empty] >= 59).any())


def _check_extents(chunks: Chunks, segments: Sequence[SegmentRow], *, has_copies: bool) -> None:
    """Raise ValueError unless extents, or chunks with places of their own, lie in segments, and apart in new ones."""
    segment, offset, length = chunks.segment, chunks.offset, chunks.length
    if chunks.stored is not None:
        segment, offset, length = _distinct_places(chunks, has_copies=has_copies)
    if segment.max(initial=0) >= len(segments) and len(segment):
        raise ValueError("a piece lies in a segment that the manifest does not list")
    if not len(segments):
        return
    begin = np.array([row.header_bytes for row in segments], np.uint64)[segment]
    end = np.array([row.bytes for row in segments], np.uint64)[segment]
    if chunks.stored is not None and chunks.stored.bases is not None:
        _check_bases(chunks.stored.bases, chunks.stored.codec == CODEC_XOR, segments)
    if (offset < begin).any() or (offset > end).any() or (length > end - offset).any():
        raise ValueError("an extent lies outside its segment")
    base, some = np.cumsum([0, *(row.bytes for row in segments[:-1])]).astype(np.uint64), length > 0
    if chunks.stored is not None:  # of a base's file, several chunks may be the same
        some &= np.array([row.home is None for row in segments])[segment]
    begin = (base[segment] + offset)[some]  # as if all segments were one file: no extent passes the end of its segment
    order = np.argsort(begin)
    begin, length = begin[order], length[some][order]
    if (begin[:-1] + length[:-1] > begin[1:]).any():
        raise ValueError("two extents overlap")


def _distinct_places(chunks: Chunks, *, has_copies: bool) -> tuple[NDArray[np.uint32], U64, U64]:
    """Segment, offset and length of the chunks that are stored; of copies, of which nothing differs, only one."""
    assert chunks.stored is not None, "the caller asks"
    stored = chunks.stored
    numbers = np.flatnonzero(stored.codec != CAST.id)
    if has_copies:
        numbers = numbers[np.lexsort((stored.offset[numbers], stored.segment[numbers]))]
        columns = stored.segment, stored.offset, stored.length, stored.codec, chunks.digest
        differs = np.zeros(max(len(numbers) - 1, 0), np.bool_)
        for column in columns:
            differs |= column[numbers][1:] != column[numbers][:-1]
        numbers = numbers[np.append(np.ones(min(1, len(numbers)), np.bool_), differs)]
    return stored.segment[numbers], stored.offset[numbers], stored.length[numbers].astype(np.uint64)
def _check_bases(bases: ChunkBases, near: NDArray[np.bool_], segments: Sequence[SegmentRow]) -> None:
    """Raise ValueError unless the bases of these chunks lie in segments."""
    segment, offset, length = bases.segment[near], bases.offset[near], bases.length[near].astype(np.uint64)
    if segment.max(initial=0) >= len(segments):
        raise ValueError("a base lies in a segment that the manifest does not list")
    begin = np.array([row.header_bytes for row in segments], np.uint64)[segment]
    end = np.array([row.bytes for row in segments], np.uint64)[segment]
    if (offset < begin).any() or (offset > end).any() or (length > end - offset).any():
        raise ValueError("a base lies outside its segment")
