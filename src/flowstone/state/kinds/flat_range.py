"""`fs.Flat`: a range of tensors that were laid end to end, declared by hand."""

from __future__ import annotations

from typing import cast

from flowstone.state import flat
from flowstone.state.kind import Kind
from flowstone.state.loading import Loading
from flowstone.state.names import Place, check_shared
from flowstone.state.nodes import kind_of
from flowstone.state.records import MISSING
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role


class FlatRange(Kind):
    """A flat tensor, stored as its members."""

    bases = (flat.Flat,)

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        check_shared(place, value)
        scan.flats.append((place, cast("flat.Flat", value)))
        return True

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> dict[str, object]:
        """Enter the members. Their names identify them, as for a module's parameters."""
        declared = cast("flat.Flat", value)
        role = Role.STEPPED if id(declared.tensor) in saving.stepped else role
        for span in declared.spans:
            inner = place.called(f"{place.name}.{span.name}", span.name)
            saving.sink.enter(inner, span.of(declared.tensor), within=span.range, role=role)
        return {}

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> None:
        declared = cast("flat.Flat", value)
        if node is not MISSING and not isinstance(node, dict):
            loading.differ("kind", place.name, "a flat tensor's members", kind_of(node))
            return
        for span in declared.spans:
            inner = place.called(f"{place.name}.{span.name}", span.name)
            loading.into_tensor(span.of(declared.tensor), MISSING, inner, within=span.range)
        names = {span.name for span in declared.spans}
        loading.differ_extra(node if isinstance(node, dict) else {}, names, place)
