"""The interface of a store in which a file can grow after it was created."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class AppendFile(Protocol):
    """A file that grows. For one thread at a time."""

    @property
    def bytes(self) -> int:
        """The number of bytes appended so far."""

    def append(
        self, parts: Sequence[memoryview], *, ahead_bytes: int, confirm: Callable[[], None] = lambda: None
    ) -> None:
        """Write the parts at the end of the file, one after the other. The address and length of each part are
        multiples of 4096. Blocks.

        ahead_bytes  space to reserve after the parts, in bytes, if the file has to grow
        confirm      called once all parts but the first are written. If it raises an error, the first part is not
                     written, and no byte counts as appended
        """

    def sync(self) -> None:
        """Make all bytes so far durable. The file's name becomes durable only when its directory is synced."""

    def still_has_name(self) -> bool:
        """Whether the file still has its name. Readers would not find bytes appended to a removed file."""

    def close(self) -> None: ...


class AppendableStore(Protocol):
    """The methods of a store with `Capabilities.appends`."""

    def append_to_new(self, path: str) -> AppendFile:
        """Create a file that can grow. Raises StorageError with EEXIST if it exists."""

    def read_into(self, path: str, offset_bytes: int, target: memoryview) -> int:
        """Read from a file into `target`. Offset, address and length are multiples of 4096. Returns the number of bytes
        read, which is smaller than the length of `target` if the file ends.
        """
