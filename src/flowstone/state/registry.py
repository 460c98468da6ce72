"""The registry: which provider has the word for which type."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar, cast, overload

import torch

from flowstone.errors import ProviderError
from flowstone.state.kinds import BUILT_IN
from flowstone.state.names import valid_name
from flowstone.state.provider import AnyPart, Provider
from flowstone.state.split import SplitTensor, splits, type_name

T = TypeVar("T")
P = TypeVar("P", bound="type[Provider]")  # type: ignore[type-arg]


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A provider at work: for which type, and what checkpoints call its objects."""

    own: type
    provider: Provider[object]
    kind: str
    promises: Promises

    @property
    def title(self) -> str:
        return type_name(type(self.provider))


class Promises:
    """What each object of a provider's has been described as, for as long as the object lives.

    Tensors are left out: `torch.utils.swap_tensors` makes others of them under their identity, and
    refuses those that somebody watches. So are objects that cannot be watched.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[object], dict[str, AnyPart]]] = {}

    def before(self, value: object) -> Mapping[str, AnyPart]:
        """The parts that `value` was described with, by name; none the first time."""
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
    """A provider in force for a type, until `remove()` is called, or to the end of a `with` block."""

    def __init__(self, registry: Registry, served: Served) -> None:
        self._registry, self._served = registry, served

    @property
    def kind(self) -> str:
        """What checkpoints call the objects."""
        return self._served.kind

    def remove(self) -> None:
        """End it. Checkpoints that were saved meanwhile need it again to be loaded. Harmless when called twice."""
        self._registry.remove(self._served)

    def __enter__(self) -> Registration[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Registry:
    """Providers by type. There is one: types are the process's, and so is what is known of them."""

    def __init__(self) -> None:
        self._by_type: dict[type, Served] = {}
        self._by_kind: dict[str, Served] = {}

    def add(self, own: type, provider: object) -> Served:
        """Put a provider in force. Raises ProviderError for what cannot be one, or not for that type."""
        if not isinstance(own, type):
            raise ProviderError(f"{own!r} is not a type to register a provider for", next="give its class")
        name = type_name(own)
        if not isinstance(provider, Provider):
            raise ProviderError(
                f"{provider!r} cannot be the provider of {name}", expected="an instance of a subclass of Provider",
                found=type_name(type(provider)), next="derive it: describe, chunks and restore are its methods",
            )
        if own in BUILT_IN:
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
        """The provider of the most derived base of `own` that has one; tensors that split have one anyway."""
        if self._by_type:
            for base in own.__mro__:
                if base in self._by_type:
                    return self._by_type[base]
        if splits(own):
            provider = cast("Provider[object]", SplitTensor(own))
            return Served(own, provider, type_name(own), Promises())
        return None

    def of_kind(self, kind: str) -> Served | None:
        """The registered provider of what a checkpoint calls `kind`."""
        return self._by_kind.get(kind)


REGISTRY = Registry()


@overload
def register_provider(own: type[T], provider: Provider[T]) -> Registration[T]: ...
@overload
def register_provider(own: type[T]) -> Callable[[P], P]: ...
def register_provider(own: type[T], provider: Provider[T] | None = None) -> Registration[T] | Callable[[P], P]:
    """Let `provider` describe and restore all objects of type `own`, and of those derived from it.

    The provider of the most derived type has the word, registered or built in. Registered for the process: do it
    where the module that needs it is imported, before a save and before a load. Without `provider` this
    is a decorator for a Provider's class, of which it makes the one instance.

    raises  ProviderError  no provider; a type that is built in, or has one; a kind that is taken
    """
    if not isinstance(own, type):
        raise ProviderError(
            f"{own!r:.60} is not a type",
            next="write register_provider(YourClass, YourProvider()), or decorate a Provider"
        )
    if provider is not None:
        return Registration(REGISTRY, REGISTRY.add(own, provider))

    def register(cls: P) -> P:
        REGISTRY.add(own, cls())
        return cls

    return register
