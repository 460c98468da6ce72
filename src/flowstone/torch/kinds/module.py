"""Modules: parameters and persistent buffers are stored as tensors by name, extra state as objects."""

from __future__ import annotations

from typing import cast

import torch

from flowstone.format.merge_points import MergePoint
from flowstone.format.objects import ProviderRecord
from flowstone.state.kind import ValueKind
from flowstone.state.loading import RestorePass
from flowstone.state.names import Place, names_below
from flowstone.state.nodes import describe_node
from flowstone.state.records import MISSING
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole
from flowstone.torch.models import StateModels
from flowstone.torch.roles import ModuleRoles


class ModuleKind(ValueKind):
    """A module. If it and the modules inside do not override state_dict(), have no hooks for it and no extra state, and
    all its tensors are in plain memory, the tensors are handled together. Otherwise each entry of its state_dict() is
    handled by itself.
    """

    bases = (torch.nn.Module,)
    one_value = True
    is_object = True

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        scan.part(StateModels).modules.append((place, cast("torch.nn.Module", value)))
        return True

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> MergePoint:
        """Add a module's tensors to the save. Returns the other entries of its state_dict(), by their keys without the
        prefixes of wrappers.
        """
        module = cast("torch.nn.Module", value)
        tree = saving.scan.part(StateModels).tree(module)
        if tree is None or not tree.dense or place.rank is not None:
            from flowstone.torch import module_entries  # imported here: most modules are ordinary

            return module_entries.describe(module, place, saving)
        roles = ModuleRoles(saving.stepped, tree.self_changing, tree.values)
        own, names = roles.roles_of(tree.values, tree.parameters), names_below(place.name, tree.names)
        saving.sink.enter_all(place, tree.keys, names, tree.values, roles=own)
        return MergePoint()

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> None:
        """Request a module's tensors in their own memory, and plan to load its other entries."""
        module = cast("torch.nn.Module", value)
        if node is not MISSING and not isinstance(node, dict):
            loading.add_difference("kind", place.name, "a module", describe_node(node))
            return
        extra = cast("dict[str, object]", {} if node is MISSING else node)
        from flowstone.torch.custom_loads import loads_itself  # imported here: only loads of modules need it

        tree = loading.state_scan.part(StateModels).tree(module)
        if tree is None or not tree.dense or place.rank is not None or loads_itself(module):
            from flowstone.torch import module_entries  # imported here: most modules are ordinary

            module_entries.restore(module, extra, place, loading)
            return
        loading.request_tensors(place, tree.keys, names_below(place.name, tree.names), tree.values)
        names = set(tree.names)
        loading.add_unexpected(extra, names, place)
        for name in extra.keys() & names:
            if isinstance(extra[name], ProviderRecord):
                loading.add_difference("kind", f"{place.name}.{name}", "a tensor", describe_node(extra[name]))
