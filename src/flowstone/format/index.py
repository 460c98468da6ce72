"""The index of a checkpoint lists every tensor, alias, piece (a part of a tensor) and chunk. It is a safetensors file
with an array for each of their properties, called a column.

Columns are used because an index may list millions of chunks, and plans are computed with vector operations
(docs/FORMAT.md, Index).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES, NAME_BYTES_MAX, NDIM_MAX
from flowstone.errors import DamagedError
from flowstone.format.codec import CAST, PLANES
from flowstone.format.derived import check_casts
from flowstone.format.manifest import SegmentRow
from flowstone.format.segment import LENGTH_BYTES, METADATA_KEY, parse_header
from flowstone.table.chunks import CODEC_RAW, CODEC_XOR, ChunkBases, Chunks, StoredChunks, first_chunks, run_starts
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Pieces, TensorColumns

U64 = NDArray[np.uint64]
Part: TypeAlias = bytes | memoryview
_Number = TypeVar("_Number", bound=np.generic)
_COLUMNS = {
    "tensor.shape": "<u8", "alias.tensor": "<u8", "piece.tensor": "<u8", "piece.box": "<u8",
    "piece.offset": "<u8", "piece.bytes": "<u8", "chunk.digest": "<u8",
    "tensor.name_bytes": "<u4", "alias.name_bytes": "<u4", "piece.segment": "<u4", "chunk.bytes": "<u4",
    "tensor.dtype": "<u2", "tensor.name": "u1", "tensor.ndim": "u1", "alias.name": "u1", "chunk.codec": "u1",
}
"""Column name to numpy type, the widest first so that each lies aligned in the file."""

_DELTA_COLUMNS = {
    name: kind for kind in ("<u8", "<u4", "<u2", "u1")
    for name, of in (*_COLUMNS.items(), ("chunk.offset", "<u8"), ("chunk.segment", "<u4")) if of == kind
}
"""The columns of an index in which each chunk has its own segment and offset."""

_BASE_COLUMNS = {
    "chunk.base_segment": "<u4", "chunk.base_offset": "<u8", "chunk.base_bytes": "<u4", "chunk.base_codec": "u1",
    "chunk.base_digest": "<u8", "chunk.data_digest": "<u8",
}
"""The additional columns of an index with chunks that are stored as the difference from another chunk (their base). In
the order of table.chunks.ChunkBases.
"""

_ALL_COLUMNS = {
    name: kind for kind in ("<u8", "<u4", "<u2", "u1")
    for name, of in (*_DELTA_COLUMNS.items(), *_BASE_COLUMNS.items()) if of == kind
}
_SAFETENSORS = {"<u8": "U64", "<u4": "U32", "<u2": "U16", "u1": "U8"}


class Index:
    """The content of an index file, and arrays that are computed from it.

    pieces       the parts of tensors that all ranks have saved, grouped by tensor; each has its own box (offsets and
                 lengths), even if it is a full tensor
    aliases      further names of tensors: (name, position of the tensor in `tensors`)
    chunks       where the pieces are stored, and the digests of their chunks
    tensors      the tensors of the pieces
    first_piece  the first piece of each tensor; the last entry is the number of pieces
    """

    def __init__(self, pieces: Pieces, aliases: tuple[tuple[str, int], ...], chunks: Chunks) -> None:
        self.pieces, self.aliases, self.chunks, self.tensors = pieces, aliases, chunks, pieces.tensors
        names = pieces.tensors.names
        self.first_piece: NDArray[np.int64] = np.searchsorted(pieces.tensor, np.arange(len(names) + 1))
        self._rows = dict(zip(names, range(len(names)), strict=True))
        self._rows.update(aliases)

    def rows(self) -> Mapping[str, int]:
        """Every name of a tensor, aliases included -> position of the tensor in `tensors`."""
        return self._rows

    def pieces_of(self, tensor: int) -> range:
        return range(int(self.first_piece[tensor]), int(self.first_piece[tensor + 1]))

    def same_bytes(self, row: int, other_row: int) -> bool:
        """Whether two tensors are known to have the same bytes in row-major order, even if their shapes differ."""
        a, b = self.pieces_of(row), self.pieces_of(other_row)
        return row == other_row or (len(a) == 1 and self.chunks.same_bytes(a, b))

    def equal(self, row: int, other_row: int) -> bool:
        """Whether two tensors are known to be equal: they have equal dtypes, boxes of pieces, and digests."""

        def boxes(tensor: int) -> list[int]:
            pieces = self.pieces_of(tensor)
            starts = self.pieces.starts
            numbers: list[int] = self.pieces.boxes[starts[pieces.start] : starts[pieces.stop]].tolist()
            return numbers

        same = self.tensors.dtypes[row] == self.tensors.dtypes[other_row] and boxes(row) == boxes(other_row)
        return same and self.chunks.same_bytes(self.pieces_of(row), self.pieces_of(other_row))


class Totals(msgspec.Struct, frozen=True):
    """How many tensors and pieces (parts of tensors) an index lists, and how many bytes these have."""

    tensors: int
    pieces: int
    data_bytes: int


class IndexTemplate(msgspec.Struct, frozen=True, eq=False):
    """An index file without offsets and digests. These change with every save; the rest is the same while the layout of
    the state stays the same.

    parts     the file's bytes before, between and after the omitted columns
    omitted   names of the omitted columns, in the file's order
    """

    parts: tuple[tuple[Part, ...], ...]
    omitted: tuple[str, ...]
    totals: Totals

    def fill(self, offset: U64, digest: U64, places: ChunkPlaces | None = None) -> bytes:
        """Returns the bytes of the index file. `offset` has the offset of each piece, in the order of the index.

        digest  digest of each chunk's stored bytes; ignored if `places.forms` is given
        places  if chunks have locations of their own (a delta), these locations; pieces then have no offsets
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
        buffers = [*first]
        for name, parts in zip(self.omitted, others, strict=True):
            buffers += [_with_type(columns[name], _ALL_COLUMNS[name]).data, *parts]
        return b"".join(buffers)


