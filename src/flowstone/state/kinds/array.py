"""Numpy arrays."""

from __future__ import annotations

from typing import cast

import numpy as np

from flowstone.format.objects import TensorRef
from flowstone.state.kind import Kind
from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import Place
from flowstone.state.saving import Saving
from flowstone.state.sink import Role


class Array(Kind):
    """An array of plain native numbers."""

    bases = (np.ndarray,)

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> TensorRef:
        saving.sink.add_array(place, cast("np.ndarray", value), role=role)
        return TensorRef(place.name, "ndarray")

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
        return loading.into_array(cast("np.ndarray", value), node, place)
