"""The interface of a store that can be one path of a striped store.

A *segment* is a data file of a checkpoint. A *job* is one write or read that the native engine carries out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO, Protocol

import msgspec

from flowstone.errors import FlowstoneError
from flowstone.store.base import FilePlan

if TYPE_CHECKING:
    from flowstone._native import Arena, Engine, File, ReadJob, WriteJob


class FailoverLimits(msgspec.Struct, frozen=True):
    """How many of the bytes that were written to a path may be kept. If the path fails, the kept bytes are written to
    another path.

    Until a segment is complete, its bytes must be readable again: from its file, or from memory.

    one_in      1/one_in of the arena (staging memory) may be used to keep such bytes in memory
    held_bytes  the maximum number of bytes to keep in memory
    directory   directory of a temporary file for further bytes
    """

    one_in: int
    held_bytes: int
    directory: str


class OpenSegments(Protocol):
    """Segments that this store has created, and that a job of the striped store writes. Owns their descriptors.

    engine   the engine whose queue moves their bytes
    natives  for each segment the `File` object that a job of the engine writes, in the requested order, with `of_path`
             and `may_move` as requested
    """

    engine: Engine
    natives: Sequence[File]

    def begin(self, job: WriteJob, numbers: Sequence[int]) -> None:
        """Called once the job has begun. `numbers`: for each of `natives`, its number among the files of the job."""

    def reserve(self) -> None:
        """Reserve the space of the segments, before any byte is written. Raises StorageError."""

    def error(self) -> FlowstoneError | None:
        """Why a request failed, if the job does not know the reason and the segment must not move to another path; else
        None.
        """

    def refusal(self, index: int) -> FlowstoneError | None:
        """Why a segment failed, if the job does not know the reason and the segment may move to another path; else
        None. Can be called on any thread.
        """

    def end(self, job: WriteJob, ends: Sequence[int]) -> FlowstoneError | None:
        """Make the segments durable, once the job has ended without a fault. Returns the error, if there is one.
        Segments with a `refusal` are left out. `ends`: the sizes of the segments. Blocks.
        """

    def open_written(self, index: int) -> BinaryIO:
        """Open the bytes that were written of a segment that has moved or has a `refusal`. They are at their offsets in
        the segment. Raises OSError.
        """

    def close(self) -> None:
        """Release the segments, in any state. Called once the job has ended."""


class OpenExtents(Protocol):
    """Files that this store has opened, and that a job of the striped store reads.

    engine   the engine whose queue moves their bytes
    natives  for each file the `File` object that a job of the engine reads, in the order of the requested paths
    """

    engine: Engine
    natives: Sequence[File]

    def begin(self, job: ReadJob) -> None:
        """Called once the job has begun."""

    def error(self) -> FlowstoneError | None:
        """Why a request failed, if the job does not know the reason; else None."""

    def close(self) -> None:
        """Release the files. Called once the job has ended."""


class StripeMember(Protocol):
    """The methods that a store must have to serve one path of a striped store. `Capabilities.parts` says that a store
    has them.
    """

    def open_segments(
        self, files: Sequence[FilePlan], arena: Arena, *, of_path: int, moving: FailoverLimits | None
    ) -> OpenSegments:
        """Create segments; their full size is set later.

        moving  limits on the written bytes that are kept, so that the segments can be written to another path if this
                one fails; None: the segments must stay on this path
        raises  StorageError  in that case none of the segments exists
        """

    def open_extents(
        self, paths: Sequence[str], arena: Arena, *, of_path: int, wanted_bytes: int, past_cache: bool
    ) -> OpenExtents:
        """Open files, so that a job of the striped store can read ranges of them. Raises StorageError."""