class ChunkForms(msgspec.Struct, frozen=True, eq=False):
    """How each chunk is stored: its length in bytes, its codec, and the digest of its stored bytes.

    bases  for chunks that are stored as the difference from an earlier chunk, that chunk (the base); None: no chunk has
           a base
    """

    length: NDArray[np.uint32]
    codec: NDArray[np.uint8]
    digest: U64
    bases: ChunkBases | None = None

    @classmethod
    def of_raw(cls, length: U64, digests: U64) -> ChunkForms:
        """Describes chunks that are stored without a codec. `length`: of each piece, in bytes."""
        lengths = Chunks.unwritten(np.zeros(len(length), np.uint32), length).stored_lengths()
        return cls(lengths.copy(), np.zeros(len(lengths), np.uint8), digests.copy())

    def take(self, chunks: NDArray[np.int64]) -> ChunkForms:
        """The description of only these chunks, given by number."""
        bases = None if self.bases is None else self.bases.take(chunks)
        return ChunkForms(self.length[chunks], self.codec[chunks], self.digest[chunks], bases)


class ChunkPlaces(msgspec.Struct, frozen=True, eq=False):
    """Where each chunk is stored: its segment, and its offset there in bytes. `forms`: how each chunk is stored; None
    if all chunks are stored without a codec.

    For a rounded chunk (codec `cast`) the segment is 0, and the offset is the number of its first source chunk.
    """

    segment: NDArray[np.uint32]
    offset: U64
    forms: ChunkForms | None = None

    @classmethod
    def of_raw(cls, segment: NDArray[np.uint32], offset: U64, length: U64) -> ChunkPlaces:
        """The places of chunks without a codec. In each piece they are stored one after the other."""
        counts = np.diff(first := first_chunks(length))
        number = (np.arange(int(first[-1])) - np.repeat(first[:-1], counts)).astype(np.uint64)
        return cls(np.repeat(segment, counts), np.repeat(offset, counts) + number * np.uint64(CHUNK_BYTES))

    def take(self, chunks: NDArray[np.int64]) -> ChunkPlaces:
        """The places of only these chunks, given by number."""
        forms = None if self.forms is None else self.forms.take(chunks)
        return ChunkPlaces(self.segment[chunks], self.offset[chunks], forms)

    def reorder(self, chunks: NDArray[np.int64]) -> ChunkPlaces:
        """The places of all chunks, in the order `chunks`."""
        reordered = self.take(chunks)
        if reordered.forms is None or not (casts := reordered.forms.codec == CAST.id).any():
            return reordered
        number = np.empty(len(chunks), np.uint64)
        number[chunks] = np.arange(len(chunks), dtype=np.uint64)
        segment, offset = np.where(casts, 0, reordered.segment).astype(np.uint32), reordered.offset.copy()
        offset[casts] = number[offset[casts].astype(np.int64)]
        return ChunkPlaces(segment, offset, reordered.forms)


