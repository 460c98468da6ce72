"""The interface of a store in which files can be read before they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from flowstone.store.base import Store


class Ahead(Store, Protocol):
    """A store in which files are read before they are asked for. Closing it waits for that, and leaves the store open.
    """

    def ask(self, lengths: Mapping[str, int]) -> None:
        """Begin to read that many first bytes of each of these files, which need not exist. Does not wait.

        `read` and `size` then tell what they were at that time: for those whose reader has a digest of them, and looks
        into the store itself if they are not what it says.
        """


class AsksAhead(Protocol):
    """What a store with `Capabilities.asks_ahead` has besides."""

    def ahead(self) -> Ahead | None:
        """The same store, in which files can be asked for ahead; None: nothing is gained by it."""
