"""Modules wrapped by FSDP1: the original parameters inside of each flat parameter are saved and restored.

The table of kinds (KindTable: how to save each type of value) has no entry for such modules. The walk over the state
treats them as modules, and only the tree of a module shows that FSDP1 wraps it (`module_entries.py`).
`fsdp1.py` finds the part of a flat parameter that is on this rank.
"""

from __future__ import annotations

from itertools import repeat

from flowstone.state.loading import RestorePass
from flowstone.state.names import Place
from flowstone.state.records import MISSING, RestorePhase
from flowstone.state.saving import DescribePass
from flowstone.torch.fsdp1 import FsdpModule
from flowstone.torch.roles import ModuleRoles


def describe(fsdp: FsdpModule, place: Place, saving: DescribePass, roles: ModuleRoles) -> None:
    """Add to the save this rank's part of the parameters that FSDP1 has flattened."""
    for unit in fsdp.units:
        for span, own in zip(unit.spans, unit.originals or repeat(unit.flat), strict=False):
            inner = place.called(f"{place.name}.{span.name}", span.name)
            saving.sink.enter(inner, span.slice_of(unit.local), within=span.range, role=roles.role_of(own, True))
        for name, target in unit.ties.items():
            saving.sink.enter_alias(place.called(f"{place.name}.{name}", name), f"{place.name}.{target}")


def restore(fsdp: FsdpModule, place: Place, loading: RestorePass) -> None:
    """Request this rank's part of the parameters that FSDP1 has flattened. They are read into the memory from which
    every forward pass gathers.
    """
    for unit in fsdp.units:
        for span in unit.spans:
            inner = place.called(f"{place.name}.{span.name}", span.name)
            loading.request_tensor(span.slice_of(unit.local), MISSING, inner, within=span.range)
        for name, target in unit.ties.items():
            loading.sink.enter_alias(place.called(f"{place.name}.{name}", name), f"{place.name}.{target}")
    loading.defer(RestorePhase.MODULES, fsdp.forget_gathered)
