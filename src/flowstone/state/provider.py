"""The public protocol: how an object describes its state, gives access to it, and takes it back.

Separating a state's description from its movement, and serializing small objects while bulk bytes already move, are
ideas of DataStates-LLM (state providers, arXiv 2601.16956).
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

    name       below the object's own name: dotted components, none of them empty. The checkpoint, and any safetensors
               reader, has it as `<place of the object>.<name>`
    dtype      by torch's name: "float32", "bfloat16", ... (the table in docs/FORMAT.md)
    shape      of the whole tensor, in elements
    box        the part of it that this object holds, in elements; None: all. Several parts may have the same name and
               boxes that do not overlap: memory in blocks needs no copy
    lazy       changes only in the step of an optimizer of the state, or after `fence()`: may be captured after
               `save` has returned. All other parts are captured before
    resizable  the length of each dimension, but not their number, may differ from save to save and at load, where
               `restore` gets a new tensor of the stored shape. All others are written in place
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
        """The part that is the whole of `value`, a tensor or an array."""
        dtype = str(value.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(value.shape), lazy=lazy, resizable=resizable)


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """A plain value of an object's state: numbers, text, nested containers of them; no tensors.

    name      as of a Part
    constant  never changes: the stored value must equal the one that the object has at load, or the load is refused.
              All others are passed to `restore`
    """

    name: str
    constant: bool = False


AnyPart: TypeAlias = Part | ObjectPart


class Provider(ABC, Generic[T]):
    """Describes the state of objects of one type, and restores it. Holds no state of any object.

    kind  the name of these objects in checkpoints; None: the qualified name of the registered type. Give one if that
          type may be renamed or moved: a load must find the stored kind again

    A save calls `describe`, then takes the memory of all Parts from `chunks` and starts to move those bytes; only then
    it takes the ObjectParts' values, before it returns. A load calls `describe` and `chunks` of the existing object,
    compares everything with the checkpoint, and lists every difference; then bytes are written into the chunks' memory,
    and when all are in place and verified, `restore` is called once.

    All calls come from the thread that saves or loads. A violation of this contract raises ProviderError, which names
    provider and path; the save is then not begun, or discarded.
    """

    kind: str | None = None

    @abstractmethod
    def describe(self, value: T) -> Sequence[AnyPart]:
        """The parts of `value`: Parts, then ObjectParts. Must be cheap: copies and serializes nothing.

        Stable while `value` lives: a part that was described once stays, with its dtype, its flags, its number of
        dimensions and, unless it is resizable, its shape. New parts may be added.
        """

    @abstractmethod
    def chunks(self, value: T) -> Iterable[object]:
        """One item for each part, in the order of `describe`; preferably a generator.

        For a Part its memory, not a copy: a dense tensor or an array of the part's dtype and its box's shape, or any
        object with the buffer protocol of equal size, row-major. It must not change until captured (see Part.lazy); a
        load writes into it. For an ObjectPart its value, created only when the generator gets there.
        """

    @abstractmethod
    def restore(self, value: T, found: Mapping[str, object]) -> None:
        """Put stored values into `value`. Every byte is in place; runs in the state's order, after optimizers.

        found  by name: for each resizable Part a new tensor (an array if `chunks` gave an array or a buffer when it was
               saved), for each ObjectPart that is not constant the stored value. All other parts are already restored
        """

    def create(self, found: Mapping[str, object]) -> T:
        """A new object, for a place without one to restore: inside of another object's state_dict().

        found  by name, everything that is stored. Optional: without this method, such a load is refused
        """
        raise NotImplementedError

    @property
    def creates(self) -> bool:
        """Whether `create` is overridden."""
        return type(self).create is not Provider.create
