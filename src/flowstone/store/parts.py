"""The interface of a store that can be one path of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from flowstone.errors import FlowstoneError
from flowstone.store.base import FilePlan

if TYPE_CHECKING:
    from flowstone import _native


class OpenSegments(Protocol):
    """Segments that were created for a job of another store's (see Parts), which owns their descriptors, or numbers.

    engine   whose queue moves their bytes
    natives  in the order of the files; `of_path` and `may_move` as they were asked for
    """

    engine: _native.Engine
    natives: Sequence[_native.File]

    def begin(self, job: _native.WriteJob, numbers: Sequence[int]) -> None:
        """The job has begun, in which the files have these numbers."""

    def reserve(self) -> None:
        """Give them their full size, before any byte is written. Raises StorageError."""

    def error(self) -> FlowstoneError | None:
        """Why a request of theirs has failed, if the job does not know."""

    def end(self, job: _native.WriteJob, ends: Sequence[int]) -> FlowstoneError | None:
        """Make them durable, once the job has ended without a fault; or why they are not. `ends`: their sizes. Blocks.
        """

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
        self, files: Sequence[FilePlan], arena: _native.Arena, *, of_path: int, may_move: bool
    ) -> OpenSegments:
        """Create segments, without their size. Raises StorageError, and then none of them is left."""

    def open_extents(
        self, paths: Sequence[str], arena: _native.Arena, *, of_path: int, wanted_bytes: int, past_cache: bool
    ) -> OpenExtents:
        """Open files to read extents of them. Raises StorageError."""
