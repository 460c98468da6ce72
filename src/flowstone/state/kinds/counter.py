"""collections.Counter: a dictionary of numbers, with a type of its own."""

from __future__ import annotations

import collections
from typing import cast

from flowstone.state.constants import stored_key
from flowstone.state.kind import Kind
from flowstone.state.kinds import plain
from flowstone.state.loading import Loading, Replacement
from flowstone.state.names import Place
from flowstone.state.saving import Saving
from flowstone.state.scan import Scan
from flowstone.state.sink import Role


class Counter(Kind):
    """Counts, by key."""

    types = frozenset({collections.Counter})
    nests = True
    replaceable = True

    def find(self, value: object, place: Place, scan: Scan) -> bool:
        return False

    def describe(self, value: object, place: Place, saving: Saving, role: Role) -> object:
        built: collections.Counter[object] = collections.Counter()
        with saving.inside("refused"):
            for key, count in cast("collections.Counter[object]", value).items():
                built[stored_key(key, place)] = cast("int", saving.walk(count, place.child(key)))
        return built

    def restore(self, value: object, node: object, place: Place, loading: Loading) -> Replacement | None:
        return plain.restore(value, node, place, loading)
