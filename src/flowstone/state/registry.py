"""The registry: the table of all kinds, and the table of providers, with which users add types of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar, overload

from flowstone.errors import ProviderError
from flowstone.state.kind import Kind
from flowstone.state.kinds.array import Array
from flowstone.state.kinds.container import Container
from flowstone.state.kinds.counter import Counter
from flowstone.state.kinds.deque import Deque
from flowstone.state.kinds.dtensor import DTensor
from flowstone.state.kinds.flat_range import FlatRange
from flowstone.state.kinds.generator import Generator
from flowstone.state.kinds.module import Module
from flowstone.state.kinds.optimizer import Optimizer
from flowstone.state.kinds.per_rank import PerRank
from flowstone.state.kinds.plain import Plain
from flowstone.state.kinds.provided import Provided
from flowstone.state.kinds.record import Record
from flowstone.state.kinds.shard import Shard
from flowstone.state.kinds.stateful import Stateful
from flowstone.state.kinds.tensor import Tensor
from flowstone.state.kinds.tensor_subclass import TensorSubclass
from flowstone.state.provider import Provider
from flowstone.state.providers import PROVIDERS, Registration

T = TypeVar("T")
P = TypeVar("P", bound="type[Provider]")  # type: ignore[type-arg]


class Kinds:
    """Kinds in order: a value belongs to the first that recognises it, unless its exact type is in one's `types`."""

    def __init__(self, *kinds: Kind) -> None:
        self._kinds = kinds
        self._by_type = {own: kind for kind in reversed(kinds) for own in kind.types}

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds)

    def of(self, value: object) -> Kind:
        """The kind of a value."""
        kind = self._by_type.get(type(value))
        if kind is not None:
            return kind
        for kind in self._kinds:
            if kind.recognises(value):
                return kind
        raise AssertionError("the last kind recognises every value")


KINDS = Kinds(
    Provided(),  # before all kinds that go by base class: a registered provider has precedence
    TensorSubclass(),
    DTensor(),
    Tensor(),
    Record(arrays=True),
    Array(),
    Module(),
    Optimizer(),
    Shard(),
    FlatRange(),
    PerRank(),
    Generator(),
    Container(),
    Deque(),
    Counter(),
    Stateful(),
    Record(),
    Plain(),
)


def built_in() -> frozenset[type]:
    """Types for which no provider can be registered: checkpoints store them in forms of their own."""
    return frozenset({object, type}.union(*(kind.own_types() for kind in KINDS)))


def kind_of(value: object) -> Kind:
    """The kind of a value of the state; Plain also for a value that turns out to be unsupported."""
    return KINDS.of(value)


@overload
def register_provider(own: type[T], provider: Provider[T]) -> Registration[T]: ...
@overload
def register_provider(own: type[T]) -> Callable[[P], P]: ...
def register_provider(own: type[T], provider: Provider[T] | None = None) -> Registration[T] | Callable[[P], P]:
    """Let `provider` describe and restore all objects of type `own`, and of types derived from it.

    The provider of the most derived type has precedence, registered or built in. A registration is for the process:
    do it where the module that needs it is imported, before a save and before a load. Without `provider`, this is a
    decorator for a Provider's class, of which it creates one instance.

    raises  ProviderError  not a provider; a type that is built in, or has one; a kind that is taken
    """
    if not isinstance(own, type):
        raise ProviderError(
            f"{own!r:.60} is not a type",
            next="write register_provider(YourClass, YourProvider()), or decorate a Provider"
        )
    if provider is not None:
        return Registration(PROVIDERS, PROVIDERS.add(own, provider, built_in()))

    def register(cls: P) -> P:
        PROVIDERS.add(own, cls(), built_in())
        return cls

    return register
