"""Registering a provider for a type."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar, overload

from flowstone.errors import ProviderError
from flowstone.providers.description_history import DescriptionHistory
from flowstone.providers.provider import Provider
from flowstone.state.names import type_name, valid_name
from flowstone.state.provider_registry import PROVIDERS, ProviderEntry
from flowstone.state.registry import built_in_types

T = TypeVar("T")
P = TypeVar("P", bound="type[Provider]")  # type: ignore[type-arg]


class Registration(Generic[T]):
    """The registration of a provider for a type. It holds until `remove()` is called, or until the end of its `with`
    block.
    """

    def __init__(self, entry: ProviderEntry) -> None:
        self._entry = entry

    @property
    def kind(self) -> str:
        """The name by which checkpoints refer to objects of this type."""
        return self._entry.kind

    def remove(self) -> None:
        """End the registration. To load checkpoints that were saved with it, the provider must be registered again. A
        second call does nothing.
        """
        PROVIDERS.remove(self._entry)

    def __enter__(self) -> Registration[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


@overload
def register_provider(own: type[T], provider: Provider[T]) -> Registration[T]: ...
@overload
def register_provider(own: type[T]) -> Callable[[P], P]: ...
def register_provider(own: type[T], provider: Provider[T] | None = None) -> Registration[T] | Callable[[P], P]:
    """Let `provider` describe and restore all objects of type `own`, and of types derived from it.

    If several of an object's types (its class and base classes) have providers, registered or built in, the provider of
    the most derived one is used. A registration holds for the whole process, so register when a module is imported,
    before saves and loads. Without `provider`, this function is a decorator for a Provider's class, of which it creates
    one instance.

    raises  ProviderError  `provider` is not a provider, the type is built in or already has a provider, or another
                           provider has the same kind
    """
    if not isinstance(own, type):
        raise ProviderError(
            f"{own!r:.60} is not a type",
            next="write register_provider(YourClass, YourProvider()), or decorate a Provider"
        )
    if provider is not None:
        return Registration(_add(own, provider))

    def register(cls: P) -> P:
        _add(own, cls())
        return cls

    return register


def _add(own: type, provider: object) -> ProviderEntry:
    """Register a provider. Raises ProviderError for an object that is not a provider, or does not fit the type."""
    name = type_name(own)
    if not isinstance(provider, Provider):
        raise ProviderError(
            f"{provider!r} cannot be the provider of {name}", expected="an instance of a subclass of Provider",
            found=type_name(type(provider)),
            next="write a subclass of Provider with the methods describe, chunks and restore",
        )
    if own in built_in_types():
        raise ProviderError(
            f"{name} has a built-in provider", provider=type_name(type(provider)),
            next="register the provider for a subclass of this class",
        )
    kind = name if provider.kind is None else provider.kind
    if type(kind) is not str or not kind or not valid_name(kind):
        raise ProviderError(
            f"the provider of {name} has an invalid kind, {kind!r}", provider=type_name(type(provider)),
            expected="a non-empty str without NUL", next="omit `kind`, or correct it",
        )
    registered = PROVIDERS.registered(own, kind)
    if registered is not None:
        raise ProviderError(
            f"cannot register a second provider for {name}", provider=type_name(type(provider)),
            found=f"{registered.title} serves {type_name(registered.own)} as '{registered.kind}'",
            next="remove() the first registration; or, if it is for another type, give this provider another kind",
        )
    entry = ProviderEntry(own, provider, kind, DescriptionHistory())
    PROVIDERS.add(entry)
    return entry
