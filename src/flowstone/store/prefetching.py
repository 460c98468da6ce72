"""The interface of a store that can read files in advance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from flowstone.store.base import Store


class Prefetcher(Store, Protocol):
    """A store that reads files in advance. Closing it waits for running reads; the underlying store stays open."""

    def prefetch(self, lengths: Mapping[str, int]) -> None:
        """Start to read the first bytes of files, and return without waiting. `lengths`: path -> how many bytes. The
        files need not exist.

        From then on, `read` and `size` return the prefetched content, which may be outdated. So the caller must check
        the file's digest, and read from the underlying store if the content does not match.
        """


class PrefetchingStore(Protocol):
    """The methods of a store with `Capabilities.asks_ahead`."""

    def ahead(self) -> Prefetcher | None:
        """This store with methods to read in advance; None if that would not help."""
