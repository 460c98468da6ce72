"""The scan: finds the contents of a state, in one pass before any value is described or restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from flowstone.errors import StateError, UnsupportedStateError
from flowstone.state.names import Place
from flowstone.state.records import Shard

T = TypeVar("T")

FindWalk: TypeAlias = Callable[[object, Place], bool]
"""Scans a value of any kind; returns whether it is live (a load writes the value, or something in it, in place)."""


class StateScan:
    """The contents of a state, found without calling any of its methods. Each kind fills in its part.

    walk     scans one value; kinds call it for the values inside of a value
    tensors  tensors outside of modules: for each place the keys of its tensors, or None if it is a single tensor
    shards   path -> the shard at that path
    live     ids of containers that contain, at any depth, something that a load writes in place
    guards      id -> object whose methods must wait for captures; see `optimizers`
    unguarded   names of optimizers that cannot be made to wait
    """

    walk: FindWalk

    def __init__(self) -> None:
        self.tensors: list[tuple[Place, Sequence[object] | None, Sequence[Any]]] = []
        self.shards: dict[str, Shard] = {}
        self.live: set[int] = set()
        self.guards: dict[int, object] = {}
        self.unguarded: list[str] = []
        self._parts: dict[object, object] = {}

    def add_optimizer(self, name: str, guards: Sequence[object]) -> None:
        """Record an optimizer. `guards`: the objects whose methods must wait before they change the state; empty: the
        optimizer cannot be made to wait.
        """
        self.guards.update((id(guard), guard) for guard in guards)
        if not guards:
            self.unguarded.append(name)

    @property
    def optimizers(self) -> tuple[object, ...]:
        """All optimizers whose steps must wait for captures, inner ones included."""
        return tuple(self.guards.values())

    def part(self, own: Callable[[StateScan], T]) -> T:
        """What the code for a framework has found in this scan: an object of its class `own`, created at the first
        call.
        """
        if own not in self._parts:
            self._parts[own] = own(self)
        return cast("T", self._parts[own])


def global_name(place: Place) -> str:
    """A place's name without its rank, the same on every rank."""
    return place.name if place.rank is None else place.name.replace(f"@{place.rank}", "", 1)


def failed_call_error(place: Place, call: str, error: Exception) -> UnsupportedStateError:
    """The error that says that the user's method `call` has raised `error`."""
    return UnsupportedStateError(
        f"cannot {'restore' if call == 'load_state_dict' else 'describe'} '{place.name}'",
        **failure_facts(call, error, next=f"fix that {call}(), or leave the object out of the state"),
    )


def failure_facts(call: str, error: Exception, *, next: str) -> dict[str, object]:
    """The facts for an error about a method that raised; for a StateError, its own facts and `next`."""
    if isinstance(error, StateError):
        return {"cause": error.message, **error.facts}
    return {"found": f"{call}() raised {type(error).__name__}: {error}", "next": next}
