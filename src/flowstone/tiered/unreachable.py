"""A stand-in for a store that this process cannot use. Each of its methods raises an error with the reason."""

from __future__ import annotations

from typing import NoReturn, cast

from flowstone.errors import FlowstoneError, StorageError
from flowstone.store.base import PROTOCOLS, Store, members


class _Unreachable:
    def __init__(self, store: Store, reason: FlowstoneError) -> None:
        self.location, self.capabilities = store.location, store.capabilities
        self._reason = reason

    def refuse(self, *_: object, **__: object) -> NoReturn:
        raise StorageError(
            f"{self.location} does not answer: {self._reason.message}",
            next="repair that store; the next Checkpointer tries to use it again",
        ) from self._reason

    def close(self) -> None:
        """Do nothing: no file is open."""


for _name in {name for protocol in PROTOCOLS for name in members(protocol)} - {"close", "location", "capabilities"}:
    setattr(_Unreachable, _name, _Unreachable.refuse)


def unreachable(store: Store, reason: FlowstoneError) -> Store:
    """A stand-in for `store`, which cannot be used: each method raises StorageError with `reason`."""
    return cast("Store", _Unreachable(store, reason))
