"""Modules: parameters and persistent buffers by name, extra state as objects."""

from __future__ import annotations

from typing import cast

import torch

from flowstone.format.merge_points import MergePoint
from flowstone.format.objects import Provided
from flowstone.state.kind import Kind
from flowstone.state.loading import Loading
from flowstone.state.names import Place, names_below
from flowstone.state.nodes import kind_of
from flowstone.state.records import MISSING
from flowstone.state.roles import Roles
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role


class Module(Kind):
    """A module: handled as a whole if its tree is ordinary and dense, else entry by entry of its state_dict()."""

    bases = (torch.nn.Module,)
    one_value = True
    is_object = True

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        scan.modules.append((place, cast("torch.nn.Module", value)))
        return True

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> MergePoint:
        """Enter a module's tensors. Returns the other entries of its state_dict(), by stripped key."""
        module = cast("torch.nn.Module", value)
        tree = saving.scan.tree(module)
        if tree is None or not tree.dense or place.rank is not None:
            from flowstone.state import module_entries  # imported here: most modules are ordinary

            return module_entries.describe(module, place, saving)
        roles = Roles(saving.stepped, tree.restless, tree.values)
        own, names = roles.of_all(tree.values, tree.parameters), names_below(place.name, tree.names)
        saving.sink.enter_all(place, tree.keys, names, tree.values, roles=own)
        return MergePoint()

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> None:
        """Request a module's tensors in their own memory, and plan to load its other entries."""
        module = cast("torch.nn.Module", value)
        if node is not MISSING and not isinstance(node, dict):
            loading.differ("kind", place.name, "a module", kind_of(node))
            return
        extra = cast("dict[str, object]", {} if node is MISSING else node)
        from flowstone.state.own_loads import loads_itself  # imported here: only loads of modules need it

        tree = loading.scan.tree(module)
        if tree is None or not tree.dense or place.rank is not None or loads_itself(module):
            from flowstone.state import module_entries  # imported here: most modules are ordinary

            module_entries.restore(module, extra, place, loading)
            return
        loading.into_tensors(place, tree.keys, names_below(place.name, tree.names), tree.values)
        names = set(tree.names)
        loading.differ_extra(extra, names, place)
        for name in extra.keys() & names:
            if isinstance(extra[name], Provided):
                loading.differ("kind", f"{place.name}.{name}", "a tensor", kind_of(extra[name]))
