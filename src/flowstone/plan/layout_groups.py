"""Layout groups: a table of the pieces of all ranks that stays small for any number of ranks and tensors.

A box is the region of a tensor that a rank holds. Most tensors are divided in the same way: tensors with the same shape
have the same box on a rank. So a rank's list of pieces contains each distinct box once (`Pieces.compact`), and the
lists of most ranks are equal except for the offsets and lengths of the boxes. Such ranks form one `LayoutGroup`.
Tensors that have the same boxes on all ranks form a class; a decision for one tensor of a class applies to all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.errors import CollisionError
from flowstone.table.box import padding_mask
from flowstone.table.dtype import DType
from flowstone.table.pieces import Pieces, TensorColumns

WHOLE = -1  # in `LayoutGroup.kind`: the piece is a full tensor


class Tensors(TensorColumns, frozen=True, eq=False, dict=True):
    """The tensors of all ranks, one row each, in order of first occurrence.

    rows     the id() of each TensorColumns (a rank's list of tensors, which ranks may share) -> for each tensor in that
             list, its row in this table
    buffers  rows of tensors that are module buffers on every rank that holds them: their values may differ between
             ranks, and the lowest rank's value is saved
    """

    rows: Mapping[int, NDArray[np.int64]] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, layouts: Sequence[Pieces]) -> Tensors:
        """The tensors of these layouts. Raises CollisionError if ranks give a tensor different dtypes or shapes."""
        names: dict[str, int] = {}
        dtypes: list[DType] = []
        shapes: list[tuple[int, ...]] = []
        rows: dict[int, NDArray[np.int64]] = {}
        buffers: set[int] = set()
        others: set[int] = set()
        for rank, layout in enumerate(layouts):
            assert layout.rows is None, "a rank has one piece for each of its tensors"
            if id(layout.tensors) not in rows:
                tensor_rows = rows[id(layout.tensors)] = _enter(layout.tensors, rank, names, dtypes, shapes)
                is_buffer = np.zeros(len(tensor_rows), np.bool_)
                is_buffer[list(layout.tensors.buffers)] = True
                buffers.update(tensor_rows[is_buffer].tolist())
                others.update(tensor_rows[~is_buffer].tolist())
        return cls(tuple(names), tuple(dtypes), tuple(shapes), frozenset(buffers - others), rows)

    def whole(self, width: int) -> NDArray[np.int64]:
        """For each tensor, the box that is the full tensor: `width` offsets, then `width` lengths, padded with zeros.
        """
        boxes = np.zeros((len(self.shapes), 2 * width), np.int64)
        for row, shape in enumerate(self.shapes):
            boxes[row, width : width + len(shape)] = shape
        return boxes


def _enter(
    tensors: TensorColumns, rank: int, names: dict[str, int], dtypes: list[DType], shapes: list[tuple[int, ...]]
) -> NDArray[np.int64]:
    """For each of a rank's tensors, its row. Tensors without a row are added to `names`, `dtypes` and `shapes`."""
    rows = np.empty(len(tensors.names), np.int64)
    for i, (name, dtype, shape) in enumerate(zip(tensors.names, tensors.dtypes, tensors.shapes, strict=True)):
        row = rows[i] = names.setdefault(name, len(names))
        if row == len(dtypes):
            dtypes.append(dtype)
            shapes.append(shape)
        elif (dtypes[row], shapes[row]) != (dtype, shape):
            raise CollisionError(
                f"ranks describe {name!r} differently", expected=f"{dtypes[row].name} {shapes[row]}",
                found=f"{dtype.name} {shape} on rank {rank}",
                next="give it the same dtype and global shape on every rank, or a different name on each",
            )
    return rows


class LayoutGroup(msgspec.Struct, frozen=True, eq=False):
    """Ranks whose lists of pieces are equal, except for the offsets and lengths of the boxes.

    ranks    the numbers of these ranks, ascending
    tensor   for each piece in the list: the row of its tensor among all tensors
    kind     for each piece in the list: the number of its box among the distinct boxes of a rank, or WHOLE if the piece
             is a full tensor
    boxes    boxes[variant, kind]: offsets, then lengths, padded with zeros to the largest number of dimensions
    variant  for each rank: the number of its list of boxes; ranks with equal boxes, such as replicas, share one
    ndim     for each kind: the number of dimensions of its box
    """

    ranks: NDArray[np.int64]
    tensor: NDArray[np.int64]
    kind: NDArray[np.int64]
    boxes: NDArray[np.int64]
    variant: NDArray[np.int64]
    ndim: NDArray[np.int64]

    def occurrences(self) -> NDArray[np.int64]:
        """For each piece in the list: how many earlier pieces in the list are of the same tensor."""
        order = np.argsort(self.tensor, kind="stable")
        tensor = self.tensor[order]
        starts = np.flatnonzero(np.diff(tensor, prepend=-1))
        earlier = np.empty(len(order), np.int64)
        earlier[order] = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
        return earlier


def layout_groups(layouts: Sequence[Pieces], tensors: Tensors, width: int) -> list[LayoutGroup]:
    """Group the ranks of a job by their pieces. `width`: the most dimensions of any tensor."""
    members: dict[tuple[int, int, int], list[int]] = {}
    numbers: dict[int, int] = {}  # id() of an array -> a number that equal arrays share
    contents: dict[bytes, int] = {}

    def number(column: NDArray[np.int64] | None) -> int:
        if column is None:
            return -1
        if id(column) not in numbers:
            numbers[id(column)] = contents.setdefault(column.tobytes(), len(contents))
        return numbers[id(column)]

    for rank, layout in enumerate(layouts):
        members.setdefault((id(layout.tensors), number(layout.parts), number(layout.kinds)), []).append(rank)
    return [_layout_group(layouts, np.array(ranks, np.int64), tensors, width) for ranks in members.values()]


def _layout_group(layouts: Sequence[Pieces], ranks: NDArray[np.int64], tensors: Tensors, width: int) -> LayoutGroup:
    layout = layouts[int(ranks[0])]
    kinds = np.arange(len(layout.parts)) if layout.kinds is None else layout.kinds
    kind = np.full(len(layout), WHOLE, np.int64)
    kind[layout.parts] = kinds
    ndim = np.zeros(int(kinds.max(initial=-1)) + 1, np.int64)
    ndim[kinds] = layout.tensors.ndim[layout.parts]
    mask = padding_mask(ndim, width)
    numbers = [layouts[rank].boxes for rank in ranks.tolist()]
    arrays = {id(rank_boxes): rank_boxes for rank_boxes in numbers}
    contents = {key: hashlib.blake2b(array, digest_size=16).digest() for key, array in arrays.items()}
    distinct = {contents[id(rank_boxes)]: rank_boxes for rank_boxes in numbers}
    variants = {content: position for position, content in enumerate(distinct)}
    boxes = np.zeros((len(distinct), *mask.shape), np.int64)
    boxes[:, mask] = np.stack(list(distinct.values()))
    variant = np.array([variants[contents[id(rank_boxes)]] for rank_boxes in numbers], np.int64)
    return LayoutGroup(ranks, tensors.rows[id(layout.tensors)], kind, boxes, variant, ndim)


def tensor_classes(
    groups: Sequence[LayoutGroup], tensors: Tensors, apart: Sequence[NDArray[np.int64] | None]
) -> NDArray[np.int64]:
    """A class number for each tensor: equal for tensors with the same dtype and shape, and the same box on every rank.

    Buffers never share a class with other tensors.

    apart  for each layout group, a number for each piece in its list, or None; tensors whose pieces have different
           numbers get different classes
    """
    alike: dict[tuple[DType, tuple[int, ...]], int] = {}
    pairs = zip(tensors.dtypes, tensors.shapes, strict=True)
    number = np.array([alike.setdefault(pair, len(alike)) for pair in pairs], np.int64)
    number[list(tensors.buffers)] += len(alike)
    count = 2 * len(alike)
    for layout_group, more in zip(groups, apart, strict=True):
        occurrence = layout_group.occurrences()
        kind = layout_group.kind if more is None else (layout_group.kind + 1) * (int(more.max(initial=0)) + 1) + more
        for i in range(int(occurrence.max(initial=-1)) + 1):
            here = occurrence == i
            tensor = layout_group.tensor[here]
            pair = number[tensor] * (int(kind.max()) + 2) + kind[here] + 1
            distinct, finer = np.unique(pair, return_inverse=True)
            number[tensor] = count + finer  # tensors that are not in the group keep their numbers
            count += len(distinct)
    return np.unique(number, return_inverse=True)[1].reshape(-1)
