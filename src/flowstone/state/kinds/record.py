"""Objects of classes with named fields: configurations, and subclasses of dictionaries and lists."""

from __future__ import annotations

from typing import cast

import numpy as np

from flowstone.format.objects import ProviderRecord
from flowstone.state.kind import ValueKind
from flowstone.state.loading import Replacement, RestorePass
from flowstone.state.names import Place
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole

# The implementation is imported at the first such object, as most states have none.


class RecordKind(ValueKind):
    """An object that `classes.py` takes apart into fields. The fields may be values of any kind."""

    nests = True
    replaceable = True

    def __init__(self, *, arrays: bool = False) -> None:
        """`arrays`: this kind is only for numpy arrays of text or objects, which cannot be stored as plain memory."""
        self._arrays = arrays

    def recognises(self, value: object) -> bool:
        if self._arrays:
            return type(value) is np.ndarray and cast("np.ndarray", value).dtype.kind in "USO"
        from flowstone.state.classes import form_of

        return form_of(type(value)) is not None

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        from flowstone.state import fields

        return fields.find(value, place, scan)

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> ProviderRecord:
        from flowstone.state import fields

        return fields.describe(value, place, saving)

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> Replacement | None:
        from flowstone.state import fields

        return fields.restore(value, node, place, loading)
