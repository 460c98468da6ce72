"""The scan: what a state contains, found in one pass before anything is described or restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import TypeAlias

import torch

from flowstone.errors import UnsupportedStateError
from flowstone.state.flat import Flat
from flowstone.state.fsdp import Wrapped, reshard, wrapped
from flowstone.state.names import Place, names_below, strip_wrappers
from flowstone.state.parameters import Parameters, spans_below
from flowstone.state.records import Shard
from flowstone.state.trees import Tree, tree_of

FindWalk: TypeAlias = Callable[[object, Place], bool]
"""Enters what a value of whatever kind holds; whether it is live."""


class Scan:
    """What a state contains, found without calling into any of it. Kinds fill it in, each its own part.

    walk     enters what is below a value
    modules  of the state, with their places
    tensors  those outside of modules: of each place the keys that lead on to them, None when it is a tensor's own
    shards   path -> the shard that lies there
    flats    flat tensors that the user has declared
    live     ids of containers that hold, at any depth, something to write in place
    guards      by identity: see `optimizers`
    unguarded   names of those that cannot be made to wait
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
        """All optimizers that are to wait before they change anything, those inside of others, too."""
        return tuple(self.guards.values())

    def tree(self, module: torch.nn.Module) -> Tree | None:
        """The tree below a module of the state, walked once."""
        if id(module) not in self._trees:
            self._trees[id(module)] = tree_of(module)
        return self._trees[id(module)]

    def wrapped(self, module: torch.nn.Module, place: Place) -> Wrapped | None:
        """What FSDP1 has made of a module of the state, whose hooks keep it from being an ordinary tree."""
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
            reshard(module)
            fsdp = self.wrapped(module, place)
            if fsdp is not None:
                index.add_wrapped(base, fsdp)
            named = list(module.named_parameters(remove_duplicate=False))
            own = [(key, one) for key, one in named if fsdp is None or not fsdp.holds(key, one, place)]
            index.add([f"{base}.{strip_wrappers(key)}" for key, _ in own], [one for _, one in own])
        for place, keys, tensors in self.tensors:
            base = global_name(place)
            index.add([base] if keys is None else names_below(base, keys), tensors)
        for place, flat in self.flats:
            index.add_flat(flat.tensor, flat.tensor, spans_below(global_name(place), flat.spans))
        return index


def global_name(place: Place) -> str:
    """A place's name without its rank: what it is called on every rank."""
    return place.name if place.rank is None else place.name.replace(f"@{place.rank}", "", 1)


def refuse_failed_call(place: Place, call: str, error: Exception) -> UnsupportedStateError:
    """The error for a user's method that raised."""
    return UnsupportedStateError(
        f"cannot {'restore' if call == 'load_state_dict' else 'describe'} '{place.name}'",
        found=f"{call}() raised {type(error).__name__}: {error}",
        next=f"fix that {call}(), or leave the object out of the state",
    )
