"""Pieces: what of a state one rank holds, as columns that every other layer reads.

A *tensor* is a global name with a dtype and a shape. A *box* is a region of it, in elements.
A *piece* is the box of a tensor that one rank holds. Nothing here knows torch, files or ranks.

A state has tens of thousands of pieces, so they travel as columns: `Pieces` says what they are,
`Places` where they lie. A `Layout` is all of a state that stays the same from save to save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from flowstone.table.box import Box
from flowstone.table.dtype import DType


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor, as one rank holds it. Describes; holds no memory."""

    name: str
    dtype: DType
    shape: tuple[int, ...]  # of the global tensor
    box: Box

    @property
    def bytes(self) -> int:
        return self.box.elements * self.dtype.item_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a piece's elements lie. `owner` keeps the memory alive; nobody reads it otherwise.

    address        of element (0, ..., 0), in this process; a device address when `device` is not "cpu"
    strides_bytes  per dimension of the piece's box; row-major and dense means contiguous
    """

    owner: object
    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    device: str = "cpu"

    @property
    def contiguous(self) -> bool:
        """Whether the elements fill one run of bytes in row-major order."""
        expected = self.item_bytes
        for length, stride in zip(reversed(self.shape), reversed(self.strides_bytes), strict=True):
            if length > 1 and stride != expected:
                return 0 in self.shape
            expected *= length
        return True


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a piece: what one of the ranks that hold the piece writes of it.

    at             position among what that rank writes
    dim            which dimension is cut: the first with more than one entry, so that a block of a dense piece is dense
    start, length  in that dimension, from the piece's begin
    skipped_bytes  what lies before it, where the piece is dense
    """

    at: int
    dim: int
    start: int
    length: int
    skipped_bytes: int

    def of(self, box: Box) -> Box:
        """The block of the piece with this box."""
        offset, shape = list(box.offset), list(box.shape)
        offset[self.dim] += self.start
        shape[self.dim] = self.length
        return Box(tuple(offset), tuple(shape))

    def within(self, memory: Memory) -> Memory:
        """Where the block lies, if that is where the piece lies."""
        shape = list(memory.shape)
        shape[self.dim] = self.length
        return replace(memory, address=memory.address + self.start * memory.strides_bytes[self.dim], shape=tuple(shape))


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of the same tensor: tied weights are stored once, under `target`."""

    name: str
    target: str


@dataclass(frozen=True, slots=True)
class Pieces(Sequence[Piece]):
    """Pieces as columns of equal length; a Piece record is made where one is looked at.

    shapes  of the global tensors
    parts   position -> box, of those pieces that are not their whole tensor
    """

    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: Mapping[int, Box] = field(default_factory=dict)

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Pieces:
        """The columns of `pieces`, which may be such columns already."""
        if isinstance(pieces, Pieces):
            return pieces
        parts = {at: piece.box for at, piece in enumerate(pieces) if piece.box != Box.whole(piece.shape)}
        columns = zip(*((piece.name, piece.dtype, piece.shape) for piece in pieces), strict=True)
        names, dtypes, shapes = columns if pieces else ((), (), ())
        return cls(names, dtypes, shapes, parts)

    @overload
    def __getitem__(self, position: int) -> Piece: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[Piece]: ...
    def __getitem__(self, position: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(position, slice):
            return tuple(self[at] for at in range(len(self))[position])
        at = range(len(self))[position]
        shape = tuple(self.shapes[at])
        return Piece(self.names[at], self.dtypes[at], shape, self.parts.get(at) or Box.whole(shape))

    def __iter__(self) -> Iterator[Piece]:
        return (self[at] for at in range(len(self)))

    def __len__(self) -> int:
        return len(self.names)

    def take(self, positions: Sequence[int], blocks: Sequence[Block] = ()) -> Pieces:
        """The pieces at `positions`, which do not descend; of some of them only blocks."""
        if len(positions) == len(self) and not blocks:
            return self
        parts = {new: self.parts[old] for new, old in enumerate(positions) if old in self.parts} if self.parts else {}
        for block in blocks:
            parts[block.at] = block.of(self[positions[block.at]].box)
        return Pieces(
            tuple(map(self.names.__getitem__, positions)), tuple(map(self.dtypes.__getitem__, positions)),
            tuple(map(self.shapes.__getitem__, positions)), parts,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where pieces lie, as columns.

    address  of each piece's element (0, ..., 0), in this process
    apart    position -> Memory, of those that are not one run of host bytes in row-major order
    owners   keep the memory alive
    """

    address: NDArray[np.uint64]
    apart: Mapping[int, Memory]
    owners: Sequence[object]

    @classmethod
    def of(cls, memory: Sequence[Memory]) -> Places:
        apart = {at: m for at, m in enumerate(memory) if m.device != "cpu" or not m.contiguous}
        return cls(np.array([m.address for m in memory], np.uint64), apart, [m.owner for m in memory])

    def memory(self, position: int, piece: Piece) -> Memory:
        """The record of the place of `piece`, which is the one at `position`."""
        shape, item = piece.box.shape, piece.dtype.item_bytes
        strides = tuple(math.prod(shape[dim + 1 :]) * item for dim in range(len(shape)))
        dense = Memory(self.owners[position], int(self.address[position]), shape, strides, item)
        return self.apart.get(position, dense)

    def take(self, positions: Sequence[int], blocks: Sequence[Block] = ()) -> Places:
        """The places at `positions`, which do not descend; of some of them only blocks."""
        if len(positions) == len(self.address) and not blocks:
            return self
        apart = {new: self.apart[old] for new, old in enumerate(positions) if old in self.apart} if self.apart else {}
        address = self.address[np.asarray(positions, np.int64)]
        for block in blocks:
            if block.at in apart:
                apart[block.at] = memory = block.within(apart[block.at])
                address[block.at] = memory.address
            else:
                address[block.at] += block.skipped_bytes
        return Places(address, apart, [self.owners[at] for at in positions])


@dataclass(frozen=True, slots=True)
class Layout:
    """What a rank holds, and not where: plans are made from it, and kept as long as it stays the same.

    pieces   in the order of the state; unique by (name, box)
    aliases  further names of memory that is among the pieces: tied weights
    lazy     per piece: whether only an optimizer's step changes it (parameters, optimizer state),
             so that it may be captured after `save` returned
    buffers  positions of pieces that are buffers of modules: where several ranks hold one, the lowest has the word
    """

    pieces: Pieces
    aliases: tuple[Alias, ...]
    lazy: tuple[bool, ...]
    buffers: frozenset[int] = frozenset()
