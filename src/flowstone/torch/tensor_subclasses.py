"""Tensor subclasses that consist of tensors: saved by their components, and created from them.

torch has a protocol for this: `__tensor_flatten__` returns the names of the component tensors and a context;
`__tensor_unflatten__` creates the tensor from both. Such types are quantised weights, fp8 with scales, and low-bit
optimizer state.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch

from flowstone.format.objects import NamedConstant
from flowstone.providers.description_history import DescriptionHistory
from flowstone.providers.provider import AnyPart, ObjectPart, Part, Provider
from flowstone.state.names import type_name
from flowstone.state.provider_registry import PROVIDERS, ProviderEntry
from flowstone.torch import tensors

# Types in these modules are excluded: nested tensors, whose shape is not numeric; and torch's types for jobs of several
# ranks (DTensors, tensors that wait for a collective, one tensor for all ranks), whose components are not their full
# content. Whole modules are excluded, since newer versions add types, and saving their components would be wrong.
_APART = ("torch.nested.", "torch.distributed.")
_OUTER, _STRIDES = "outer", "outer_strides"
_QUANTISED = frozenset({"bitsandbytes", "transformer_engine"})  # packages whose parameters lack torch's protocol
_ENUM, _RECORD = "enum", "record"  # how enumerations and dataclasses in a context are stored, only for comparison


def is_made_of_tensors(own: type) -> bool:
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

    This provider saves and restores every such tensor without registration. The components are parts, each in its own
    memory; type, shape, dtype and context are compared. Register the provider only if a load must create tensors that
    do not exist yet (state of a new optimizer, values of a loader): `register_provider(Own, SplitTensor(Own))`.

    A context may consist of plain values, torch constants, enumerations and dataclasses. For other contexts, derive a
    class and override `context_of`. Tensors with enumerations or dataclasses in the context cannot be created.
    """

    def __init__(self, own: type[torch.Tensor]) -> None:
        if not is_made_of_tensors(own):
            raise TypeError(f"{own!r} is not a tensor type with __tensor_flatten__ and __tensor_unflatten__")
        self._own = own

    def context_of(self, value: torch.Tensor) -> object:
        """The context from `__tensor_flatten__`, as plain values."""
        return _plain(flatten(value)[1])

    def describe(self, value: torch.Tensor) -> Sequence[AnyPart]:
        parts = [Part.of(name, component) for name, component in _components(value)]
        return [*parts, ObjectPart(_OUTER, constant=True), ObjectPart(_STRIDES)]

    def chunks(self, value: torch.Tensor) -> Iterator[object]:
        for _, component in _components(value):
            yield component
        yield self._outer(value)
        yield list(value.stride())

    def restore(self, value: torch.Tensor, stored: Mapping[str, object]) -> None:
        """Do nothing, as the bytes were read into the components' memory."""

    def create(self, stored: Mapping[str, object]) -> torch.Tensor:
        outer = cast("dict[str, object]", stored[_OUTER])
        inner = {name: component for name, component in stored.items() if name not in (_OUTER, _STRIDES)}
        return unflatten(self._own, inner, outer["context"], outer["shape"], stored[_STRIDES])

    def _refusal(self, stored: Mapping[str, object]) -> str | None:
        return self.refuses(stored.get(_OUTER))

    def refuses(self, outer: object) -> str | None:
        """A text that says why no tensor can be created from the stored context; None if it can."""
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
            "inner": {
                name: self._outer(component) for name, component in inner.items() if is_made_of_tensors(type(component))
            },
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
    """A tensor equal to `value`, with copies of its components."""
    if not is_made_of_tensors(type(value)):
        return value.detach().clone()
    names, context = flatten(value)
    inner = {name: copy_of(getattr(value, name)) for name in names}
    return unflatten(type(value), inner, context, value.shape, value.stride())


def _components(value: torch.Tensor, above: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The dense tensors of which `value` consists, at any depth, by dotted names."""
    for name in flatten(value)[0]:
        inner = getattr(value, name)
        if is_made_of_tensors(type(inner)):
            yield from _components(inner, f"{above}{name}.")
        else:
            yield above + name, inner


def _plain(context: object) -> object:
    """The context, with enumerations and dataclasses replaced by names and plain values, for comparison."""
    if isinstance(context, enum.Enum):
        return NamedConstant(_ENUM, f"{type_name(type(context))}.{context.name}")
    if dataclasses.is_dataclass(context) and not isinstance(context, type):
        fields = {field.name: _plain(getattr(context, field.name)) for field in dataclasses.fields(context)}
        return (NamedConstant(_RECORD, type_name(type(context))), fields)
    if type(context) is dict:
        return {key: _plain(item) for key, item in context.items()}
    if type(context) in (list, tuple):
        return type(context)(map(_plain, cast("list[object]", context)))  # type: ignore[call-arg]
    return context


def _without_value(node: object) -> NamedConstant | None:
    """The first name in a stored context that cannot be turned into a value."""
    if isinstance(node, NamedConstant):
        return node if node.kind in (_ENUM, _RECORD) else None
    inside = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return next((name for item in inside if (name := _without_value(item)) is not None), None)


def find_tensor_provider(value: object) -> ProviderEntry | None:
    """The provider of a tensor: the one that is registered for its type, or one made from the type's protocol. None for
    a tensor in plain memory.
    """
    own = type(value)
    if own in tensors.DENSE_TYPES or not issubclass(own, torch.Tensor):
        return None
    return PROVIDERS.find_for_type(own) or find_subclass_provider(own)


def find_subclass_provider(own: type) -> ProviderEntry | None:
    """The provider of a tensor type that consists of tensors, if none is registered; None for any other type."""
    if not is_made_of_tensors(own):
        return _quantised(own)
    return ProviderEntry(own, cast("Provider[object]", SplitTensor(own)), type_name(own), DescriptionHistory())


def _quantised(own: type) -> ProviderEntry | None:
    """The provider of a quantised parameter of a known package."""
    if not issubclass(own, torch.Tensor) or _QUANTISED.isdisjoint(sys.modules):
        return None
    from flowstone.torch import quantised  # imported here: most states have none

    provider = quantised.provider_of(own)
    return None if provider is None else ProviderEntry(
        own, cast("Provider[object]", provider), type_name(own), DescriptionHistory()
    )
