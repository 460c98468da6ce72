"""Stored tensors: which boxes fill a tensor, and where the bytes of each lie in files of any format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from flowstone.table.box import Box
from flowstone.table.dtype import DType


class DigestedRun(msgspec.Struct, frozen=True):
    """A run of bytes of a file, in chunks of CHUNK_BYTES, the first of which has the digest number `first_chunk`."""

    offset_bytes: int
    bytes: int
    first_chunk: int


class StoredBox(msgspec.Struct, frozen=True):
    """A box of a tensor in a file.

    file          position among the source's files; None: it lies in no file, and is zero
    offset_bytes  of the element (0, ..., 0)
    strides       in elements, where the box is not stored row-major and dense
    digested      the run of bytes that it lies in; None: nothing vouches for the bytes
    """

    box: Box
    file: int | None
    offset_bytes: int
    strides: tuple[int, ...] | None = None
    digested: DigestedRun | None = None


class DigestedPiece(msgspec.Struct, frozen=True):
    """A box whose row-major bytes, wherever they lie, have digests in chunks of CHUNK_BYTES, from `first_chunk` on."""

    box: Box
    first_chunk: int


class SourceTensor(msgspec.Struct, frozen=True):
    """A tensor by its global name, and the boxes that fill it.

    pieces  what it was saved in, where that is a checkpoint of ours and no rule has changed the tensor
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
    """How many elements lie between the first and the last element of a box, both included; 0 for an empty one."""
    if 0 in shape:
        return 0
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
