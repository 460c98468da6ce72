"""Stored tensors: which boxes fill a tensor, and where their bytes are in files of any format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from flowstone.table.box import Box
from flowstone.table.dtype import DType


class DigestedRun(msgspec.Struct, frozen=True):
    """A range of bytes of a file, divided into chunks of CHUNK_BYTES. `first_chunk`: the number of the first chunk's
    digest in a list of digests; those of the other chunks follow.
    """

    offset_bytes: int
    bytes: int
    first_chunk: int


class StoredBox(msgspec.Struct, frozen=True):
    """A box (region) of a tensor, and where it is in a file.

    file          number of the file among the source's files; None: the box is in no file, and all zeros
    offset_bytes  offset of element (0, ..., 0) in the file
    strides       strides in the file, in elements; None: the box is stored row-major and dense
    digested      the range of bytes that contains the box, with digests; None: the bytes have no digests
    """

    box: Box
    file: int | None
    offset_bytes: int
    strides: tuple[int, ...] | None = None
    digested: DigestedRun | None = None


class DigestedPiece(msgspec.Struct, frozen=True):
    """A box whose row-major bytes have digests, one for each CHUNK_BYTES. `first_chunk`: the number of the first of
    these digests in a list of digests; the others follow.
    """

    box: Box
    first_chunk: int


class SourceTensor(msgspec.Struct, frozen=True):
    """A tensor by its global name, and the boxes that fill it.

    pieces  the pieces in which it was saved, if it is from a Flowstone checkpoint and no rule has changed it
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]
    pieces: tuple[DigestedPiece, ...] = ()

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.item_bytes


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a dense tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def reach_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements the storage has from a box's first element to its last one, both included; 0 if the box is
    empty.
    """
    if 0 in shape:
        return 0
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
