"""The registry: the table of all kinds. A kind saves and loads the values of some types (`kind.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from flowstone.extensions import find_extension
from flowstone.state.framework import kinds_module
from flowstone.state.kind import ValueKind
from flowstone.state.kinds.array import ArrayKind
from flowstone.state.kinds.container import ContainerKind, CounterKind, DequeKind
from flowstone.state.kinds.declared import PerRankKind, ShardKind
from flowstone.state.kinds.generator import GeneratorKind
from flowstone.state.kinds.plain import PlainKind
from flowstone.state.kinds.record import RecordKind
from flowstone.state.kinds.stateful import StatefulKind


class KindTable:
    """The kinds in order. The kind of a value is the one that has its exact type in `types`; if there is none, the
    first kind that recognises the value.
    """

    def __init__(self, *kinds: ValueKind) -> None:
        self._kinds = kinds
        self._by_type = {own: kind for kind in reversed(kinds) for own in kind.types}

    def __iter__(self) -> Iterator[ValueKind]:
        return iter(self._kinds)

    def find(self, value: object) -> ValueKind:
        """The kind of a value."""
        kind = self._by_type.get(type(value))
        if kind is not None:
            return kind
        for kind in self._kinds:
            if kind.recognises(value):
                return kind
        raise AssertionError("no kind matched a value, although the last kind matches every value")


_OF_FRAMEWORK = kinds_module()
_PROVIDED_KIND = find_extension("providers.kind")
KINDS = KindTable(
    # This kind comes before all kinds that match base classes, as a registered provider has precedence.
    *((_PROVIDED_KIND(),) if _PROVIDED_KIND else ()),
    *(_OF_FRAMEWORK.TENSOR_KINDS if _OF_FRAMEWORK else ()),
    RecordKind(arrays=True),
    ArrayKind(),
    *(_OF_FRAMEWORK.OBJECT_KINDS if _OF_FRAMEWORK else ()),
    ShardKind(),
    PerRankKind(),
    GeneratorKind(),
    ContainerKind(),
    DequeKind(),
    CounterKind(),
    StatefulKind(),
    RecordKind(),
    PlainKind(),
)


def built_in_types() -> frozenset[type]:
    """Types for which no provider can be registered: checkpoints have special forms for them."""
    return frozenset({object, type}.union(*(kind.own_types() for kind in KINDS)))


def kind_of(value: object) -> ValueKind:
    """The kind of a value of the state. PlainKind if no kind recognises the value; it then refuses the value."""
    return KINDS.find(value)
