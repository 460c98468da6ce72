"""Models: the modules and flat tensors of a state, and everything in it that an optimizer could own."""

from __future__ import annotations

from functools import cached_property
from itertools import compress

import torch

from flowstone.state.names import Place, names_below, strip_wrappers
from flowstone.state.scan import StateScan, global_name
from flowstone.torch.flat import Flat
from flowstone.torch.fsdp1 import FsdpModule, fsdp_module_of
from flowstone.torch.fsdp2 import with_shards
from flowstone.torch.parameters import ParameterIndex, spans_below
from flowstone.torch.trees import ModuleTree, tree_of


class StateModels:
    """The modules and flat tensors that a scan of a state has found. `scan.part(StateModels)` returns this object.

    modules  the modules of the state, with their places
    flats    flat tensors that the user has declared
    """

    def __init__(self, scan: StateScan) -> None:
        self._scan = scan
        self.modules: list[tuple[Place, torch.nn.Module]] = []
        self.flats: list[tuple[Place, Flat]] = []
        self._trees: dict[int, ModuleTree | None] = {}
        self._wrapped: dict[int, FsdpModule | None] = {}

    def tree(self, module: torch.nn.Module) -> ModuleTree | None:
        """The tree of a module of the state, see ModuleTree; None if it has none. Computed once for each module."""
        if id(module) not in self._trees:
            self._trees[id(module)] = tree_of(module)
        return self._trees[id(module)]

    def wrapped(self, module: torch.nn.Module, place: Place) -> FsdpModule | None:
        """The flat parameters of a module of the state that FSDP1 wraps; None for any other module."""
        if id(module) not in self._wrapped:
            self._wrapped[id(module)] = fsdp_module_of(module, place) if self.tree(module) is None else None
        return self._wrapped[id(module)]

    @cached_property
    def parameters(self) -> ParameterIndex:
        """An index of all parameters that an optimizer could have. Must only be used when the scan is over."""
        index = ParameterIndex(self._scan.shards)
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
            own = [(key, value) for key, value in named if fsdp is None or not fsdp.holds(key, value, place)]
            index.add([f"{base}.{strip_wrappers(key)}" for key, _ in own], [value for _, value in own])
        for place, keys, tensors in self._scan.tensors:
            base = global_name(place)
            index.add([base] if keys is None else names_below(base, keys), tensors)
        for place, flat in self.flats:
            index.add_flat(flat.tensor, flat.tensor, spans_below(global_name(place), flat.spans))
        return index
