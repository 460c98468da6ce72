"""Numpy arrays."""

from __future__ import annotations

from typing import cast

import numpy as np

from flowstone.format.objects import TensorRef
from flowstone.state.kind import ValueKind
from flowstone.state.loading import Replacement, RestorePass
from flowstone.state.names import Place
from flowstone.state.saving import DescribePass
from flowstone.state.sink import TensorRole


class ArrayKind(ValueKind):
    """A numpy array of numbers in native byte order. It is saved from its memory, and loaded in place."""

    bases = (np.ndarray,)

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> TensorRef:
        saving.sink.add_array(place, cast("np.ndarray", value), role=role)
        return TensorRef(place.name, "ndarray")

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> Replacement | None:
        return loading.request_array(cast("np.ndarray", value), node, place)
