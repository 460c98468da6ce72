"""Deques: described item by item, and created anew at load."""

from __future__ import annotations

import collections
from typing import cast

from flowstone.state.kind import Kind
from flowstone.state.kinds import plain
from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import Place
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role


class Deque(Kind):
    """A deque of values, which may be tensors; none of them is written in place."""

    types = frozenset({collections.deque})
    nests = True
    replaceable = True

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        return False

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> object:
        line = cast("collections.deque[object]", value)
        with saving.inside("refused"):
            items = [saving.walk(item, place.child(i)) for i, item in enumerate(line)]
        return collections.deque(items, line.maxlen)

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
        return plain.restore(value, node, place, loading, holds_tensors=True)
