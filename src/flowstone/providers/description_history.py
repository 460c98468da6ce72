"""Remembers how providers described objects before, because some properties must not change while an object lives."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from flowstone.providers.provider import AnyPart
from flowstone.state.framework import FRAMEWORK


class DescriptionHistory:
    """The last description of each object with a provider, kept while the object lives.

    Objects that cannot have weak references are left out. So are tensors: `torch.utils.swap_tensors`, which exchanges
    the contents of tensors, refuses tensors with weak references.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[object], dict[str, AnyPart]]] = {}

    def last_parts(self, value: object) -> Mapping[str, AnyPart]:
        """The parts in the last description of `value`, by name; empty the first time."""
        watched, parts = self._by_id.get(id(value), (None, {}))
        return parts if watched is not None and watched() is value else {}

    def record(self, value: object, parts: Mapping[str, AnyPart]) -> None:
        if FRAMEWORK.is_tensor(value):
            return
        by_id, key = self._by_id, id(value)
        try:
            watched = weakref.ref(value, lambda _: by_id.pop(key, None))
        except TypeError:
            return
        by_id[key] = watched, {**self.last_parts(value), **parts}
