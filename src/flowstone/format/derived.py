"""Codec `cast`: chunks of which nothing is stored, since they are what float32 chunks are rounded to."""

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
    """The numbers of the chunks that are rounded from others."""
    none = np.zeros(0, np.int64)
    return none if chunks.stored is None else np.flatnonzero(chunks.stored.codec == CAST.id)


def halves_of(data_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """From how many chunks the chunks of so many bytes are rounded."""
    return np.where(data_bytes > CHUNK_BYTES // 2, 2, 1)


def check_casts(chunks: Chunks, pieces: Pieces) -> None:
    """Raise ValueError unless all that is rounded is so from whole float32 chunks of one piece, which are stored."""
    numbers, stored = cast_chunks(chunks), chunks.stored
    if not len(numbers) or stored is None:
        return
    if (stored.offset[numbers] >= len(stored.codec)).any():
        raise ValueError("a chunk is rounded from one that is not there")
    if stored.segment[numbers].any() or stored.length[numbers].any():
        raise ValueError("a chunk that is rounded has no bytes of its own")
    source = stored.offset[numbers].astype(np.int64)
    dtypes = [dtype.name for dtype in pieces.tensors.dtypes]
    is_element = np.array([name in CAST_ELEMENTS for name in dtypes], np.bool_)
    is_single = np.array([name == "float32" for name in dtypes], np.bool_)
    (piece, within), (of, at) = chunks.locate(numbers), chunks.locate(source)
    data_bytes = chunks.logical_bytes(piece, within, within + 1)
    halves = halves_of(data_bytes)
    if (chunks.logical_bytes(of, at, at + halves) != 2 * data_bytes).any():
        raise ValueError("a chunk is rounded from one that is not twice as long")
    if not (is_element[pieces.tensor[piece]].all() and is_single[pieces.tensor[of]].all()):
        raise ValueError("a chunk is rounded to or from another type")
    if not np.isin(stored.codec[np.concatenate([source, source + halves - 1])], list(CAST_SOURCES)).all():
        raise ValueError("a chunk is rounded from one that is not stored")


def stored_columns(chunks: Chunks, pieces: Pieces) -> StoredColumns | None:
    """The stored chunks as the engine takes them: of those that are rounded, the element in the place of a length."""
    stored = chunks.stored
    if stored is None:
        return None
    numbers, length = cast_chunks(chunks), stored.length
    if len(numbers):
        elements = np.array([CAST_ELEMENTS.get(dtype.name, 0) for dtype in pieces.tensors.dtypes], np.uint32)
        length = length.copy()
        length[numbers] = elements[pieces.tensor[chunks.locate(numbers)[0]]]
    return stored.segment, stored.offset, length, stored.codec
