"""The registered providers: which of them describes the objects of a type."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Generic, TypeVar, cast

import msgspec
import torch

from flowstone.errors import ProviderError
from flowstone.state.names import valid_name
from flowstone.state.provider import AnyPart, Provider
from flowstone.state.split import SplitTensor, splits, type_name
from flowstone.state.tensors import DENSE_TYPES

T = TypeVar("T")


class Served(msgspec.Struct, frozen=True, eq=False):
    """A provider, the type for which it is registered, and the name of its objects in checkpoints."""

    own: type
    provider: Provider[object]
    kind: str
    promises: Promises

    @property
    def title(self) -> str:
        return type_name(type(self.provider))


class Promises:
    """The last description of each object with a provider, kept while the object lives.

    Tensors are left out: `torch.utils.swap_tensors` changes what their identity stands for, and refuses tensors with
    weak references. So are objects that cannot have weak references.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[object], dict[str, AnyPart]]] = {}

    def before(self, value: object) -> Mapping[str, AnyPart]:
        """The parts in the last description of `value`, by name; empty the first time."""
        watched, parts = self._by_id.get(id(value), (None, {}))
        return parts if watched is not None and watched() is value else {}

    def note(self, value: object, parts: Mapping[str, AnyPart]) -> None:
        if isinstance(value, torch.Tensor):
            return
        known, at = self._by_id, id(value)
        try:
            watched = weakref.ref(value, lambda _: known.pop(at, None))
        except TypeError:
            return
        known[at] = watched, {**self.before(value), **parts}


class Registration(Generic[T]):
    """A registered provider of a type, until `remove()` is called, or to the end of a `with` block."""

    def __init__(self, providers: Providers, served: Served) -> None:
        self._providers, self._served = providers, served

    @property
    def kind(self) -> str:
        """The name of the objects in checkpoints."""
        return self._served.kind

    def remove(self) -> None:
        """End the registration. Checkpoints saved meanwhile need it again at load. A second call does nothing."""
        self._providers.remove(self._served)

    def __enter__(self) -> Registration[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Providers:
    """Providers by type. There is one instance: types belong to the process, and so does their registration."""

    def __init__(self) -> None:
        self._by_type: dict[type, Served] = {}
        self._by_kind: dict[str, Served] = {}

    def add(self, own: type, provider: object, built_in: Collection[type]) -> Served:
        """Register a provider. Raises ProviderError for an object that is none, or does not fit the type.

        built_in  types for which no provider can be registered
        """
        if not isinstance(own, type):
            raise ProviderError(f"{own!r} is not a type to register a provider for", next="give its class")
        name = type_name(own)
        if not isinstance(provider, Provider):
            raise ProviderError(
                f"{provider!r} cannot be the provider of {name}", expected="an instance of a subclass of Provider",
                found=type_name(type(provider)), next="derive it: describe, chunks and restore are its methods",
            )
        if own in built_in:
            raise ProviderError(
                f"{name} has a built-in provider", provider=type_name(type(provider)), next="register a subclass of it"
            )
        kind = name if provider.kind is None else provider.kind
        if type(kind) is not str or not kind or not valid_name(kind):
            raise ProviderError(
                f"the provider of {name} has an invalid kind, {kind!r}", provider=type_name(type(provider)),
                expected="a non-empty str without NUL", next="leave it out, or correct it",
            )
        for known in (self._by_type.get(own), self._by_kind.get(kind)):
            if known is not None:
                raise ProviderError(
                    f"cannot register a second provider for {name}", provider=type_name(type(provider)),
                    found=f"{known.title} serves {type_name(known.own)} as '{known.kind}'",
                    next="remove() the first registration, or give the provider another kind",
                )
        served = Served(own, provider, kind, Promises())
        self._by_type[own] = self._by_kind[kind] = served
        return served

    def remove(self, served: Served) -> None:
        if self._by_type.get(served.own) is served:
            del self._by_type[served.own], self._by_kind[served.kind]

    def of_type(self, own: type) -> Served | None:
        """The registered provider of the most derived base class of `own` that has one."""
        if self._by_type:
            for base in own.__mro__:
                if base in self._by_type:
                    return self._by_type[base]
        return None

    def of_kind(self, kind: str) -> Served | None:
        """The registered provider whose objects are called `kind` in checkpoints."""
        return self._by_kind.get(kind)


PROVIDERS = Providers()
_QUANTISED = frozenset({"bitsandbytes", "transformer_engine"})  # whose parameters do not say what they consist of


def served_tensor(value: object) -> Served | None:
    """The provider of a tensor that is not plain memory: a registered one, or the one of its type's own protocol."""
    own = type(value)
    if own in DENSE_TYPES or not issubclass(own, torch.Tensor):
        return None
    return PROVIDERS.of_type(own) or split_by_itself(own)


def split_by_itself(own: type) -> Served | None:
    """The provider that a tensor type made of tensors has without registration."""
    if not splits(own):
        return _quantised(own)
    return Served(own, cast("Provider[object]", SplitTensor(own)), type_name(own), Promises())


def _quantised(own: type) -> Served | None:
    """The provider of a quantised parameter of a known package."""
    if not issubclass(own, torch.Tensor) or _QUANTISED.isdisjoint(sys.modules):
        return None
    from flowstone.state import quantised  # imported here: most states have none

    provider = quantised.provider_of(own)
    return None if provider is None else Served(own, cast("Provider[object]", provider), type_name(own), Promises())
