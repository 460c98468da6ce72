"""Plain values: numbers, text, bytes, sets, constants of torch and numpy, scalars of numpy, slices."""

from __future__ import annotations

from typing import cast

import numpy as np

from flowstone.format import objects
from flowstone.format.objects import TensorRef
from flowstone.state import constants, tensors
from flowstone.state.constants import stored_key
from flowstone.state.kind import Kind
from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import Place
from flowstone.state.new_values import NewValues
from flowstone.state.nodes import kind_of, refers_to_tensors
from flowstone.state.records import MISSING
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role
from flowstone.table.dtype import DTYPES

BYTES_INLINE_MAX = 64 * 1024
"""Longer bytes are stored as a tensor: objects are read whole, as text, whenever a checkpoint is opened."""

IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, range})
"""Types of values that need no copy."""

TYPES = IMMUTABLE | {bytes, bytearray}
"""Types of values that contain no others, and that no other kind handles."""


class Plain(Kind):
    """A plain value. The last kind of the table: it refuses, by name, a value that no other kind recognises."""

    types = TYPES | {set, frozenset, slice}
    replaceable = True

    def recognises(self, value: object) -> bool:
        return True

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        return False

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> object:
        """Immutable values as they are, others copied, constants by name."""
        kind = type(value)
        if kind in IMMUTABLE:
            return value
        if kind is bytes or kind is bytearray:
            return _bytes(cast("bytes", value), place, saving)
        if kind in (set, frozenset):
            return kind([stored_key(item, place) for item in cast("set[object]", value)])
        named = constants.named(value, place)
        if named is not None:
            return named
        objects.encode(value, place.name)  # scalars of numpy, slices; refuses all other values
        return value

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
        return restore(value, node, place, loading)


def restore(
    value: object, node: object, place: Place, loading: Loading, *, holds_tensors: bool = False
) -> Replacement | None:
    """Plan to replace a value, or a container's content, by the stored one.

    holds_tensors  create its tensors anew. Else the state does not request them, which is reported with all others
    """
    if node is MISSING:
        loading.differ("missing", place.name, kind_of(value), "nothing of that name")
        return None
    if refers_to_tensors(node) and not holds_tensors:
        return None
    new_values = NewValues(loading)
    new_values.want(node, place)
    return lambda: loading.fitting.fit(value, new_values.build(node, place.name))


def _bytes(value: bytes | bytearray, place: Place, saving: Saving) -> object:
    if len(value) <= BYTES_INLINE_MAX:
        return type(value)(value)
    # A copy of a bytearray: an exported buffer would prevent the user from resizing it.
    array = np.frombuffer(bytes(value), np.uint8)
    saving.sink.add(place, DTYPES["uint8"], tensors.array_memory(array))
    return TensorRef(place.name, "bytes" if type(value) is bytes else "bytearray")
