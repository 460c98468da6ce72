"""The walk: the one recursion over the objects of a state.

Three passes go over a state: one finds what it contains, one describes it, one plans to restore it. Each is a `Walk`,
which tells the kind of a value and has it act; a kind goes on below by calling the walk that it was handed. A value
that contains itself, or lies too deep, is refused here, whatever its kind and whichever pass comes to it first.
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
    """One pass. To be called with a value and its place, and with what else the pass is told of it."""

    def __init__(self, act: Callable[Concatenate[Kind, object, Place, P], T]) -> None:
        """`act`: what the pass does with a value, once its kind is known."""
        self._act = act
        self._open: set[int] = set()

    def __call__(self, value: object, place: Place, *given: P.args, **named: P.kwargs) -> T:
        """What the pass makes of `value`, and of all below.

        raises  UnsupportedStateError for what contains itself, or is nested too deep
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
    """The first pass: what the state contains, found without calling into any of it.

    raises  UnsupportedStateError for containers that contain themselves or lie too deep, and for PerRank below the top
    """
    found = Scan()

    def find(kind: Kind, value: object, place: Place) -> bool:
        return kind.find(value, place, found)

    walk = found.walk = Walk(find)
    for section, value in state.items():
        own = rank if isinstance(value, PerRank) else None
        walk(value.value if isinstance(value, PerRank) else value, section_place(section, own))
    return found
