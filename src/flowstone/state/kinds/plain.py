"""Plain values: numbers, text, bytes, sets, constants of torch and numpy, scalars of numpy, slices."""

from __future__ import annotations

from typing import cast

import numpy as np

from flowstone.format import objects
from flowstone.format.objects import TensorRef
from flowstone.state import constants
from flowstone.state.constants import stored_key
from flowstone.state.kind import ValueKind
from flowstone.state.loading import Replacement, RestorePass
from flowstone.state.memory import array_memory
from flowstone.state.names import Place
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import describe_node, refers_to_tensors
from flowstone.state.records import MISSING
from flowstone.state.saving import DescribePass
from flowstone.state.scan import StateScan
from flowstone.state.sink import TensorRole
from flowstone.table.dtype import DTYPES

BYTES_INLINE_MAX = 64 * 1024
"""Longer bytes are stored as a tensor, because all objects are read, as text, whenever a checkpoint is opened."""

IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, range})
"""Types of values that need no copy."""

TYPES = IMMUTABLE | {bytes, bytearray}
"""Types of values that contain no others, and that no other kind handles."""


class PlainKind(ValueKind):
    """A plain value. This is the last kind of the table, so it also gets values that no kind recognises. It refuses
    these with an error that names them.
    """

    types = TYPES | {set, frozenset, slice}
    replaceable = True

    def recognises(self, value: object) -> bool:
        return True

    def find(self, value: object, place: Place, scan: StateScan) -> bool:
        return False

    def describe(self, value: object, place: Place, saving: DescribePass, role: TensorRole) -> object:
        """Return immutable values unchanged, copies of other values, and constants by name."""
        kind = type(value)
        if kind in IMMUTABLE:
            return value
        if kind is bytes or kind is bytearray:
            return _bytes(cast("bytes", value), place, saving)
        if kind in (set, frozenset):
            return kind([stored_key(item, place) for item in cast("set[object]", value)])
        named = constants.constant_name(value, place)
        if named is not None:
            return named
        objects.encode(value, place.name)  # accepts scalars of numpy, and slices; raises for all other values
        return value

    def restore(self, value: object, node: object, place: Place, loading: RestorePass) -> Replacement | None:
        return restore(value, node, place, loading)


def restore(
    value: object, node: object, place: Place, loading: RestorePass, *, holds_tensors: bool = False
) -> Replacement | None:
    """Plan to replace a value, or a container's content, by the stored one.

    holds_tensors  whether tensors inside of the stored value are created. If not, they are reported as unexpected
    """
    if node is MISSING:
        loading.add_difference("missing", place.name, describe_node(value), "nothing of that name")
        return None
    if refers_to_tensors(node) and not holds_tensors:
        return None
    new_values = NewValues(loading)
    new_values.request(node, place)
    return lambda: loading.fitting.fit(value, new_values.build(node, place.name))


def _bytes(value: bytes | bytearray, place: Place, saving: DescribePass) -> object:
    if len(value) <= BYTES_INLINE_MAX:
        return type(value)(value)
    # The bytes are copied: a view of a bytearray would prevent the user from resizing it.
    array = np.frombuffer(bytes(value), np.uint8)
    saving.sink.add(place, DTYPES["uint8"], array_memory(array))
    return TensorRef(place.name, "bytes" if type(value) is bytes else "bytearray")
