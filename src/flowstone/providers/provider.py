"""The public protocol Provider: how an object describes its state, gives access to its memory, and is restored.

Two ideas are from DataStates-LLM (state providers, arXiv 2601.16956): a state's description is separate from the
movement of its bytes, and small objects are serialized while the bytes of large ones already move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from flowstone.table.box import Box

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of an object's state, or a region of a tensor.

    name       the tensor's name in the object: components with dots between, none of them empty. In the checkpoint, and
               for any safetensors reader, the tensor is called `<path of the object in the state>.<name>`
    dtype      torch's name of its dtype: "float32", "bfloat16", ... (the table in docs/FORMAT.md)
    shape      shape of the full tensor, in elements
    box        the region of the tensor that this object has, in elements; None: all. Several parts may have the same
               name and disjoint boxes, so that a tensor whose memory consists of blocks need not be copied
    lazy       whether the part changes only in the step of an optimizer of the state, or after `fence()`. Such parts
               may be captured after `save` has returned; all others are captured before
    resizable  whether the lengths of the dimensions may differ between saves, and between save and load. `restore` then
               gets a new tensor of the stored shape. All other parts are loaded in place
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
        """A Part for the full tensor or array `value`, with its dtype and shape."""
        dtype = str(value.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(value.shape), lazy=lazy, resizable=resizable)


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """A plain value of an object's state: a number, text, or nested containers of such values. No tensors.

    name      the value's name in the object, see Part
    constant  whether it never changes: a load is refused if the stored value differs from the object's. Values that are
              not constant are passed to `restore`
    """

    name: str
    constant: bool = False


AnyPart: TypeAlias = Part | ObjectPart


class Provider(ABC, Generic[T]):
    """Describes the state of objects of one type, and restores it. Holds no state of any object.

    kind  the name of these objects in checkpoints; None: the qualified name of the registered type. Give one if that
          type may be renamed or moved: a load must find the stored kind again

    A save calls `describe`, takes the memory of all Parts from `chunks`, and starts to capture it. Then, before it
    returns, the save takes the values of the ObjectParts. A load calls `describe` and `chunks` of the existing object,
    compares everything with the checkpoint, and lists every difference. Then it reads bytes into the memory that
    `chunks` returned. When all bytes are read and verified, it calls `restore` once.

    All calls come from the thread that saves or loads. A violation of this contract raises ProviderError, which names
    provider and path; the save is then not begun, or discarded.
    """

    kind: str | None = None

    @abstractmethod
    def describe(self, value: T) -> Sequence[AnyPart]:
        """The parts of `value`: Parts, then ObjectParts. This method must be fast, so it should copy and serialize
        nothing.

        While `value` lives, a described part keeps its dtype, its flags, its number of dimensions and, unless it is
        resizable, its shape. New parts may be added.
        """

    @abstractmethod
    def chunks(self, value: T) -> Iterable[object]:
        """One item for each part, in the order of `describe`; preferably a generator.

        The item of a Part is its memory, not a copy: a dense tensor or array with the part's dtype and the shape of its
        box; or an object with the buffer protocol, row-major and of equal length. The memory must not change until it
        is captured (see Part.lazy); a load writes into it. The item of an ObjectPart is its value; a generator creates
        that value only when it is asked for this item.
        """

    @abstractmethod
    def restore(self, value: T, stored: Mapping[str, object], /) -> None:
        """Put stored values into `value`. Called when all bytes are read, in the order of the state's objects, after
        optimizers are restored.

        stored  by name: for each resizable Part a new tensor (or an array, if `chunks` gave an array or a buffer at the
                save), and for each ObjectPart that is not constant the stored value. All other parts are already
                restored
        """

    def create(self, stored: Mapping[str, object], /) -> T:
        """Create an object. Called if an object was saved inside of another object's state_dict(), and there is no
        existing object to restore.

        stored  by name, all stored parts. This method is optional: without it, such a load is refused
        """
        raise NotImplementedError

    def _refusal(self, stored: Mapping[str, object]) -> str | None:  # noqa: ARG002
        """The reason why `create` cannot make an object from these stored parts; None if no reason is known."""
        return None

    @property
    def creates(self) -> bool:
        """Whether `create` is overridden."""
        return type(self).create is not Provider.create
