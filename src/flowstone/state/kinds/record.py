"""Objects of classes with named fields: configurations, and containers that are more than a dictionary or a list."""

from __future__ import annotations

from typing import cast

import numpy as np

from flowstone.format.objects import Provided
from flowstone.state.kind import Kind
from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import Place
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role

# What does the work is imported at the first value of these kinds: most states have none.


class Record(Kind):
    """An object that `classes.py` takes apart. Its fields may be of any kind."""

    nests = True
    replaceable = True

    def __init__(self, *, arrays: bool = False) -> None:
        """`arrays`: numpy arrays of text or of objects, which have no bytes of their own, and nothing else."""
        self._arrays = arrays

    def recognises(self, value: object) -> bool:
        if self._arrays:
            return type(value) is np.ndarray and cast("np.ndarray", value).dtype.kind in "USO"
        from flowstone.state.classes import form_of

        return form_of(type(value)) is not None

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        from flowstone.state import fields

        return fields.find(value, place, scan)

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> Provided:
        from flowstone.state import fields

        return fields.describe(value, place, saving)

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
        from flowstone.state import fields

        return fields.restore(value, node, place, loading)
