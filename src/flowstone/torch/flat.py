"""Flattened tensors: a flat tensor is a 1-D tensor that contains many tensors, one after the other.

A rank's part of a flat tensor may begin and end at any element. So of each tensor in it, the rank has a range of
elements, in the order of memory. Such a range consists of a few dense boxes (regions of the tensor), which are saved
without gathering the other ranks' parts.
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
from flowstone.torch.shards import flat_boxes


class FlatSlice(msgspec.Struct, frozen=True):
    """A range of a tensor's elements that follow each other in memory: `length` elements from number `begin` on, of a
    tensor of `shape`.

    order  the order of the tensor's dimensions in memory, the outermost first; 0, 1, ... if it was row-major
    """

    shape: tuple[int, ...]
    begin: int
    length: int
    order: tuple[int, ...]

    @property
    def is_absent(self) -> bool:
        """Whether this rank has no element of the tensor: other ranks have all. False for a tensor without elements.
        """
        return self.length == 0 and math.prod(self.shape) > 0

    def cut_boxes(self, local: torch.Tensor) -> list[Shard]:
        """The range as boxes; each is a view of `local`, a tensor with the elements of the range. `local` may
        have any shape if the range is the full tensor.
        """
        assert local.numel() == self.length, "the local tensor is as long as the range"
        local = local.detach()
        if not math.prod(self.shape):
            local = local.reshape(self.shape)
        if tuple(local.shape) == self.shape:
            return [Shard(local, self.shape, (0,) * len(self.shape))]
        laid = [self.shape[dim] for dim in self.order]
        back = sorted(range(len(laid)), key=self.order.__getitem__)
        return [
            Shard(
                local[start : start + box.elements].view(box.shape).permute(back), self.shape,
                [box.offset[dim] for dim in back],
            )
            for box, start in flat_boxes(laid, self.begin, self.begin + self.length)
        ]


class FlatMember(msgspec.Struct, frozen=True):
    """A member of a flat tensor: `range` says which elements of the tensor called `name` this rank has; they begin at
    element `begin` of the flat tensor.
    """

    name: str
    begin: int
    range: FlatSlice

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements of this member in `flat`, a tensor with the layout of the flat tensor."""
        return flat.detach()[self.begin : self.begin + self.range.length]


class FlatParameter(NamedTuple):
    """A flat parameter: this rank's elements of it, and the tensors in it, with their full paths."""

    local: torch.Tensor
    spans: tuple[FlatMember, ...]


class Flat:
    """Says that `tensor` is this rank's part of a flat tensor, which contains several tensors one after the other, each
    row-major.

    tensor   a 1-D tensor. Elements after the last member are padding, and neither saved nor loaded
    members  name and shape of every tensor in the flat tensor, in order, the same on all ranks; name None: padding
    begin    position of `tensor`'s first element in the full flat tensor

    Each member is saved under its own name, after the name of the Flat in the state. If `tensor` is a parameter of an
    optimizer (sharded by elements, as in ZeRO, arXiv 1910.02054), the optimizer's state is saved for each member.

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
            actual = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__qualname__
            raise UnsupportedStateError(
                "fs.Flat needs a 1-D tensor", expected="a 1-D tensor, and begin of at least 0",
                found=f"{actual}, begin={self.begin}",
                next="pass the 1-D buffer itself, and where this rank's part begins",
            )
        names = [name for name, _ in self.members if name is not None]
        if len(set(names)) != len(names) or any(n < 0 for _, shape in self.members for n in shape):
            raise UnsupportedStateError(
                "the members of a flat tensor must have different names, and shapes without negative numbers",
                found=", ".join(f"{name} {shape}" for name, shape in self.members)[:200],
                next="give each member its own name and its full shape",
            )
        self.spans = tuple(self._spans())

    def _spans(self) -> Iterable[FlatMember]:
        end, first = self.begin + self.tensor.numel(), 0
        for name, shape in self.members:
            last = first + math.prod(shape)
            begin, stop = max(first, self.begin), min(last, end)
            held = max(stop - begin, 0)
            if name is not None:
                start, inside = (begin - self.begin, begin - first) if held else (0, 0)
                yield FlatMember(name, start, FlatSlice(shape, inside, held, tuple(range(len(shape)))))
            first = last

    def __repr__(self) -> str:
        return f"Flat(<{self.tensor.numel()}>, {len(self.members)} members, begin={self.begin})"


def _member_name(name: object) -> str | None:
    if name is None:
        return None
    if type(name) is not str or not valid_name(name) or not all(name.split(".")):
        raise UnsupportedStateError(
            f"{name!r} cannot name a member of a flat tensor",
            expected="a name such as 'layers.0.weight', without empty parts between dots, or None for padding",
            next="rename the member",
        )
    return strip_wrappers(name)
