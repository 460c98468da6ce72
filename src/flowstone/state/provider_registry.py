"""The registered providers (which save and load objects of a user's type), by type and by kind. The kind is the name of
these objects in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from flowstone.state.names import type_name

if TYPE_CHECKING:
    from flowstone.providers.description_history import DescriptionHistory
    from flowstone.providers.provider import Provider


class ProviderEntry(msgspec.Struct, frozen=True, eq=False):
    """A provider, the type for which it is registered, and the name of its objects in checkpoints."""

    own: type
    provider: Provider[object]
    kind: str
    history: DescriptionHistory

    @property
    def title(self) -> str:
        return type_name(type(self.provider))

    def refusal(self, stored: Mapping[str, object]) -> str | None:
        """The reason why `create` cannot make an object from stored ones; None if no reason is known."""
        return self.provider._refusal(stored)


class ProviderRegistry:
    """The registered providers by type. There is one registry for the process, as types belong to the process."""

    def __init__(self) -> None:
        self._by_type: dict[type, ProviderEntry] = {}
        self._by_kind: dict[str, ProviderEntry] = {}

    def add(self, entry: ProviderEntry) -> None:
        self._by_type[entry.own] = self._by_kind[entry.kind] = entry

    def registered(self, own: type, kind: str) -> ProviderEntry | None:
        """The provider that is registered for this very type, or under that kind."""
        return self._by_type.get(own) or self._by_kind.get(kind)

    def remove(self, entry: ProviderEntry) -> None:
        if self._by_type.get(entry.own) is entry:
            del self._by_type[entry.own], self._by_kind[entry.kind]

    def find_for_type(self, own: type) -> ProviderEntry | None:
        """The registered provider of the most derived base class of `own` that has one."""
        if self._by_type:
            for base in own.__mro__:
                if base in self._by_type:
                    return self._by_type[base]
        return None

    def find_for_kind(self, kind: str) -> ProviderEntry | None:
        """The registered provider whose objects are called `kind` in checkpoints."""
        return self._by_kind.get(kind)


PROVIDERS = ProviderRegistry()
