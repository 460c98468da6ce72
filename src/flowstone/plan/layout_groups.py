"""Layout groups: a view of the pieces of all ranks that stays small for any number of ranks and tensors.

A layout splits most tensors alike: tensors of one shape have the same box on a rank. So a rank's pieces list its
distinct boxes once (`Pieces.compact`), and most ranks differ only in the numbers of these boxes. Such ranks form one
`LayoutGroup`. Tensors that have the same boxes on all ranks form a class; a decision for one of them fits all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.errors import CollisionError
from flowstone.table.box import padding_mask
from flowstone.table.dtype import DType
from flowstone.table.pieces import Pieces, TensorColumns

WHOLE = -1  # the kind of a piece that is the whole tensor


@dataclass(frozen=True, eq=False)
class Tensors(TensorColumns):
    """The tensors of all ranks, in order of first occurrence, and the rows of each rank's tensors.

    rows     id of the tensors of some ranks -> the row of each of their positions
    buffers  rows of module buffers, if they are buffers on every rank that holds them: not replicas that must be equal,
             but one value per rank, of which the lowest rank's is saved
    """

    rows: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    @classmethod
    def of(cls, layouts: Sequence[Pieces]) -> Tensors:
        """Raises CollisionError if two ranks give one tensor different dtypes or shapes."""
        known: dict[str, int] = {}
        dtypes: list[DType] = []
        shapes: list[tuple[int, ...]] = []
        rows: dict[int, NDArray[np.int64]] = {}
        buffers: set[int] = set()
        others: set[int] = set()
        for rank, one in enumerate(layouts):
            assert one.rows is None, "a rank has one piece for each of its tensors"
            if id(one.tensors) not in rows:
                found = rows[id(one.tensors)] = _enter(one.tensors, rank, known, dtypes, shapes)
                is_buffer = np.zeros(len(found), np.bool_)
                is_buffer[list(one.tensors.buffers)] = True
                buffers.update(found[is_buffer].tolist())
                others.update(found[~is_buffer].tolist())
        return cls(tuple(known), tuple(dtypes), tuple(shapes), frozenset(buffers - others), rows)

    def whole(self, width: int) -> NDArray[np.int64]:
        """The box of each whole tensor, padded: `width` offsets, then `width` lengths."""
        boxes = np.zeros((len(self.shapes), 2 * width), np.int64)
        for at, shape in enumerate(self.shapes):
            boxes[at, width : width + len(shape)] = shape
        return boxes


def _enter(
    tensors: TensorColumns, rank: int, known: dict[str, int], dtypes: list[DType], shapes: list[tuple[int, ...]]
) -> NDArray[np.int64]:
    """The rows of a rank's tensors; new tensors are added."""
    found = np.empty(len(tensors.names), np.int64)
    for at, (name, dtype, shape) in enumerate(zip(tensors.names, tensors.dtypes, tensors.shapes, strict=True)):
        row = found[at] = known.setdefault(name, len(known))
        if row == len(dtypes):
            dtypes.append(dtype)
            shapes.append(shape)
        elif (dtypes[row], shapes[row]) != (dtype, shape):
            raise CollisionError(
                f"ranks describe {name!r} differently", expected=f"{dtypes[row].name} {shapes[row]}",
                found=f"{dtype.name} {shape} on rank {rank}",
                next="give it the same dtype and global shape on every rank, or names of its own",
            )
    return found


class LayoutGroup(msgspec.Struct, frozen=True, eq=False):
    """Ranks whose pieces differ only in the numbers of their boxes.

    ranks   ascending
    tensor  for each position: its row among all tensors
    kind    for each position: its box among `boxes`, or WHOLE
    boxes   for each variant and kind a box, padded: as many offsets as the widest tensor has, then as many lengths
    variant for each rank: ranks with equal boxes, as replicas have, share one
    ndim    for each kind
    """

    ranks: NDArray[np.int64]
    tensor: NDArray[np.int64]
    kind: NDArray[np.int64]
    boxes: NDArray[np.int64]
    variant: NDArray[np.int64]
    ndim: NDArray[np.int64]

    def occurrences(self) -> NDArray[np.int64]:
        """For each position: the number of earlier positions with the same tensor."""
        order = np.argsort(self.tensor, kind="stable")
        tensor = self.tensor[order]
        starts = np.flatnonzero(np.diff(tensor, prepend=-1))
        found = np.empty(len(order), np.int64)
        found[order] = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
        return found


