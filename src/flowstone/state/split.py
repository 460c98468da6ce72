"""Tensor subclasses that are made of tensors: split into them, and put together again.

Torch's own protocol says how: `__tensor_flatten__` names the component tensors and gives a context,
`__tensor_unflatten__` makes the tensor of both. Quantised weights, fp8 with scales, and the states of
optimizers with few bits are such types.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch

from flowstone.format.objects import Named
from flowstone.state import tensors
from flowstone.state.provider import AnyPart, ObjectPart, Part, Provider

# Nested tensors, whose shape is no numbers; and all that torch has for jobs of several ranks (DTensors, tensors that
# wait for a collective, one tensor for all ranks), whose parts are not what they hold. By names, as newer versions
# bring more of them, in modules of their own, and to take one for its parts would save it wrongly.
_APART = ("torch.nested.", "torch.distributed.")
_OUTER, _STRIDES = "outer", "outer_strides"
_ENUM, _RECORD = "enum", "record"  # what a context may hold, for comparison only: no file makes such values


def splits(own: type) -> bool:
    """Whether tensors of type `own` are made of tensors."""
    return (
        issubclass(own, torch.Tensor)
        and own not in tensors.DENSE_TYPES
        and hasattr(own, "__tensor_flatten__")
        and hasattr(own, "__tensor_unflatten__")
        and not any(base.__module__.startswith(_APART) for base in own.__mro__)
    )


class SplitTensor(Provider[torch.Tensor]):
    """The provider of tensors of type `own`, which has `__tensor_flatten__` and `__tensor_unflatten__`.

    Every such tensor is saved and restored by it, without registration: its components are parts, each in
    its own memory; type, shape, dtype and context are compared. It has to be registered only so that tensors
    can be made where none is there at load (the slots of a fresh optimizer, a loader's tree):
    `register_provider(Own, SplitTensor(Own))`.

    A context of plain values, constants of torch, enumerations and dataclasses is understood; derive and
    change `context_of` for another. Of one with enumerations and dataclasses no tensor is made.
    """

    def __init__(self, own: type[torch.Tensor]) -> None:
        if not splits(own):
            raise TypeError(f"{own!r} is not a tensor type with __tensor_flatten__ and __tensor_unflatten__")
        self._own = own

    def context_of(self, value: torch.Tensor) -> object:
        """What `__tensor_flatten__` gives besides the components' names, as plain values."""
        return _plain(flatten(value)[1])

    def describe(self, value: torch.Tensor) -> Sequence[AnyPart]:
        parts = [Part.of(name, one) for name, one in _components(value)]
        return [*parts, ObjectPart(_OUTER, constant=True), ObjectPart(_STRIDES)]

    def chunks(self, value: torch.Tensor) -> Iterator[object]:
        for _, component in _components(value):
            yield component
        yield self._outer(value)
        yield list(value.stride())

    def restore(self, value: torch.Tensor, found: Mapping[str, object]) -> None:
        """Nothing is left to do: the components hold the bytes."""

    def create(self, found: Mapping[str, object]) -> torch.Tensor:
        outer = cast("dict[str, object]", found[_OUTER])
        inner = {name: one for name, one in found.items() if name not in (_OUTER, _STRIDES)}
        return unflatten(self._own, inner, outer["context"], outer["shape"], found[_STRIDES])

    def refuses(self, outer: object) -> str | None:
        """Why no tensor can be made of what a checkpoint says; None where one can."""
        match outer:
            case {"type": kind, "context": context, "shape": tuple(), "inner": dict(inner)}:
                if kind != type_name(self._own):
                    return f"it is a {kind}"
                if inner:
                    return "its components are themselves made of tensors"
                named = _without_value(context)
                return None if named is None else f"its context holds {named.text}, which cannot be created from a file"
        return "it is not described as a tensor"

    def _outer(self, value: torch.Tensor) -> dict[str, object]:
        names, _ = flatten(value)
        inner = {name: getattr(value, name) for name in names}
        return {
            "type": type_name(type(value)),
            "context": self.context_of(value),
            "shape": tuple(value.shape),
            "dtype": value.dtype,
            "inner": {name: self._outer(one) for name, one in inner.items() if splits(type(one))},
        }


def flatten(value: torch.Tensor) -> tuple[Sequence[str], object]:
    """The names of a tensor's components, and its context."""
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return names, context


def unflatten(
    own: type[torch.Tensor], inner: Mapping[str, object], context: object, shape: object, strides: object
) -> torch.Tensor:
    """The tensor of type `own` that is made of `inner`; shape and strides in elements."""
    made = own.__tensor_unflatten__(inner, context, torch.Size(cast("Sequence[int]", shape)), strides)  # type: ignore[attr-defined]
    return cast("torch.Tensor", made)


def empty_like(value: torch.Tensor) -> torch.Tensor:
    """A tensor such as `value`, of components in memory of their own with undefined elements."""
    if not splits(type(value)):
        return torch.empty_like(value, requires_grad=False)
    names, context = flatten(value)
    inner = {name: empty_like(getattr(value, name)) for name in names}
    return unflatten(type(value), inner, context, value.shape, value.stride())


def _components(value: torch.Tensor, above: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The dense tensors that `value` is made of, at any depth, by dotted names."""
    for name in flatten(value)[0]:
        inner = getattr(value, name)
        if splits(type(inner)):
            yield from _components(inner, f"{above}{name}.")
        else:
            yield above + name, inner


def type_name(own: type) -> str:
    """A type as errors and checkpoints call it."""
    return f"{own.__module__}.{own.__qualname__}"


def _plain(context: object) -> object:
    """A context in which enumerations and dataclasses stand by their names, for comparison."""
    if isinstance(context, enum.Enum):
        return Named(_ENUM, f"{type_name(type(context))}.{context.name}")
    if dataclasses.is_dataclass(context) and not isinstance(context, type):
        fields = {field.name: _plain(getattr(context, field.name)) for field in dataclasses.fields(context)}
        return (Named(_RECORD, type_name(type(context))), fields)
    if type(context) is dict:
        return {key: _plain(item) for key, item in context.items()}
    if type(context) in (list, tuple):
        return type(context)(map(_plain, cast("list[object]", context)))  # type: ignore[call-arg]
    return context


def _without_value(node: object) -> Named | None:
    """The first name in a stored context for which there is no value."""
    if isinstance(node, Named):
        return node if node.kind in (_ENUM, _RECORD) else None
    inside = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return next((found for item in inside if (found := _without_value(item)) is not None), None)
