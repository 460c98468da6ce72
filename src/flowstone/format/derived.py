"""The codec `cast`: chunks that are not stored, because they can be computed by rounding stored float32 chunks."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flowstone.config import CHUNK_BYTES
from flowstone.format.codec import CAST, CAST_ELEMENTS, CAST_SOURCES
from flowstone.table.chunks import Chunks
from flowstone.table.pieces import Pieces

StoredColumns: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]


def cast_chunks(chunks: Chunks) -> NDArray[np.int64]:
    """The numbers of the chunks with codec `cast`."""
    none = np.zeros(0, np.int64)
    return none if chunks.stored is None else np.flatnonzero(chunks.stored.codec == CAST.id)


def source_chunk_counts(data_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many float32 source chunks (1 or 2) each rounded chunk has. `data_bytes`: the lengths of the rounded chunks
    in bytes.
    """
    return np.where(data_bytes > CHUNK_BYTES // 2, 2, 1)


def check_casts(chunks: Chunks, pieces: Pieces) -> None:
    """Raise ValueError unless each rounded chunk is made from all elements of one or two stored float32 chunks of one
    piece (part of a tensor).
    """
    numbers, stored = cast_chunks(chunks), chunks.stored
    if not len(numbers) or stored is None:
        return
    if (stored.offset[numbers] >= len(stored.codec)).any():
        raise ValueError("a chunk is marked as rounded from other chunks, but these do not exist")
    if stored.segment[numbers].any() or stored.length[numbers].any():
        raise ValueError("a chunk is marked as rounded from other chunks, but has stored bytes of its own")
    source = stored.offset[numbers].astype(np.int64)
    dtypes = [dtype.name for dtype in pieces.tensors.dtypes]
    is_element = np.array([name in CAST_ELEMENTS for name in dtypes], np.bool_)
    is_single = np.array([name == "float32" for name in dtypes], np.bool_)
    (cast_piece, cast_within), (source_piece, source_within) = chunks.locate(numbers), chunks.locate(source)
    data_bytes = chunks.logical_bytes(cast_piece, cast_within, cast_within + 1)
    halves = source_chunk_counts(data_bytes)
    if (chunks.logical_bytes(source_piece, source_within, source_within + halves) != 2 * data_bytes).any():
        raise ValueError(
            "a chunk is marked as rounded from other chunks, but its data is not half as long as the data of these "
            "chunks together"
        )
    if not (is_element[pieces.tensor[cast_piece]].all() and is_single[pieces.tensor[source_piece]].all()):
        raise ValueError(
            "a chunk is marked as rounded from other chunks, but those chunks are not float32, or the rounded chunk's "
            "own dtype is not one that Flowstone rounds to",
        )
    if not np.isin(stored.codec[np.concatenate([source, source + halves - 1])], list(CAST_SOURCES)).all():
        raise ValueError("a chunk is marked as rounded from other chunks, but their codec is not raw, planes or xor")


def stored_columns(chunks: Chunks, pieces: Pieces) -> StoredColumns | None:
    """The table of stored chunks, as arrays for the engine. For a rounded chunk, the array of lengths has its element
    type instead.
    """
    stored = chunks.stored
    if stored is None:
        return None
    numbers, length = cast_chunks(chunks), stored.length
    if len(numbers):
        elements = np.array([CAST_ELEMENTS.get(dtype.name, 0) for dtype in pieces.tensors.dtypes], np.uint32)
        length = length.copy()
        length[numbers] = elements[pieces.tensor[chunks.locate(numbers)[0]]]
    return stored.segment, stored.offset, length, stored.codec
