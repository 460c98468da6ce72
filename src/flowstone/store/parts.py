"""The interface of a store that can be one path of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO, Protocol

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.store.base import FilePlan

if TYPE_CHECKING:
    from flowstone import _native


class Moving(msgspec.Struct, frozen=True):
    """What a path refuses may be written elsewhere. So it has to come back until the segments are complete: from files
    that are there, or from memory.

    one_in     of so many bytes of the arena one may be held for that, and `held_bytes` at most
    directory  where a temporary file has the rest
    """

    one_in: int
    held_bytes: int
    directory: str


class OpenSegments(Protocol):
    """Segments that were created for a job of another store's (see Parts), which owns their descriptors, or numbers.

    engine   whose queue moves their bytes
    natives  in the order of the files; `of_path`, and whether they may move, as asked for
    """

    engine: _native.Engine
    natives: Sequence[_native.File]

    def begin(self, job: _native.WriteJob, numbers: Sequence[int]) -> None:
        """The job has begun, in which the files have these numbers."""

    def reserve(self) -> None:
        """Give them their full size, before any byte is written. Raises StorageError."""

    def error(self) -> FlowstoneError | None:
        """Why a request of theirs has failed, if the job does not know, and nothing of it may move."""

    def refusal(self, at: int) -> FlowstoneError | None:
        """Why the segment at that position is not there, if the job does not know, and it may move. Any thread."""

    def end(self, job: _native.WriteJob, ends: Sequence[int]) -> FlowstoneError | None:
        """Make them durable, once the job has ended without a fault; or why they are not, but for those with a refusal.
        `ends`: their sizes. Blocks.
        """

    def open_written(self, at: int) -> BinaryIO:
        """What was written of a segment that has moved, or has a refusal, each byte at its place. Raises OSError."""

    def close(self) -> None:
        """Let go of them, whatever became of them. Once the job has ended."""


class OpenExtents(Protocol):
    """Files that were opened for a read of another store's (see Parts).

    engine   whose queue moves their bytes
    natives  in the order of the paths that were asked for
    """

    engine: _native.Engine
    natives: Sequence[_native.File]

    def begin(self, job: _native.ReadJob) -> None:
        """The job has begun."""

    def error(self) -> FlowstoneError | None:
        """Why a request of theirs has failed, if the job does not know."""

    def close(self) -> None:
        """Let go of them. Once the job has ended."""


class Parts(Protocol):
    """What a store with `Capabilities.parts` has besides: it can be a path of a striped one."""

    def open_segments(
        self, files: Sequence[FilePlan], arena: _native.Arena, *, of_path: int, moving: Moving | None
    ) -> OpenSegments:
        """Create segments, without their size. `moving`: None if they stay there, whatever becomes of them.

        raises  StorageError, and then none of them is left
        """

    def open_extents(
        self, paths: Sequence[str], arena: _native.Arena, *, of_path: int, wanted_bytes: int, past_cache: bool
    ) -> OpenExtents:
        """Open files to read extents of them. Raises StorageError."""
