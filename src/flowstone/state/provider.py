"""The public protocol: how an object says what it holds, hands it over, and takes it back.

The idea that a state's description is apart from its movement, and that small objects are serialized
while bulk bytes already move, is DataStates-LLM's (state providers, arXiv 2601.16956).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import torch

from flowstone.table.box import Box

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of an object's state, or a box of one.

    name       below the object's own: dotted components, none of them empty. A checkpoint has it as
               `<where the object lies>.<name>`, for any safetensors reader
    dtype      by torch's name: "float32", "bfloat16", ... (the table in docs/FORMAT.md)
    shape      of the whole tensor, in elements
    box        what of it this object holds, in elements; None: all. Several parts may have one name and
               boxes that do not overlap: memory in blocks needs no copy
    lazy       changes only in the step of an optimizer that is in the state, or after `fence()`: may be
               captured after `save` has returned. Everything else is captured before
    resizable  its lengths, not how many there are, may differ from save to save and at load, where
               `restore` is given a new tensor of the stored shape. All others are written in place
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box | None = None
    lazy: bool = False
    resizable: bool = False

    @classmethod
    def of(
        cls, name: str, value: torch.Tensor | np.ndarray, *, lazy: bool = False, resizable: bool = False
    ) -> Part:
        """The part that is all of `value`, a tensor or an array."""
        dtype = str(value.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(value.shape), lazy=lazy, resizable=resizable)


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """A plain value of an object's state: numbers, text, nested containers of them; no tensors.

    name      as of a Part
    constant  never changes: what is stored has to equal what the object at load says, or the load is refused.
              All others are handed to `restore`
    """

    name: str
    constant: bool = False


AnyPart: TypeAlias = Part | ObjectPart


class Provider(ABC, Generic[T]):
    """Describes the state of objects of one type, and restores it. Holds no state of any object.

    kind  what checkpoints call these objects; None: the qualified name of the type that it is registered
          for. Give one if that type may be renamed or moved: a stored kind has to be met at load

    A save calls `describe`, then takes from `chunks` the memory of all Parts, starts to move those bytes,
    and only then takes the ObjectParts' values, before it returns. A load calls `describe` and `chunks` of
    the object that is there, compares everything with what is stored, and lists every difference; then bytes
    go into the chunks' memory, and when all are in place and verified, `restore` is called, once.

    All calls come from the thread that saves or loads. Whatever breaks this contract is a ProviderError that
    names provider and path; a save is then not begun, or called off.
    """

    kind: str | None = None

    @abstractmethod
    def describe(self, value: T) -> Sequence[AnyPart]:
        """What `value` holds: Parts, then ObjectParts. Cheap: copies and serializes nothing.

        The same for as long as `value` lives: a part that was described once stays, with its dtype, its flags,
        its number of dimensions and, unless it is resizable, its shape. New ones may come.
        """

    @abstractmethod
    def chunks(self, value: T) -> Iterable[object]:
        """One for each part, in the order in which `describe` has them; best a generator.

        For a Part its memory, not a copy: a dense tensor or an array of the part's dtype and its box's shape, or
        anything with the buffer protocol of just as many bytes, row-major. It stays as it is until captured (see
        Part.lazy); at load it is written to. For an ObjectPart its value, made only when it is asked for.
        """

    @abstractmethod
    def restore(self, value: T, found: Mapping[str, object]) -> None:
        """Put what is stored into `value`. Every byte is in place; this runs in the state's order, after optimizers.

        found  by name: of each resizable Part a new tensor (an array where `chunks` gave an array or a buffer when
               it was saved), of each ObjectPart that is not constant the stored value. Nothing else is left to do
        """

    def create(self, found: Mapping[str, object]) -> T:
        """A new object, where none is there to be restored: inside what another object's state_dict() holds.

        found  by name, everything that is stored. A provider need not have this: such a load is then refused
        """
        raise NotImplementedError

    @property
    def creates(self) -> bool:
        """Whether `create` is there."""
        return type(self).create is not Provider.create
