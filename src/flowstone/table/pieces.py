"""Pieces: the tensors, or parts of tensors, that one rank holds, or that all ranks have stored.

A *tensor* is a global name with a dtype and a shape. A *box* is a region of it, in elements.
A *piece* is the box of a tensor that one rank holds, or has stored.

A state has tens of thousands of pieces, so they are passed as arrays with one entry for each piece, in three objects
with different lifetimes:

    Pieces  names, dtypes, shapes, boxes, and which are buffers; reused between saves, shared by ranks, sent, and stored
            as an index
    Layout  pieces, aliases (tied weights), and which are lazy (may be captured after `save` has returned); plans are
            made from it, and reused until it changes
    Places  addresses, devices, and the owners that keep the memory alive; for one save or one load
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise, repeat
from operator import attrgetter
from typing import TypeAlias, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.table.box import Box, padding_mask, products
from flowstone.table.chunks import run_starts, spread
from flowstone.table.dtype import DType

Numbers: TypeAlias = NDArray[np.int64]
_Value = TypeVar("_Value")

_BATCH_PIECES = 1 << 14
"""How many pieces `Pieces.numbers` handles at a time: the rows of a batch fit in a core's cache."""


class Piece(msgspec.Struct, frozen=True):
    """Describes the box of a global tensor that one rank holds. It refers to no memory."""

    name: str
    dtype: DType
    shape: tuple[int, ...]  # the shape of the global tensor
    box: Box

    @property
    def bytes(self) -> int:
        return self.box.elements * self.dtype.item_bytes


