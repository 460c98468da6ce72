"""Tensors made of others without moving a byte: cuts, concatenations and transpositions of tables of boxes.

A box of the result is a box of a source with another place and other strides. So what a copy reads through its window
stays what it is, whatever rules have made of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from flowstone.table.box import Box
from flowstone.table.stored import SourceTensor, StoredBox, row_major


def narrow(tensor: SourceTensor, dim: int, begin: int, length: int) -> SourceTensor:
    """Elements [begin, begin + length) of a dimension."""
    found = []
    for stored in tensor.boxes:
        low, high = max(begin, stored.box.offset[dim]), min(begin + length, stored.box.end[dim])
        if low < high:
            strides = strides_of(stored)
            skipped = (low - stored.box.offset[dim]) * strides[dim] * tensor.dtype.item_bytes
            box = Box(_set(stored.box.offset, dim, low - begin), _set(stored.box.shape, dim, high - low))
            found.append(_moved(stored, box, strides, skipped))
    return _tensor(tensor, _set(tensor.shape, dim, length), found)


def concatenate(tensors: Sequence[SourceTensor], dim: int) -> SourceTensor:
    """One after the other along a dimension; all other dimensions and types are the same."""
    found: list[StoredBox] = []
    at = 0
    for tensor in tensors:
        for stored in tensor.boxes:
            box = Box(_set(stored.box.offset, dim, stored.box.offset[dim] + at), stored.box.shape)
            _append(found, replace(stored, box=box), dim, tensor.dtype.item_bytes)
        at += tensor.shape[dim]
    names = dict.fromkeys(tensor.name for tensor in tensors)
    return replace(_tensor(tensors[0], _set(tensors[0].shape, dim, at), found), name=" + ".join(names))


def transpose(tensor: SourceTensor, axes: Sequence[int]) -> SourceTensor:
    """Dimension axes[i] becomes dimension i."""
    found = []
    for stored in tensor.boxes:
        box = Box(_pick(stored.box.offset, axes), _pick(stored.box.shape, axes))
        found.append(_moved(stored, box, _pick(strides_of(stored), axes), 0))
    return _tensor(tensor, _pick(tensor.shape, axes), found)


def add_dimension(tensor: SourceTensor, dim: int) -> SourceTensor:
    """The same with one dimension more, of one element."""
    found = []
    for stored in tensor.boxes:
        box = Box(_insert(stored.box.offset, dim, 0), _insert(stored.box.shape, dim, 1))
        found.append(_moved(stored, box, _insert(strides_of(stored), dim, 0), 0))
    return _tensor(tensor, _insert(tensor.shape, dim, 1), found)


def drop_dimension(tensor: SourceTensor, dim: int) -> SourceTensor:
    """The same without a dimension, which has one element."""
    axes = [other for other in range(len(tensor.shape)) if other != dim]
    return transpose(tensor, axes)


def zeros(like: SourceTensor, shape: tuple[int, ...]) -> SourceTensor:
    """A tensor that lies in no file."""
    boxes = (StoredBox(Box.whole(shape), None, 0),) if math.prod(shape) else ()
    return SourceTensor(like.name, like.dtype, shape, boxes)


def strides_of(stored: StoredBox) -> tuple[int, ...]:
    """The strides of a box, in elements."""
    return stored.strides if stored.strides is not None else row_major(stored.box.shape)


def _tensor(like: SourceTensor, shape: tuple[int, ...], boxes: Iterable[StoredBox]) -> SourceTensor:
    kept = tuple(stored for stored in boxes if stored.box.elements)
    assert sum(stored.box.elements for stored in kept) == math.prod(shape), "every element has its place, once"
    return SourceTensor(like.name, like.dtype, shape, kept)


def _moved(stored: StoredBox, box: Box, strides: tuple[int, ...], skipped_bytes: int) -> StoredBox:
    if stored.file is None:
        return replace(stored, box=box)
    sides = zip(box.shape, strides, row_major(box.shape), strict=True)
    is_dense = all(side == 1 or stride == dense for side, stride, dense in sides)
    return replace(
        stored, box=box, strides=None if is_dense else strides, offset_bytes=stored.offset_bytes + skipped_bytes
    )


def _append(found: list[StoredBox], stored: StoredBox, dim: int, item: int) -> None:
    """Add a box; as a part of the one before, where it goes on with it in the file."""
    strides = _joined_strides(found[-1], stored, dim, item) if found else None
    if strides is None:
        found.append(stored)
        return
    last = found[-1]
    box = Box(last.box.offset, _set(last.box.shape, dim, last.box.shape[dim] + stored.box.shape[dim]))
    found[-1] = _moved(last, box, strides, 0)


def _joined_strides(last: StoredBox, stored: StoredBox, dim: int, item: int) -> tuple[int, ...] | None:
    """The strides of two boxes as one, the second of which follows the first in a dimension; None: they are two."""
    a, b = last.box, stored.box
    sides = [other for other in range(len(a.shape)) if other != dim]
    is_next = a.end[dim] == b.offset[dim] and all(
        (a.offset[side], a.shape[side]) == (b.offset[side], b.shape[side]) for side in sides
    )
    if not is_next or (last.file, last.digested) != (stored.file, stored.digested):
        return None
    one, other = strides_of(last), strides_of(stored)
    if last.file is None:
        return one
    stride, rest = divmod(stored.offset_bytes - last.offset_bytes, a.shape[dim] * item)
    strides = [(box.shape, found) for box, found in ((a, one), (b, other))]
    is_regular = all(shape[dim] == 1 or found[dim] == stride for shape, found in strides) and all(
        one[side] == other[side] for side in sides if a.shape[side] > 1
    )
    # Beyond the reach of one slice there are bytes between them that are not theirs: one read would bring those, too.
    reach = sum((a.shape[side] - 1) * one[side] for side in sides) + 1
    return _set(one, dim, stride) if is_regular and not rest and 0 < stride <= reach else None


def _set(numbers: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def _insert(numbers: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*numbers[:dim], value, *numbers[dim:])


def _pick(numbers: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(numbers[axis] for axis in axes)
