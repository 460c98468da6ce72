"""Tensor subclasses that are made of tensors: take them apart, and put them together again.

Torch's own protocol says how: `__tensor_flatten__` names the component tensors and gives a context;
`__tensor_unflatten__` creates the tensor from both. Quantised weights, fp8 with scales, and the states of optimizers
with few bits are such types.
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

# Excluded: nested tensors, whose shape is not numeric; and torch's types for jobs of several ranks (DTensors, tensors
# that wait for a collective, one tensor for all ranks), whose components are not their whole content. By module name,
# since newer versions add types, which would be saved wrongly by their components.
_APART = ("torch.nested.", "torch.distributed.")
_OUTER, _STRIDES = "outer", "outer_strides"
_ENUM, _RECORD = "enum", "record"  # content of a context, for comparison only: no file creates such values


def splits(own: type) -> bool:
    """Whether tensors of type `own` consist of tensors."""
    return (
        issubclass(own, torch.Tensor)
        and own not in tensors.DENSE_TYPES
        and hasattr(own, "__tensor_flatten__")
        and hasattr(own, "__tensor_unflatten__")
        and not any(base.__module__.startswith(_APART) for base in own.__mro__)
    )


class SplitTensor(Provider[torch.Tensor]):
    """The provider of tensors of type `own`, which has `__tensor_flatten__` and `__tensor_unflatten__`.

    It saves and restores every such tensor, without registration: the components are parts, each in its own memory;
    type, shape, dtype and context are compared. Register it only to create tensors that do not exist at load (the slots
    of a fresh optimizer, values of a loader): `register_provider(Own, SplitTensor(Own))`.

    Supports a context of plain values, torch constants, enumerations and dataclasses; for others, derive a class and
    override `context_of`. With enumerations or dataclasses in the context, tensors are not created.
    """

    def __init__(self, own: type[torch.Tensor]) -> None:
        if not splits(own):
            raise TypeError(f"{own!r} is not a tensor type with __tensor_flatten__ and __tensor_unflatten__")
        self._own = own

    def context_of(self, value: torch.Tensor) -> object:
        """The context from `__tensor_flatten__`, as plain values."""
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
        """Nothing to do: the bytes are in the components already."""

    def create(self, found: Mapping[str, object]) -> torch.Tensor:
        outer = cast("dict[str, object]", found[_OUTER])
        inner = {name: one for name, one in found.items() if name not in (_OUTER, _STRIDES)}
        return unflatten(self._own, inner, outer["context"], outer["shape"], found[_STRIDES])

    def refuses(self, outer: object) -> str | None:
        """Why no tensor can be created from the stored context; None if one can."""
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


def copy_of(value: torch.Tensor) -> torch.Tensor:
    """A tensor equal to `value`, whose components have memory of their own."""
    if not splits(type(value)):
        return value.detach().clone()
    names, context = flatten(value)
    inner = {name: copy_of(getattr(value, name)) for name in names}
    return unflatten(type(value), inner, context, value.shape, value.stride())


def _components(value: torch.Tensor, above: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The dense tensors of which `value` consists, at any depth, by dotted names."""
    for name in flatten(value)[0]:
        inner = getattr(value, name)
        if splits(type(inner)):
            yield from _components(inner, f"{above}{name}.")
        else:
            yield above + name, inner


def type_name(own: type) -> str:
    """A type's name in errors and checkpoints."""
    return f"{own.__module__}.{own.__qualname__}"


def _plain(context: object) -> object:
    """A context with the names of enumerations and dataclasses in place of the values, for comparison."""
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
    """The first name in a stored context that cannot be turned into a value."""
    if isinstance(node, Named):
        return node if node.kind in (_ENUM, _RECORD) else None
    inside = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return next((found for item in inside if (found := _without_value(item)) is not None), None)
