"""The walk: the one recursion over the objects of a state.

There are three passes over a state: one finds what it contains, one lists its tensors and values for a save, and one
plans a load. Each pass is a `Walk`, which finds the kind of a value (`kind.py`) and calls a method of that kind; the
kind calls the walk for the values inside. The first pass that reaches a value that contains itself, or is nested too
deep, refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Concatenate, Generic, ParamSpec, TypeVar

from flowstone.format.objects import DEPTH_MAX, unsupported_error
from flowstone.state.kind import ValueKind
from flowstone.state.names import Place, section_place
from flowstone.state.records import PerRank
from flowstone.state.registry import kind_of
from flowstone.state.scan import StateScan

P = ParamSpec("P")
T = TypeVar("T")


class Walk(Generic[P, T]):
    """One pass over a state. Call it with a value, its place in the state, and further arguments of the pass."""

    def __init__(self, act: Callable[Concatenate[ValueKind, object, Place, P], T]) -> None:
        """`act`: handles a value, once its kind is known."""
        self._act = act
        self._open: set[int] = set()

    def __call__(self, value: object, place: Place, *given: P.args, **named: P.kwargs) -> T:
        """The result of the pass for `value` and all values inside.

        raises  UnsupportedStateError for a value that contains itself, or is nested too deep
        """
        kind = kind_of(value)
        if not kind.nests:
            return self._act(kind, value, place, *given, **named)
        if id(value) in self._open:
            raise unsupported_error(
                place.name, value, "contains itself", "remove the reference to itself, or leave it out of the state"
            )
        if len(self._open) >= DEPTH_MAX:
            raise unsupported_error(
                place.name, value, f"is nested more than {DEPTH_MAX} levels deep", "use fewer levels of dicts and lists"
            )
        self._open.add(id(value))
        made = self._act(kind, value, place, *given, **named)
        self._open.discard(id(value))
        return made


def scan(state: Mapping[str, object], rank: int) -> StateScan:
    """The first pass: what the state contains, found without calling any of its methods.

    raises  UnsupportedStateError for containers that contain themselves or are too deep, and for PerRank below the top
    """
    result = StateScan()

    def find(kind: ValueKind, value: object, place: Place) -> bool:
        return kind.find(value, place, result)

    walk = result.walk = Walk(find)
    for section, value in state.items():
        own = rank if isinstance(value, PerRank) else None
        walk(value.value if isinstance(value, PerRank) else value, section_place(section, own))
    return result
