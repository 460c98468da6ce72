"""Tensors made from other tensors without copying bytes: slices, concatenations and transpositions of their boxes.

A box (a rectangular region) of the result is a box of a source tensor, with another offset and other strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from flowstone.table.box import Box
from flowstone.table.stored import SourceTensor, StoredBox, row_major


def narrow(tensor: SourceTensor, dim: int, begin: int, length: int) -> SourceTensor:
    """The part of the tensor with the indices [begin, begin + length) of dimension `dim`."""
    boxes = []
    for stored in tensor.boxes:
        low, high = max(begin, stored.box.offset[dim]), min(begin + length, stored.box.end[dim])
        if low < high:
            strides = strides_of(stored)
            skipped = (low - stored.box.offset[dim]) * strides[dim] * tensor.dtype.item_bytes
            box = Box(_set(stored.box.offset, dim, low - begin), _set(stored.box.shape, dim, high - low))
            boxes.append(_moved(stored, box, strides, skipped))
    return _tensor(tensor, _set(tensor.shape, dim, length), boxes)


def concatenate(tensors: Sequence[SourceTensor], dim: int) -> SourceTensor:
    """Concatenate tensors along dimension `dim`. Their other dimensions, and their dtypes, must be equal."""
    boxes: list[StoredBox] = []
    begin = 0
    for tensor in tensors:
        for stored in tensor.boxes:
            box = Box(_set(stored.box.offset, dim, stored.box.offset[dim] + begin), stored.box.shape)
            _append(boxes, replace(stored, box=box), dim, tensor.dtype.item_bytes)
        begin += tensor.shape[dim]
    names = dict.fromkeys(tensor.name for tensor in tensors)
    return replace(_tensor(tensors[0], _set(tensors[0].shape, dim, begin), boxes), name=" + ".join(names))


def transpose(tensor: SourceTensor, axes: Sequence[int]) -> SourceTensor:
    """Dimension axes[i] becomes dimension i."""
    boxes = []
    for stored in tensor.boxes:
        box = Box(_pick(stored.box.offset, axes), _pick(stored.box.shape, axes))
        boxes.append(_moved(stored, box, _pick(strides_of(stored), axes), 0))
    return _tensor(tensor, _pick(tensor.shape, axes), boxes)


def add_dimension(tensor: SourceTensor, dim: int) -> SourceTensor:
    """Insert a dimension of one element."""
    boxes = []
    for stored in tensor.boxes:
        box = Box(_insert(stored.box.offset, dim, 0), _insert(stored.box.shape, dim, 1))
        boxes.append(_moved(stored, box, _insert(strides_of(stored), dim, 0), 0))
    return _tensor(tensor, _insert(tensor.shape, dim, 1), boxes)


def drop_dimension(tensor: SourceTensor, dim: int) -> SourceTensor:
    """Remove a dimension of one element."""
    axes = [other for other in range(len(tensor.shape)) if other != dim]
    return transpose(tensor, axes)


def zeros(like: SourceTensor, shape: tuple[int, ...]) -> SourceTensor:
    """A tensor of zeros of this shape, with the dtype of `like`. It is not stored in any file."""
    boxes = (StoredBox(Box.whole(shape), None, 0),) if math.prod(shape) else ()
    return SourceTensor(like.name, like.dtype, shape, boxes)


def strides_of(stored: StoredBox) -> tuple[int, ...]:
    """The strides of a box, in elements."""
    return stored.strides if stored.strides is not None else row_major(stored.box.shape)


def _tensor(like: SourceTensor, shape: tuple[int, ...], boxes: Iterable[StoredBox]) -> SourceTensor:
    filled = tuple(stored for stored in boxes if stored.box.elements)
    assert sum(stored.box.elements for stored in filled) == math.prod(shape), "boxes cover every element once"
    return SourceTensor(like.name, like.dtype, shape, filled)


def _moved(stored: StoredBox, box: Box, strides: tuple[int, ...], skipped_bytes: int) -> StoredBox:
    if stored.file is None:
        return replace(stored, box=box)
    sides = zip(box.shape, strides, row_major(box.shape), strict=True)
    is_dense = all(side == 1 or stride == dense for side, stride, dense in sides)
    return replace(
        stored, box=box, strides=None if is_dense else strides, offset_bytes=stored.offset_bytes + skipped_bytes
    )


def _append(boxes: list[StoredBox], stored: StoredBox, dim: int, item: int) -> None:
    """Add a box to `boxes`. If the new box continues the last one in the file, extend the last one instead."""
    strides = _joined_strides(boxes[-1], stored, dim, item) if boxes else None
    if strides is None:
        boxes.append(stored)
        return
    last = boxes[-1]
    box = Box(last.box.offset, _set(last.box.shape, dim, last.box.shape[dim] + stored.box.shape[dim]))
    boxes[-1] = _moved(last, box, strides, 0)


def _joined_strides(last: StoredBox, stored: StoredBox, dim: int, item: int) -> tuple[int, ...] | None:
    """The strides of a box that joins two boxes along a dimension; None if they cannot be joined."""
    a, b = last.box, stored.box
    sides = [other for other in range(len(a.shape)) if other != dim]
    is_next = a.end[dim] == b.offset[dim] and all(
        (a.offset[side], a.shape[side]) == (b.offset[side], b.shape[side]) for side in sides
    )
    if not is_next or (last.file, last.digested) != (stored.file, stored.digested):
        return None
    strides_a, strides_b = strides_of(last), strides_of(stored)
    if last.file is None:
        return strides_a
    stride, rest = divmod(stored.offset_bytes - last.offset_bytes, a.shape[dim] * item)
    strides = [(box.shape, strides_of_box) for box, strides_of_box in ((a, strides_a), (b, strides_b))]
    is_regular = all(shape[dim] == 1 or strides_of_box[dim] == stride for shape, strides_of_box in strides) and all(
        strides_a[side] == strides_b[side] for side in sides if a.shape[side] > 1
    )
    # If the stride were larger than one slice, a read of the joined box would include bytes between its slices.
    reach = sum((a.shape[side] - 1) * strides_a[side] for side in sides) + 1
    return _set(strides_a, dim, stride) if is_regular and not rest and 0 < stride <= reach else None


def _set(numbers: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def _insert(numbers: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*numbers[:dim], value, *numbers[dim:])


def _pick(numbers: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(numbers[axis] for axis in axes)