def layout_groups(layouts: Sequence[Pieces], tensors: Tensors, width: int) -> list[LayoutGroup]:
    """Group the ranks of a job by what they hold. `width`: the most dimensions of any tensor."""
    members: dict[tuple[int, int, int], list[int]] = {}
    numbers: dict[int, int] = {}  # of an array, by its id
    contents: dict[bytes, int] = {}

    def number(column: NDArray[np.int64] | None) -> int:
        if column is None:
            return -1
        if id(column) not in numbers:
            numbers[id(column)] = contents.setdefault(column.tobytes(), len(contents))
        return numbers[id(column)]

    for rank, one in enumerate(layouts):
        members.setdefault((id(one.tensors), number(one.parts), number(one.kinds)), []).append(rank)
    return [_layout_group(layouts, np.array(ranks, np.int64), tensors, width) for ranks in members.values()]


def _layout_group(layouts: Sequence[Pieces], ranks: NDArray[np.int64], tensors: Tensors, width: int) -> LayoutGroup:
    one = layouts[int(ranks[0])]
    kinds = np.arange(len(one.parts)) if one.kinds is None else one.kinds
    kind = np.full(len(one), WHOLE, np.int64)
    kind[one.parts] = kinds
    ndim = np.zeros(int(kinds.max(initial=-1)) + 1, np.int64)
    ndim[kinds] = one.tensors.ndim[one.parts]
    mask = padding_mask(ndim, width)
    numbers = [layouts[rank].boxes for rank in ranks.tolist()]
    contents = {key: hashlib.blake2b(of, digest_size=16).digest() for key, of in {id(of): of for of in numbers}.items()}
    distinct = {contents[id(of)]: of for of in numbers}
    at = {content: position for position, content in enumerate(distinct)}
    boxes = np.zeros((len(distinct), *mask.shape), np.int64)
    boxes[:, mask] = np.stack(list(distinct.values()))
    variant = np.array([at[contents[id(of)]] for of in numbers], np.int64)
    return LayoutGroup(ranks, tensors.rows[id(one.tensors)], kind, boxes, variant, ndim)


def tensor_classes(
    found: Sequence[LayoutGroup], tensors: Tensors, apart: Sequence[NDArray[np.int64] | None]
) -> NDArray[np.int64]:
    """A number for each tensor: equal for two tensors with the same dtype and shape, and the same box on every rank.

    Buffers have numbers of their own.

    apart  for each layout group, numbers of its positions that also keep tensors apart
    """
    alike: dict[tuple[DType, tuple[int, ...]], int] = {}
    pairs = zip(tensors.dtypes, tensors.shapes, strict=True)
    number = np.array([alike.setdefault(pair, len(alike)) for pair in pairs], np.int64)
    number[list(tensors.buffers)] += len(alike)
    count = 2 * len(alike)
    for layout_group, more in zip(found, apart, strict=True):
        occurrence = layout_group.occurrences()
        kind = layout_group.kind if more is None else (layout_group.kind + 1) * (int(more.max(initial=0)) + 1) + more
        for at in range(int(occurrence.max(initial=-1)) + 1):
            here = occurrence == at
            tensor = layout_group.tensor[here]
            pair = number[tensor] * (int(kind.max()) + 2) + kind[here] + 1
            distinct, finer = np.unique(pair, return_inverse=True)
            number[tensor] = count + finer  # tensors that are not in the group keep numbers of their own
            count += len(distinct)
    return np.unique(number, return_inverse=True)[1].reshape(-1)
