"""Flattened tensors: which part of each tensor is in a 1-D tensor that holds many of them, laid end to end.

A rank's part of such a tensor begins and ends anywhere. So of each tensor it holds a range of elements, in the order
of memory: a few boxes, each dense. They are saved as boxes, without gathering the rest.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch

from flowstone.errors import UnsupportedStateError
from flowstone.state.names import strip_wrappers, valid_name
from flowstone.state.records import Shard
from flowstone.state.shards import flat_boxes


class Range(msgspec.Struct, frozen=True):
    """`length` elements, from `begin` on, of a tensor of `shape`, consecutive in memory.

    order  the tensor's dimensions, outermost first; 0, 1, ... if it was row-major
    """

    shape: tuple[int, ...]
    begin: int
    length: int
    order: tuple[int, ...]

    @property
    def absent(self) -> bool:
        """Whether other ranks hold all of it. A tensor without elements is on every rank."""
        return self.length == 0 and math.prod(self.shape) > 0

    def cut(self, local: torch.Tensor) -> list[Shard]:
        """The boxes of the range, as views of `local`, which holds its elements; of any shape if that is the whole
        tensor.
        """
        assert local.numel() == self.length, "a range is as long as what holds it"
        local = local.detach()
        if not math.prod(self.shape):
            local = local.reshape(self.shape)
        if tuple(local.shape) == self.shape:
            return [Shard(local, self.shape, (0,) * len(self.shape))]
        laid = [self.shape[dim] for dim in self.order]
        back = sorted(range(len(laid)), key=self.order.__getitem__)
        return [
            Shard(
                local[at : at + box.elements].view(box.shape).permute(back), self.shape,
                [box.offset[dim] for dim in back],
            )
            for box, at in flat_boxes(laid, self.begin, self.begin + self.length)
        ]


class Span(msgspec.Struct, frozen=True):
    """The part of the tensor called `name` that is in a flat one: its `range`, from the flat one's element `at` on."""

    name: str
    at: int
    range: Range

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its elements in a tensor with the flat one's layout."""
        return flat.detach()[self.at : self.at + self.range.length]


class FlatHome(NamedTuple):
    """A flat parameter: this rank's elements of it, and the tensors in it, under full paths."""

    local: torch.Tensor
    spans: tuple[Span, ...]


class Flat:
    """`tensor` is a part of tensors that were laid end to end, each row-major; other ranks hold the other parts.

    tensor   1-D. Elements after the last member are padding: neither saved nor loaded
    members  name and shape of every tensor, in order, the same on all ranks; a name of None: padding between them
    begin    position of `tensor`'s first element in the whole flat tensor

    A state with a Flat has its members, each under its own name below the Flat's place. For an optimizer that has
    `tensor` as a parameter (sharded by elements: ZeRO, arXiv 1910.02054), slots belong to the members.

    raises  UnsupportedStateError for a tensor that is not 1-D, and for invalid names
    """

    __slots__ = ("begin", "members", "spans", "tensor")

    def __init__(
        self, tensor: torch.Tensor, members: Iterable[tuple[str | None, Sequence[int]]], begin: int = 0
    ) -> None:
        self.tensor = tensor
        try:
            self.begin = operator.index(begin)
            self.members = tuple((_member_name(name), tuple(map(operator.index, shape))) for name, shape in members)
        except (TypeError, ValueError):
            raise UnsupportedStateError(
                "the members of a flat tensor must be pairs of name and shape, in order",
                found=f"members {members!r:.60}, begin {begin!r:.20}",
                next="write fs.Flat(buffer, [('weight', (1024, 1024)), ('bias', (1024,))], begin=0)",
            ) from None
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1 or self.begin < 0:
            found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__qualname__
            raise UnsupportedStateError(
                "a flat tensor must be one run of elements", expected="a 1-D tensor that begins at element 0 or later",
                found=f"{found} at {self.begin}", next="pass the 1-D buffer itself, and where this rank's part begins",
            )
        names = [name for name, _ in self.members if name is not None]
        if len(set(names)) != len(names) or any(n < 0 for _, shape in self.members for n in shape):
            raise UnsupportedStateError(
                "the members of a flat tensor must have different names",
                found=", ".join(f"{name} {shape}" for name, shape in self.members)[:200],
                next="give each its own name and its whole shape",
            )
        self.spans = tuple(self._spans())

    def _spans(self) -> Iterable[Span]:
        end, first = self.begin + self.tensor.numel(), 0
        for name, shape in self.members:
            last = first + math.prod(shape)
            begin, stop = max(first, self.begin), min(last, end)
            held = max(stop - begin, 0)
            if name is not None:
                at, inside = (begin - self.begin, begin - first) if held else (0, 0)
                yield Span(name, at, Range(shape, inside, held, tuple(range(len(shape)))))
            first = last

    def __repr__(self) -> str:
        return f"Flat(<{self.tensor.numel()}>, {len(self.members)} members, begin={self.begin})"


def _member_name(name: object) -> str | None:
    if name is None:
        return None
    if type(name) is not str or not valid_name(name) or not all(name.split(".")):
        raise UnsupportedStateError(
            f"{name!r} cannot name a member of a flat tensor",
            expected="dotted components, none of them empty, or None for padding", next="rename it",
        )
    return strip_wrappers(name)
