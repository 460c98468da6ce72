"""The interface of a store that distributes a save over several paths (such as disks)."""

from __future__ import annotations

from typing import Protocol

from flowstone.config import PathShare


class MultiPath(Protocol):
    """The additional methods of a store that spreads the segments of a save over several paths, such as disks (a store
    with `Capabilities.spreads`).
    """

    def shares(self) -> tuple[PathShare, ...]:
        """For each path, the share of the next save's bytes that it gets. The name of a segment contains the number of
        its path, except on path number 0 (format/segment.py).
        """

    def sync_segments(self, directory: str) -> None:
        """Sync the names of segments that this process has created or removed on paths other than the first.
        `directory`: the directory of the unfinished checkpoint.

        raises  StorageError
        """