def index_template(
    pieces: Pieces, aliases: Sequence[tuple[str, int]], chunks: Chunks, *, is_delta: bool = False,
    is_coded: bool = False, has_bases: bool = False,
) -> IndexTemplate:
    """The part of an index file that depends neither on offsets nor on digests. Refers to the given arrays, without
    copying them.

    pieces, aliases, chunks  as in Index
    is_delta                 each chunk has its own segment and offset
    is_coded                 each chunk also has its own codec and length
    has_bases                chunks may be stored as the difference from a base
    """
    tensors = pieces.tensors
    kinds = sorted({dtype.name for dtype in tensors.dtypes})
    position = {name: number for number, name in enumerate(kinds)}
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
        variable |= dict.fromkeys(("chunk.segment", "chunk.offset"), len(chunks.digest))
    if is_coded:
        variable |= dict.fromkeys(("chunk.bytes", "chunk.codec"), len(chunks.digest))
    if has_bases:
        variable |= dict.fromkeys(_BASE_COLUMNS, len(chunks.digest))
    return _framed(columns, variable, " ".join(kinds), totals)


def _framed(columns: Mapping[str, object], variable: Mapping[str, int], dtypes: str, totals: Totals) -> IndexTemplate:
    """The template of an index file: its header, and the values of `columns`. The template has a gap for each column in
    `variable`, even if `columns` has it. `variable`: name of such a column -> the number of its values.
    """
    header: dict[str, object] = {METADATA_KEY: {"flowstone": "1", "dtypes": dtypes}}
    parts: list[list[Part]] = [[]]
    begin, omitted = 0, list[str]()
    for name, kind in _ALL_COLUMNS.items():
        if name in variable:
            count = variable[name]
            parts.append([])
            omitted.append(name)
        elif name in columns:
            column = _with_type(np.asarray(columns[name]), kind)
            count = len(column)
            parts[-1].append(column.data)
        else:
            continue
        end = begin + count * np.dtype(kind).itemsize
        header[name] = {"dtype": _SAFETENSORS[kind], "shape": [count], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts[0][:0] = [len(text).to_bytes(LENGTH_BYTES, "little"), text]
    return IndexTemplate(tuple(map(tuple, parts)), tuple(omitted), totals)


def _with_type(column: NDArray[Any], kind: str) -> NDArray[Any]:
    """The column converted to this number type. Not a copy, if the bytes stay the same."""
    column, dtype = np.ascontiguousarray(column), np.dtype(kind)
    if column.dtype.kind in "iu" and column.dtype.isnative and column.itemsize == dtype.itemsize:
        return column.view(column.dtype.str.replace("i", "u")).astype(dtype, copy=False)
    return column.astype(dtype)


def check_index_header(data: Part, file_bytes: int, *, path: str) -> None:
    """Raise DamagedError if `data` cannot be the first bytes of an index file of `file_bytes` bytes."""
    entries, _, start = parse_header(data[: _header_end(data)], path=path)
    end = start + max((entry.end for entry in entries.values()), default=0)
    if end != file_bytes:
        raise DamagedError(
            f"{path} contradicts itself: its header lists {end} bytes, but the file has {file_bytes}",
            next="use an older step",
        )


def decode_index(
    data: Part, *, segments: Sequence[SegmentRow], path: str, is_delta: bool = False,
    codecs: Collection[int] = (CODEC_RAW,), has_copies: bool = False,
) -> Index:
    """Decode and check an index file, whose digests have been verified. Raises DamagedError.

    is_delta    each chunk has its own segment and offset
    codecs      ids of the codecs that chunks may have
    has_copies  several chunks may share one location
    """
    kinds = _COLUMNS if not is_delta else _ALL_COLUMNS if CODEC_XOR in codecs else _DELTA_COLUMNS
    entries, metadata, start = parse_header(data[: _header_end(data)], path=path)
    try:
        columns = {}
        for name, kind in kinds.items():
            entry = entries[name]
            if entry.dtype != _SAFETENSORS[kind] or start + entry.end > len(data):
                raise ValueError(
                    f"the column {name!r} has the type {entry.dtype:.20}, or ends after the end of the file"
                )
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
        raise ValueError(f"the header lists the unknown dtypes {unknown}")
    ndim = columns["tensor.ndim"].astype(np.int64)
    if ndim.max(initial=0) > NDIM_MAX or int(ndim.sum()) != len(columns["tensor.shape"]):
        raise ValueError("tensor.ndim does not match the length of tensor.shape")
    names = _names(columns["tensor.name"], columns["tensor.name_bytes"])
    aliases = _names(columns["alias.name"], columns["alias.name_bytes"])
    # numbers from 2^63 on become negative, which a check below finds
    tensor = _native_order(columns["piece.tensor"], np.int64)
    if len({len(names), len(columns["tensor.dtype"]), len(ndim)}) != 1:
        raise ValueError("the columns tensor.* are not of the same length")
    if tensor.min(initial=0) < 0 or tensor.max(initial=-1) >= len(names) or (tensor[1:] < tensor[:-1]).any():
        raise ValueError("piece.tensor is not sorted, or refers to a tensor that does not exist")
    dtypes = tuple(map([DTYPES[kind] for kind in kinds].__getitem__, columns["tensor.dtype"].tolist()))
    tensors = TensorColumns.with_sides(names, dtypes, ndim, _native_order(columns["tensor.shape"], np.int64))
    return Index(
        pieces=_pieces(tensors, tensor, columns),
        aliases=tuple(zip(aliases, columns["alias.tensor"].tolist(), strict=True)),
        chunks=_chunks(columns, codecs),
    )


def _chunks(columns: Mapping[str, NDArray[Any]], codecs: Collection[int]) -> Chunks:
    """The table of chunks, after the checks that do not need the list of segments. Raises ValueError."""
    chunks = Chunks(
        _native_order(columns["piece.segment"], np.uint32), _native_order(columns["piece.offset"], np.uint64),
        _native_order(columns["piece.bytes"], np.uint64), _native_order(columns["chunk.digest"], np.uint64),
    )
    _check_chunks(chunks, columns["chunk.bytes"], columns["chunk.codec"], codecs)
    if "chunk.segment" not in columns:
        return chunks
    segment = _native_order(columns["chunk.segment"], np.uint32)
    offset = _native_order(columns["chunk.offset"], np.uint64)
    if {len(segment), len(offset)} != {len(chunks.digest)}:
        raise ValueError("the columns chunk.* are not of the same length")
    if chunks.segment.any() or chunks.offset.any():
        raise ValueError("piece.segment or piece.offset is not 0, although each chunk has a location of its own")
    length, codec = _native_order(columns["chunk.bytes"], np.uint32), _native_order(columns["chunk.codec"], np.uint8)
    bases = _bases(columns, chunks, codec) if CODEC_XOR in codecs else None
    stored = StoredChunks(segment, offset, length, codec, bases)
    return Chunks(chunks.segment, chunks.offset, chunks.length, chunks.digest, stored)


def _bases(columns: Mapping[str, NDArray[Any]], chunks: Chunks, codec: NDArray[np.uint8]) -> ChunkBases:
    """The base of each chunk that is stored as a difference, after the checks that do not need the list of segments.
    Raises ValueError.
    """
    kinds = (np.uint32, np.uint64, np.uint32, np.uint8, np.uint64, np.uint64)
    typed: list[NDArray[Any]] = [columns[name].astype(kind) for name, kind in zip(_BASE_COLUMNS, kinds, strict=True)]
    bases = ChunkBases.by_columns(typed)
    if {len(column) for column in bases.columns()} != {len(chunks.digest)}:
        raise ValueError("the columns chunk.base_* do not have an entry for each chunk")
    is_xor, raw, length = codec == CODEC_XOR, bases.codec == CODEC_RAW, chunks.stored_lengths()
    if not np.isin(bases.codec[is_xor], [CODEC_RAW, PLANES.id]).all():
        raise ValueError("a chunk is stored as a difference from a base whose codec is neither raw nor planes")
    misfit = np.where(raw, bases.length != length, (bases.length >= length) | (bases.length == 0))
    if misfit[is_xor].any():
        raise ValueError("a chunk is a difference from a base whose stored length is impossible for the base's codec")
    return bases


def _pieces(tensors: TensorColumns, tensor: NDArray[np.int64], columns: Mapping[str, NDArray[Any]]) -> Pieces:
    """The pieces (parts) of these tensors, after checks. Raises ValueError."""
    if {len(columns[f"piece.{name}"]) for name in ("segment", "offset", "bytes")} != {len(tensor)}:
        raise ValueError("the columns piece.* are not of the same length")
    pieces = Pieces(tensors, np.arange(len(tensor)), _native_order(columns["piece.box"], np.int64), rows=tensor)
    if int(pieces.starts[-1]) != len(pieces.boxes):
        raise ValueError("the length of piece.box does not match the dimensions of the tensors")
    _check_boxes(pieces)
    if (pieces.lengths() != columns["piece.bytes"]).any():
        raise ValueError("piece.bytes of a piece does not match its box")
    return pieces


def _native_order(column: NDArray[Any], kind: type[_Number]) -> NDArray[_Number]:
    """A file's column in the machine's byte order. Not a copy, if the file has the same byte order."""
    native: NDArray[Any] = column.astype(column.dtype.newbyteorder("="), copy=False)
    return native.view(kind)


def _names(text: NDArray[np.generic], lengths: NDArray[np.generic]) -> tuple[str, ...]:
    sizes = lengths.astype(np.int64)
    if sizes.max(initial=0) > NAME_BYTES_MAX or int(sizes.sum()) != len(text):
        raise ValueError("the lengths of the names do not add up to the length of their text")
    data, ends = text.tobytes(), run_starts(sizes).tolist()
    if data.isascii():  # a slice of the text takes half the time of a slice of the bytes that is then decoded
        whole = data.decode()
        return tuple([whole[a:b] for a, b in pairwise(ends)])
    return tuple([data[a:b].decode() for a, b in pairwise(ends)])


def _check(index: Index, segments: Sequence[SegmentRow], *, has_copies: bool) -> None:
    """Check everything that plans rely on, except boxes and chunks, which are checked elsewhere. Raises ValueError."""
    if len(index.rows()) != len(index.tensors.names) + len(index.aliases):
        raise ValueError("two tensors or aliases have the same name")
    if any(row >= len(index.tensors.names) for _, row in index.aliases):
        raise ValueError("an alias refers to a tensor that does not exist")
    check_casts(index.chunks, index.pieces)
    _check_extents(index.chunks, segments, has_copies=has_copies)


def _check_chunks(
    chunks: Chunks, stored: NDArray[np.uint32], codec: NDArray[np.uint8], codecs: Collection[int]
) -> None:
    """Check that a raw chunk is as long as its data, and any other chunk is shorter, but not empty."""
    if {len(stored), len(codec), int(chunks.first[-1])} != {len(chunks.digest)}:
        raise ValueError("the columns chunk.* do not have an entry for each chunk of the pieces")
    if not np.isin(codec, list(codecs)).all():
        raise ValueError(f"a chunk has the unknown codec {int(codec.max())}")
    length, raw = chunks.stored_lengths(), codec == CODEC_RAW
    is_encoded = ~raw & (codec != CAST.id)
    if (stored != length)[raw].any() or (stored >= length)[~raw].any() or not stored[is_encoded].all():
        raise ValueError("the stored length of a chunk is not possible for its codec and its data")


def _check_boxes(pieces: Pieces) -> None:
    """Raise ValueError if a piece's box is not inside its tensor."""
    boxes, sides, tensor = pieces.boxes.view(np.uint64), pieces.tensors.sides.view(np.uint64), pieces.tensor
    first_side, ndim = run_starts(pieces.tensors.ndim), np.diff(pieces.starts) // 2
    for dim in range(int(ndim.max(initial=0))):
        has = ndim > dim
        offsets = boxes[pieces.starts[:-1][has] + dim]
        lengths = boxes[pieces.starts[:-1][has] + ndim[has] + dim]
        limits = sides[first_side[tensor[has]] + dim]
        if (offsets > limits).any() or (lengths > limits - offsets).any():
            raise ValueError("the box of a piece lies outside of its tensor")
    if sides.max(initial=0) >= 1 << 63 or _is_immense(sides, first_side[:-1], pieces.tensors.ndim):
        raise ValueError("a tensor has too many elements")  # else the products of side lengths would overflow


def _is_immense(sides: U64, starts: NDArray[np.int64], ndim: NDArray[np.int64]) -> bool:
    """Whether a tensor has about 2^59 elements or more. `sides`: all side lengths, tensor by tensor."""
    bits, empty = np.zeros(len(ndim)), np.zeros(len(ndim), np.bool_)
    for dim in range(int(ndim.max(initial=0))):
        has = ndim > dim
        side = sides[starts[has] + dim]
        bits[has] += np.log2(np.maximum(side, 1))
        empty[has] |= side == 0
    return bool((bits[~empty] >= 59).any())


def _check_extents(chunks: Chunks, segments: Sequence[SegmentRow], *, has_copies: bool) -> None:
    """Raise ValueError if stored bytes are outside of their segment, or overlap others in a segment of this checkpoint.

    Checks the ranges of pieces; or of chunks, if chunks have locations of their own.
    """
    segment, offset, length = chunks.segment, chunks.offset, chunks.length
    if chunks.stored is not None:
        segment, offset, length = _distinct_places(chunks, has_copies=has_copies)
    if segment.max(initial=0) >= len(segments) and len(segment):
        raise ValueError("a piece or chunk lies in a segment that the manifest does not list")
    if not len(segments):
        return
    begin = np.array([row.header_bytes for row in segments], np.uint64)[segment]
    end = np.array([row.bytes for row in segments], np.uint64)[segment]
    if chunks.stored is not None and chunks.stored.bases is not None:
        _check_bases(chunks.stored.bases, chunks.stored.codec == CODEC_XOR, segments)
    if (offset < begin).any() or (offset > end).any() or (length > end - offset).any():
        raise ValueError("a piece or chunk lies outside of its segment")
    base, some = np.cumsum([0, *(row.bytes for row in segments[:-1])]).astype(np.uint64), length > 0
    if chunks.stored is not None:  # in the file of an earlier checkpoint, several chunks may have one location
        some &= np.array([row.home is None for row in segments])[segment]
    # offsets as if all segments were concatenated; no range passes the end of its segment
    begin = (base[segment] + offset)[some]
    order = np.argsort(begin)
    begin, length = begin[order], length[some][order]
    if (begin[:-1] + length[:-1] > begin[1:]).any():
        raise ValueError("two pieces or chunks overlap in a file")


def _distinct_places(chunks: Chunks, *, has_copies: bool) -> tuple[NDArray[np.uint32], U64, U64]:
    """Segment, offset and length of each stored chunk; with `has_copies`, each location is listed once."""
    assert chunks.stored is not None, "the caller checks this"
    stored = chunks.stored
    numbers = np.flatnonzero(stored.codec != CAST.id)
    if has_copies:
        numbers = numbers[np.lexsort((stored.offset[numbers], stored.segment[numbers]))]
        differs = np.zeros(max(len(numbers) - 1, 0), np.bool_)
        for column in (stored.segment, stored.offset, stored.length, stored.codec, chunks.digest):
            differs |= column[numbers][1:] != column[numbers][:-1]
        numbers = numbers[np.append(np.ones(min(1, len(numbers)), np.bool_), differs)]
    return stored.segment[numbers], stored.offset[numbers], stored.length[numbers].astype(np.uint64)


def _check_bases(bases: ChunkBases, chunks: NDArray[np.bool_], segments: Sequence[SegmentRow]) -> None:
    """Raise ValueError if a base of the selected `chunks` is outside of its segment."""
    segment, offset, length = bases.segment[chunks], bases.offset[chunks], bases.length[chunks].astype(np.uint64)
    if segment.max(initial=0) >= len(segments):
        raise ValueError("the base of a chunk lies in a segment that the manifest does not list")
    begin = np.array([row.header_bytes for row in segments], np.uint64)[segment]
    end = np.array([row.bytes for row in segments], np.uint64)[segment]
    if (offset < begin).any() or (offset > end).any() or (length > end - offset).any():
        raise ValueError("the base of a chunk lies outside of its segment")
