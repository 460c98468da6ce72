"""Modules wrapped by FSDP1: flat parameters, described and restored as the original parameters in them.

Not in the table of kinds: for the walk it is a module, and only the module's own tree shows that it is wrapped
(`module_entries.py`). `fsdp.py` reads which part of a flat parameter is on this rank.
"""

from __future__ import annotations

from itertools import repeat

from flowstone.state.fsdp import Wrapped
from flowstone.state.loading import Loading
from flowstone.state.names import Place
from flowstone.state.records import MISSING, Phase
from flowstone.state.roles import Roles
from flowstone.state.saving import Saving


def describe(fsdp: Wrapped, place: Place, saving: Saving, roles: Roles) -> None:
    """Enter this rank's part of parameters that FSDP1 has flattened."""
    for unit in fsdp.units:
        for span, own in zip(unit.spans, unit.originals or repeat(unit.flat), strict=False):
            inner = place.called(f"{place.name}.{span.name}", span.name)
            saving.sink.enter(inner, span.of(unit.local), within=span.range, role=roles.of(own, True))
        for name, target in unit.ties.items():
            saving.sink.tie(place.called(f"{place.name}.{name}", name), f"{place.name}.{target}")


def restore(fsdp: Wrapped, place: Place, loading: Loading) -> None:
    """Request this rank's part of them, into the memory from which every forward gathers."""
    for unit in fsdp.units:
        for span in unit.spans:
            inner = place.called(f"{place.name}.{span.name}", span.name)
            loading.into_tensor(span.of(unit.local), MISSING, inner, within=span.range)
        for name, target in unit.ties.items():
            loading.sink.tie(place.called(f"{place.name}.{name}", name), f"{place.name}.{target}")
    loading.later(Phase.MODULES, fsdp.forget_gathered)
