"""The scan: what a state contains, found in one pass before any value is described or restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import TypeAlias

import torch

from flowstone.errors import StateError, UnsupportedStateError
from flowstone.state.flat import Flat
from flowstone.state.fsdp import Wrapped, wrapped
from flowstone.state.fsdp2 import with_shards
from flowstone.state.names import Place, names_below, strip_wrappers
from flowstone.state.parameters import Parameters, spans_below
from flowstone.state.records import Shard
from flowstone.state.trees import Tree, tree_of

FindWalk: TypeAlias = Callable[[object, Place], bool]
"""Scans a value of any kind; returns whether it is live."""


class Scan:
    """What a state contains, found without calling any of its methods. Each kind fills in its part.

    walk     scans the values inside of a value
    modules  of the state, with their places
    tensors  those outside of modules: for each place the keys of its tensors, None for a single tensor
    shards   path -> the shard there
    flats    flat tensors that the user has declared
    live     ids of containers that contain, at any depth, something to write in place
    guards      by id: see `optimizers`
    unguarded   names of optimizers that cannot be made to wait
    """

    walk: FindWalk

    def __init__(self) -> None:
        self.modules: list[tuple[Place, torch.nn.Module]] = []
        self.tensors: list[tuple[Place, Sequence[object] | None, Sequence[torch.Tensor]]] = []
        self.shards: dict[str, Shard] = {}
        self.flats: list[tuple[Place, Flat]] = []
        self.live: set[int] = set()
        self.guards: dict[int, object] = {}
        self.unguarded: list[str] = []
        self._trees: dict[int, Tree | None] = {}
        self._wrapped: dict[int, Wrapped | None] = {}

    @property
    def optimizers(self) -> tuple[object, ...]:
        """All optimizers that must wait before they change anything, inner ones too."""
        return tuple(self.guards.values())

    def tree(self, module: torch.nn.Module) -> Tree | None:
        """The tree below a module of the state; computed once."""
        if id(module) not in self._trees:
            self._trees[id(module)] = tree_of(module)
        return self._trees[id(module)]

    def wrapped(self, module: torch.nn.Module, place: Place) -> Wrapped | None:
        """The FSDP1 tables of a module of the state; such a module is not an ordinary tree, because of FSDP's hooks."""
        if id(module) not in self._wrapped:
            self._wrapped[id(module)] = wrapped(module, place) if self.tree(module) is None else None
        return self._wrapped[id(module)]

    def parameters(self) -> Parameters:
        """An index of everything that an optimizer could own."""
        index = Parameters(self.shards)
        for place, module in self.modules:
            base, tree = global_name(place), self.tree(module)
            if tree is not None:
                names = [f"{base}.{name}" for name in compress(tree.names, tree.parameters)]
                index.add(names, list(compress(tree.values, tree.parameters)))
                continue
            fsdp = self.wrapped(module, place)
            if fsdp is not None:
                index.add_wrapped(base, fsdp)
            named = list(with_shards(module).named_parameters(remove_duplicate=False))
            own = [(key, one) for key, one in named if fsdp is None or not fsdp.holds(key, one, place)]
            index.add([f"{base}.{strip_wrappers(key)}" for key, _ in own], [one for _, one in own])
        for place, keys, tensors in self.tensors:
            base = global_name(place)
            index.add([base] if keys is None else names_below(base, keys), tensors)
        for place, flat in self.flats:
            index.add_flat(flat.tensor, flat.tensor, spans_below(global_name(place), flat.spans))
        return index


def global_name(place: Place) -> str:
    """A place's name without its rank, the same on every rank."""
    return place.name if place.rank is None else place.name.replace(f"@{place.rank}", "", 1)


def refuse_failed_call(place: Place, call: str, error: Exception) -> UnsupportedStateError:
    """The error for a user's method that raised."""
    return UnsupportedStateError(
        f"cannot {'restore' if call == 'load_state_dict' else 'describe'} '{place.name}'",
        **facts_of_failure(call, error, next=f"fix that {call}(), or leave the object out of the state"),
    )


def facts_of_failure(call: str, error: Exception, *, next: str) -> dict[str, object]:
    """What to say of a method that raised: a StateError has said it already, with what to do."""
    if isinstance(error, StateError):
        return {"cause": error.message, **error.facts}
    return {"found": f"{call}() raised {type(error).__name__}: {error}", "next": next}
