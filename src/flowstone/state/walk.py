"""The walk: the one recursion over the objects of a state.

Three passes go over a state: one scans its content, one describes it, one plans to restore it. Each is a `Walk`, which
finds the kind of a value and calls that kind's method; a kind descends by calling the walk that it was given. A value
that contains itself, or is nested too deep, is refused here, whatever its kind, by the first pass that reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Concatenate, Generic, ParamSpec, TypeVar

from flowstone.format.objects import DEPTH_MAX, unsupported
from flowstone.state.kind import Kind
from flowstone.state.names import Place, section_place
from flowstone.state.records import PerRank
from flowstone.state.registry import kind_of
from flowstone.state.scan import Scan

P = ParamSpec("P")
T = TypeVar("T")


class Walk(Generic[P, T]):
    """One pass. Called with a value, its place, and further arguments of the pass."""

    def __init__(self, act: Callable[Concatenate[Kind, object, Place, P], T]) -> None:
        """`act`: what the pass does with a value, once its kind is known."""
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
            raise unsupported(place.name, value, "contains itself", "break the cycle, or leave it out of the state")
        if len(self._open) >= DEPTH_MAX:
            raise unsupported(place.name, value, f"is nested more than {DEPTH_MAX} levels deep", "flatten it")
        self._open.add(id(value))
        made = self._act(kind, value, place, *given, **named)
        self._open.discard(id(value))
        return made


def scan(state: Mapping[str, object], rank: int) -> Scan:
    """The first pass: what the state contains, found without calling any of its methods.

    raises  UnsupportedStateError for containers that contain themselves or are too deep, and for PerRank below the top
    """
    found = Scan()

    def find(kind: Kind, value: object, place: Place) -> bool:
        return kind.find(value, place, found)

    walk = found.walk = Walk(find)
    for section, value in state.items():
        own = rank if isinstance(value, PerRank) else None
        walk(value.value if isinstance(value, PerRank) else value, section_place(section, own))
    return found
