"""The interface of a store that spreads a save over several paths."""

from __future__ import annotations

from typing import Protocol

from flowstone.config import Share


class Spreads(Protocol):
    """What a store with `Capabilities.spreads` has besides."""

    def shares(self) -> tuple[Share, ...]:
        """What part of the next save's bytes each path is to get; segments of a path other than 0 say so in their names
        (format/segment.py).
        """

    def sync_segments(self, directory: str) -> None:
        """Make durable which segments further paths have for a draft, as far as this process has made or removed them.

        raises  StorageError
        """