class Memory(msgspec.Struct, frozen=True):
    """The memory of a piece's elements. `owner` keeps it alive and is not used otherwise.

    address        address of element (0, ..., 0) in this process; a device address if `device` is not "cpu"
    strides_bytes  for each dimension of the piece's box, the distance of neighbouring elements in bytes
    """

    owner: object
    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    device: str = "cpu"

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other without gaps, in row-major order."""
        expected = self.item_bytes
        for length, stride in zip(reversed(self.shape), reversed(self.strides_bytes), strict=True):
            if length > 1 and stride != expected:
                return 0 in self.shape
            expected *= length
        return True


def row_bytes(row: Memory) -> int:
    """Length of dense memory, in bytes."""
    return int(np.prod(row.shape, dtype=np.int64)) * row.item_bytes


class Block(msgspec.Struct, frozen=True):
    """The part of a replica (a piece that several ranks have) that one rank writes: a range along one dimension.

    position       position of the piece among the pieces that the rank writes
    dim            that dimension: the first with more than one element, so that a block of a dense piece is dense
    start, length  the range in that dimension, relative to the piece
    skipped_bytes  length of the rows before the block, if the piece is dense
    """

    position: int
    dim: int
    start: int
    length: int
    skipped_bytes: int

    def of(self, box: Box) -> Box:
        """The box of this block, if the piece has the box `box`."""
        offset, shape = list(box.offset), list(box.shape)
        offset[self.dim] += self.start
        shape[self.dim] = self.length
        return Box(tuple(offset), tuple(shape))

    def within(self, memory: Memory) -> Memory:
        """The memory of this block, if the piece has the memory `memory`."""
        shape = list(memory.shape)
        shape[self.dim] = self.length
        address = memory.address + self.start * memory.strides_bytes[self.dim]
        return msgspec.structs.replace(memory, address=address, shape=tuple(shape))


def _shapes(sides: Numbers, ndim: Numbers) -> tuple[tuple[int, ...], ...]:
    """The shapes that are concatenated in `sides`. `ndim`: the number of dimensions of each."""
    starts = np.cumsum(ndim) - ndim
    streams: dict[int, Iterator[tuple[int, ...]]] = {}
    for count in np.flatnonzero(np.bincount(ndim)).tolist():
        first_sides = starts[ndim == count]
        columns = [sides[first_sides + dim].tolist() for dim in range(count)]
        if count == 1:  # usually most tensors, and few lengths differ: equal shapes share one tuple
            lengths = {length: (length,) for length in set(columns[0])}
            streams[count] = map(lengths.__getitem__, columns[0])
        else:
            streams[count] = zip(*columns, strict=True) if count else repeat(())
    if len(streams) == 1:
        (stream,) = streams.values()
        return tuple(islice(stream, len(ndim)))
    return tuple([next(streams[count]) for count in ndim.tolist()])


def _none() -> Numbers:
    return np.zeros(0, np.int64)


class Alias(msgspec.Struct, frozen=True):
    """Another name of a tensor: tied weights are stored once, as `target`."""

    name: str
    target: str


# This class and Pieces have a `__dict__`, because arrays that are computed from others are cached properties.
class TensorColumns(msgspec.Struct, frozen=True, dict=True):
    """Tensors: sequences of equal length, with one entry for each tensor. Ranks that hold parts of the same tensors
    share one object.

    shapes   shapes of the global tensors
    buffers  positions of module buffers: if several ranks hold one, the lowest rank's is saved
    """

    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[int, ...], ...]
    buffers: frozenset[int] = frozenset()

    @cached_property
    def ndim(self) -> Numbers:
        return np.fromiter(map(len, self.shapes), np.int64, len(self.shapes))

    @cached_property
    def item_bytes(self) -> Numbers:
        return np.fromiter(map(attrgetter("item_bytes"), self.dtypes), np.int64, len(self.dtypes))

    @cached_property
    def sides(self) -> Numbers:
        """The shapes of all tensors, concatenated in one array."""
        return np.array([side for shape in self.shapes for side in shape], np.int64)

    @cached_property
    def lengths(self) -> Numbers:
        """The length of each full tensor in bytes."""
        return products(self.sides, np.cumsum(self.ndim) - self.ndim, self.ndim) * self.item_bytes

    @classmethod
    def with_sides(
        cls, names: tuple[str, ...], dtypes: tuple[DType, ...], ndim: Numbers, sides: Numbers
    ) -> TensorColumns:
        """Make tensors whose shapes are concatenated in `sides`. `ndim`: number of dimensions of each."""
        tensors = cls(names, dtypes, _shapes(sides, ndim))
        tensors.__dict__.update(ndim=ndim, sides=sides)  # known, so they need not be computed from the shapes
        return tensors

    def take(self, positions: Sequence[int]) -> TensorColumns:
        """The tensors at `positions`."""
        buffers = frozenset(new for new, old in enumerate(positions) if old in self.buffers) if self.buffers else ()
        return TensorColumns(
            tuple(map(self.names.__getitem__, positions)), tuple(map(self.dtypes.__getitem__, positions)),
            tuple(map(self.shapes.__getitem__, positions)), frozenset(buffers),
        )


@dataclass(frozen=True, eq=False)
class Pieces(Sequence[Piece]):
    """A sequence of pieces, stored as arrays. Piece and Box objects are created when they are accessed.

    parts  positions of the pieces that are only a part of their tensor, ascending; all other pieces are full tensors
    boxes  the boxes of these parts, concatenated: for each, ndim offsets, then ndim lengths, in elements
    kinds  for each of these parts the number of its box in `boxes`; None: each part has its own box
    rows   for each piece the position of its tensor; if these are the pieces of all ranks, a tensor may have several.
           None: each tensor has one piece, in order
    """

    tensors: TensorColumns
    parts: Numbers = field(default_factory=_none)
    boxes: Numbers = field(default_factory=_none)
    kinds: Numbers | None = None
    rows: Numbers | None = None

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Pieces:
        """`pieces` as Pieces; returned unchanged if they are Pieces already."""
        if isinstance(pieces, Pieces):
            return pieces
        columns = zip(*((piece.name, piece.dtype, piece.shape) for piece in pieces), strict=True)
        names, dtypes, shapes = columns if pieces else ((), (), ())
        parts = {position: piece.box for position, piece in enumerate(pieces) if piece.box != Box.whole(piece.shape)}
        return cls.cut(TensorColumns(names, dtypes, shapes), parts)

    @classmethod
    def cut(cls, tensors: TensorColumns, boxes: Mapping[int, Box]) -> Pieces:
        """One piece for each of these tensors. `boxes`: position -> box; all other pieces are full tensors."""
        parts = sorted(boxes)
        numbers = [n for position in parts for n in (*boxes[position].offset, *boxes[position].shape)]
        return cls(tensors, np.array(parts, np.int64), np.array(numbers, np.int64))

    @property
    def names(self) -> tuple[str, ...]:
        return self._of_each(self.tensors.names)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        return self._of_each(self.tensors.dtypes)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """For each piece, the shape of its global tensor."""
        return self._of_each(self.tensors.shapes)

    @property
    def tensor(self) -> Numbers:
        """For each piece the position of its tensor."""
        return np.arange(len(self.tensors.names)) if self.rows is None else self.rows

    def _of_each(self, column: tuple[_Value, ...]) -> tuple[_Value, ...]:
        return column if self.rows is None else tuple(map(column.__getitem__, self.rows.tolist()))

    def _part_rows(self, parts: Numbers) -> Numbers:
        """For each of these pieces that are a part of a tensor, the position of that tensor."""
        if self.rows is None:
            return parts
        return self.rows if len(parts) == len(self.rows) else self.rows[parts]

    @cached_property
    def starts(self) -> Numbers:
        """The index in `boxes` at which each box begins; one more entry is the index at which the last one ends."""
        if not len(self.parts):
            return np.zeros(1, np.int64)
        if self.kinds is None:
            ndim = self.tensors.ndim[self._part_rows(self.parts)]
        else:
            parts = np.zeros(int(self.kinds.max()) + 1, np.int64)
            parts[self.kinds] = self.parts  # for each distinct box, one piece that has it
            ndim = self.tensors.ndim[self.rows[parts] if self.rows is not None else parts]
        return run_starts(2 * ndim)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pieces):
            return NotImplemented
        same = self.tensors == other.tensors and np.array_equal(self.parts, other.parts)
        if self.rows is not None or other.rows is not None:
            same = same and np.array_equal(self.tensor, other.tensor)
        return same and (not len(self.parts) or np.array_equal(self.part_numbers()[0], other.part_numbers()[0]))

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, position: int) -> Piece: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[Piece]: ...
    def __getitem__(self, position: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(position, slice):
            return tuple(self[i] for i in range(len(self))[position])
        index = range(len(self))[position]
        row = index if self.rows is None else int(self.rows[index])
        shape = tuple(self.tensors.shapes[row])
        return Piece(self.tensors.names[row], self.tensors.dtypes[row], shape, self.part(index) or Box.whole(shape))

    def __iter__(self) -> Iterator[Piece]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        return len(self.tensors.names if self.rows is None else self.rows)

    def box(self, position: int) -> Box:
        """The box of the piece at `position`."""
        row = position if self.rows is None else int(self.rows[position])
        return self.part(position) or Box.whole(self.tensors.shapes[row])

    def part(self, position: int) -> Box | None:
        """The box of the piece at `position`; None if it is a full tensor."""
        row = position
        if len(self.parts) < len(self):
            row = int(self.parts.searchsorted(position)) if len(self.parts) else 0
            if row == len(self.parts) or self.parts[row] != position:
                return None
        kind = row if self.kinds is None else int(self.kinds[row])
        numbers = self.boxes[self.starts[kind] : self.starts[kind + 1]].tolist()
        return Box(tuple(numbers[: len(numbers) // 2]), tuple(numbers[len(numbers) // 2 :]))

    def part_boxes(self) -> Iterator[tuple[int, Box]]:
        """Yield position and box of each piece that is only a part of its tensor."""
        numbers, starts = self.part_numbers()
        flat, by_numbers = numbers.tolist(), dict[tuple[int, ...], Box]()  # most parts of one shape have equal boxes
        for position, (begin, end) in zip(self.parts.tolist(), pairwise(starts.tolist()), strict=True):
            key = tuple(flat[begin:end])
            if key not in by_numbers:
                half = len(key) // 2
                by_numbers[key] = Box(key[:half], key[half:])
            yield position, by_numbers[key]

    def part_numbers(self) -> tuple[Numbers, Numbers]:
        """The boxes of all parts, concatenated, and where each begins."""
        if self.kinds is None:
            return self.boxes, self.starts
        counts = 2 * self.tensors.ndim[self._part_rows(self.parts)]
        starts = run_starts(counts)
        return self.boxes[spread(self.starts[:-1][self.kinds], counts)], starts

    def part_elements(self) -> Numbers:
        """The number of elements of each part."""
        ndim = np.diff(self.starts) // 2
        elements = products(self.boxes, self.starts[:-1] + ndim, ndim)
        return elements if self.kinds is None else elements[self.kinds]

    def lengths(self) -> NDArray[np.uint64]:
        """The length of each piece in bytes."""
        lengths = self.part_elements() * self.tensors.item_bytes[self._part_rows(self.parts)]
        if len(self.parts) < len(self):
            # A tensor of which all pieces are parts may have more elements than fit in an int64. Its computed length is
            # then wrong, and is replaced here by that of the parts.
            whole = self.tensors.lengths[self.tensor]
            whole[self.parts] = lengths
            lengths = whole
        return lengths.view(np.uint64)

    def numbers(self) -> Numbers:
        """The boxes of all pieces, including full tensors, concatenated."""
        if self.kinds is None and len(self.parts) == len(self):
            return self.boxes
        tensors = len(self.tensors.names)
        ndim = np.concatenate([self.tensors.ndim, np.diff(self.starts) // 2])
        width = int(ndim.max(initial=0))
        mask = padding_mask(ndim, width)
        boxes = np.zeros(mask.shape, np.int64)  # first a box for each full tensor, then the boxes of parts
        boxes[:tensors, width:][mask[:tensors, width:]] = self.tensors.sides
        boxes[tensors:][mask[tensors:]] = self.boxes
        box = self.tensor.astype(np.int32)
        box[self.parts] = tensors + (np.arange(len(self.parts)) if self.kinds is None else self.kinds)
        flat = np.empty(int(2 * np.bincount(box, minlength=len(ndim)) @ ndim), np.int64)
        end = 0
        for begin in range(0, len(box), _BATCH_PIECES):
            some = box[begin : begin + _BATCH_PIECES]
            numbers = boxes.take(some, axis=0)[mask.take(some, axis=0)]
            flat[end : end + len(numbers)] = numbers
            end += len(numbers)
        return flat

    def take(self, positions: Sequence[int], blocks: Sequence[Block] = ()) -> Pieces:
        """The pieces at `positions`, which are ascending. Each of `blocks` replaces one of them by a part of it. For a
        piece with several blocks, `positions` contains its position once for each block.
        """
        if len(positions) == len(self) and not blocks:
            return self
        old = np.asarray(positions, np.int64)
        tensors = self.tensors.take(positions if self.rows is None else self.rows[old].tolist())
        row = np.searchsorted(self.parts, old)
        parts = np.flatnonzero(np.append(self.parts, -1)[row] == old)
        row = row[parts]
        if not blocks:
            numbers, starts = self.part_numbers()
            return Pieces(tensors, parts, numbers[spread(starts[row], np.diff(starts)[row])])
        boxes = {int(new): self[int(old[new])].box for new in {*parts.tolist(), *(block.position for block in blocks)}}
        return Pieces.cut(tensors, boxes | {block.position: block.of(boxes[block.position]) for block in blocks})

    def compact(self) -> Pieces:
        """The same pieces with each distinct box stored once."""
        assert self.kinds is None, "already compact"
        if not len(self.parts):
            return replace(self, kinds=self.parts)
        shapes = {shape: i for i, shape in enumerate(dict.fromkeys(self.tensors.shapes))}
        of_each = self.shapes
        shape = np.array([shapes[of_each[i]] for i in self.parts.tolist()], np.int64)
        ndim = self.tensors.ndim[self._part_rows(self.parts)]
        mask = padding_mask(ndim, int(ndim.max(initial=0)))
        rows = np.zeros(mask.shape, np.int64)
        rows[mask] = self.boxes
        keys = np.column_stack([shape, rows])
        _, first, kinds = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(first)
        moved = np.empty(len(order), np.int64)
        moved[order] = np.arange(len(order))
        first = first[order]
        return replace(self, boxes=rows[first][mask[first]], kinds=moved[kinds.reshape(-1)])


class Places(msgspec.Struct, frozen=True, eq=False):
    """The memory of pieces: arrays with one entry for each piece.

    address  address of the piece's element (0, ..., 0), in this process or on its device
    strided  position -> Memory, for pieces that are not contiguous
    owners   objects that keep the memory alive
    device   index of each piece's device in `devices`; -1: host memory. Empty if `devices` is empty
    devices  names of the devices that have pieces
    """

    address: NDArray[np.uint64]
    strided: Mapping[int, Memory]
    owners: Sequence[object]
    device: NDArray[np.int32] = msgspec.field(default_factory=lambda: np.zeros(0, np.int32))
    devices: tuple[str, ...] = ()

    @classmethod
    def of(cls, memory: Sequence[Memory]) -> Places:
        apart = {position: m for position, m in enumerate(memory) if not m.contiguous}
        address, owners = np.array([m.address for m in memory], np.uint64), [m.owner for m in memory]
        devices = tuple(dict.fromkeys(m.device for m in memory if m.device != "cpu"))
        if not devices:
            return cls(address, apart, owners)
        device = np.array([devices.index(m.device) if m.device != "cpu" else -1 for m in memory], np.int32)
        return cls(address, apart, owners, device, devices)

    @property
    def host_runs(self) -> NDArray[np.bool_]:
        """For each piece, whether it is contiguous in host memory, in row-major order."""
        is_run = self.device < 0 if self.devices else np.ones(len(self.address), np.bool_)
        is_run[list(self.strided)] = False
        return is_run

    def device_of(self, position: int) -> str:
        """The name of a piece's device; "cpu" for host memory."""
        return self.devices[self.device[position]] if self.devices and self.device[position] >= 0 else "cpu"

    def memory(self, position: int, piece: Piece) -> Memory:
        """The Memory of the piece at `position`, which is described by `piece`."""
        return self.strided.get(position) or self.run(position, piece.box.shape, piece.dtype.item_bytes)

    def run(self, position: int, shape: tuple[int, ...], item_bytes: int) -> Memory:
        """The Memory of the piece at `position`, which must be contiguous."""
        strides = tuple(math.prod(shape[dim + 1 :]) * item_bytes for dim in range(len(shape)))
        address = int(self.address[position])
        return Memory(self.owners[position], address, shape, strides, item_bytes, self.device_of(position))

    def with_copies(self, copies: Mapping[int, tuple[int, object]]) -> Places:
        """These places, with some pieces replaced by copies in host memory: position -> address and owner."""
        address, owners, device = self.address.copy(), list(self.owners), self.device.copy()
        for position, copy in copies.items():
            address[position], owners[position] = copy
        if self.devices:
            device[list(copies)] = -1
        apart = {position: memory for position, memory in self.strided.items() if position not in copies}
        return _with_used_devices(address, apart, owners, device, self.devices)

    def take(self, positions: Sequence[int], blocks: Sequence[Block] = ()) -> Places:
        """The memory of the pieces at `positions`. If `blocks` has a part of one of these pieces (see Pieces.take),
        only the memory of that part.
        """
        if len(positions) == len(self.address) and not blocks:
            return self
        apart = {
            new: self.strided[old] for new, old in enumerate(positions) if old in self.strided
        } if self.strided else {}
        address = self.address[np.asarray(positions, np.int64)]
        for block in blocks:
            if block.position in apart:
                apart[block.position] = memory = block.within(apart[block.position])
                address[block.position] = memory.address
            else:
                address[block.position] += block.skipped_bytes
        device = self.device[np.asarray(positions, np.int64)] if self.devices else self.device
        return _with_used_devices(address, apart, [self.owners[old] for old in positions], device, self.devices)


def _with_used_devices(
    address: NDArray[np.uint64], apart: Mapping[int, Memory], owners: Sequence[object], device: NDArray[np.int32],
    devices: tuple[str, ...],
) -> Places:
    used = np.flatnonzero(np.bincount(device[device >= 0], minlength=len(devices))).tolist()
    if not used:
        return Places(address, apart, owners)
    if len(used) < len(devices):
        renumbered = [used.index(number) if number in used else -1 for number in range(len(devices))]
        device = np.array([*renumbered, -1], np.int32)[device]
    return Places(address, apart, owners, device, tuple(devices[number] for number in used))


class Layout(msgspec.Struct, frozen=True):
    """The pieces of a rank, without addresses. Plans are made from a layout, and reused until it changes.

    pieces   in the order of the state; unique by (name, box)
    aliases  additional names of memory that `pieces` already contain: tied weights
    lazy     for each piece: whether only an optimizer's step changes it (parameters, optimizer state), so that it may
             be captured after `save` has returned
    """

    pieces: Pieces
    aliases: tuple[Alias, ...]
    lazy: tuple[bool, ...]
