"""The interface of a store in which a file can grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Appending(Protocol):
    """A file that grows. One thread at a time."""

    @property
    def bytes(self) -> int:
        """How many have been appended."""

    def append(
        self, parts: Sequence[memoryview], *, ahead_bytes: int, confirm: Callable[[], None] = lambda: None
    ) -> None:
        """Write the parts at the end, one behind the other; address and length of each are multiples of 4096. Blocks.

        ahead_bytes  of space to have reserved behind them when the file has to grow
        confirm      called when all but the first part are written; if it raises, the first one is not, and nothing
                     counts as appended
        """

    def sync(self) -> None:
        """Make all bytes so far durable; the file's name is once its directory is synced."""

    def is_in_place(self) -> bool:
        """Whether the file still has its name: readers would not find what is appended to one that was removed."""

    def close(self) -> None: ...


class Appends(Protocol):
    """What a store with `Capabilities.appends` has besides."""

    def append_to_new(self, path: str) -> Appending:
        """Create a file that grows. Raises StorageError, EEXIST where there is one."""

    def read_into(self, path: str, offset_bytes: int, target: memoryview) -> int:
        """Read into memory whose address and length are multiples of 4096, as is the offset. Returns how many bytes the
        file had there.
        """
