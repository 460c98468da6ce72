"""What can go wrong, one class per cause that a caller can treat differently.

FlowstoneError
├── NoCheckpointError        nothing committed here, or not that step
├── NotAStoreError           the path is not a store, nor a checkpoint
├── StepExistsError          saving at or below the newest step
├── LockedError              another job writes into this store
├── ClosedError              the Checkpointer was closed
├── ArgumentError            an argument that a call does not take (also a ValueError)
├── NoTensorError            the checkpoint holds no tensor of that name (also a KeyError)
├── BusyError                a call inside of another call, or on a thread that it would wait for
├── StateError               the state itself
│   ├── UnsupportedStateError    an object that cannot be described
│   │   └── ProviderError            a provider that does not keep its contract
│   ├── CollisionError           two paths make one name
│   └── MismatchError            state and checkpoint differ (missing, unexpected, shape, dtype)
├── CoverageError            no stored piece holds what was asked for
├── FormatError              what is on disk cannot be read
│   ├── DamagedError             bytes differ from what was written
│   └── UnsupportedFormatError   written by a newer version, or needs an unknown feature
├── StorageError             the operating system refused: operation, errno, path, range
│   └── FullError                no space: bytes needed and free
├── StateChangedError        the state changed before it was captured, or its memory went away
├── BudgetError              a declared memory limit cannot hold what was asked for
├── RankError                another rank failed, or was not heard of: which one, in what
├── CancelledError           stopped before the end
└── SaveFailedError          an earlier save failed in the background

Each message says what failed, on which object, what was expected and found, and what to do next.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

_LINE_LENGTH_MAX = 1000


class FlowstoneError(Exception):
    """The root. `facts` are printed one per line under the message, in the order given.

    Lines of over a thousand characters are printed without their middle: names and what files hold may be any length.
    """

    def __init__(self, message: str, **facts: object) -> None:
        self.message = message
        self.facts: Mapping[str, object] = facts
        lines = [message]
        for key, value in facts.items():
            first, *rest = str(value).splitlines() or [""]
            lines.append(f"  {key.replace('_', ' '):<11} {first}")
            lines.extend(f"  {'':<11} {line}" for line in rest)
        super().__init__("\n".join(_shortened(line) for line in "\n".join(lines).split("\n")))


def _shortened(line: str) -> str:
    half = _LINE_LENGTH_MAX // 2
    left_out = len(line) - 2 * half
    return line if left_out <= 0 else f"{line[:half]} [{left_out} characters more] {line[-half:]}"


class NoCheckpointError(FlowstoneError):
    """Nothing committed was found where a checkpoint was asked for."""


class NotAStoreError(FlowstoneError):
    """The path holds neither a store nor a checkpoint."""


class StepExistsError(FlowstoneError):
    """A step at or below the newest one was to be saved; `rewind` sets newer steps aside."""


class LockedError(FlowstoneError):
    """Another job holds the store's writer lock."""


class ClosedError(FlowstoneError):
    """The Checkpointer was used after close, or in a forked child."""


class ArgumentError(FlowstoneError, ValueError):
    """A call was given what it does not take; nothing was done."""


class NoTensorError(FlowstoneError, KeyError):
    """A checkpoint holds no tensor of the name that was asked for."""

    def __str__(self) -> str:  # a KeyError would show it in quotes
        return str(self.args[0])


class BusyError(FlowstoneError):
    """A Checkpointer was called where the call could only wait for itself: inside of another one, or on its thread."""


class StateError(FlowstoneError):
    """The state that was handed over cannot be saved or loaded as it is."""


class UnsupportedStateError(StateError):
    """An object in the state cannot be described; names its path and the remedy."""


class ProviderError(UnsupportedStateError):
    """A provider, or its registration, does not keep the contract; names provider and path."""


class CollisionError(StateError):
    """Two paths of the state make one name."""


class MismatchError(StateError):
    """State and checkpoint differ, and no memory was changed.

    differences  every one of them, one line each; the message spells out the first fifty
    """

    def __init__(self, message: str, *, differences: tuple[str, ...] = (), **facts: object) -> None:
        self.differences = differences
        super().__init__(message, **facts)


class CoverageError(FlowstoneError):
    """No stored piece holds a region that was asked for."""


class FormatError(FlowstoneError):
    """What is on disk cannot be read as a checkpoint."""


class DamagedError(FormatError):
    """Bytes differ from what was written.

    written  names of the tensors whose memory this load has changed, wholly or in part;
             empty when the damage was found before any memory was touched
    """

    def __init__(self, message: str, *, written: tuple[str, ...] = (), **facts: object) -> None:
        self.written = written
        super().__init__(message, **facts)


class UnsupportedFormatError(FormatError):
    """The checkpoint needs a newer reader, or a feature that this reader does not know."""


class StorageError(FlowstoneError):
    """The operating system refused an operation; `errno` is its reason."""

    def __init__(self, message: str, *, errno: int = 0, **facts: object) -> None:
        self.errno = errno
        super().__init__(message, **facts)


class FullError(StorageError):
    """No space is left: the facts say how many bytes are needed and how many are free."""


_LOST = frozenset({
    # The medium does not give it back any more, in the words of several file systems.
    errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EUCLEAN, errno.EREMOTEIO,
    # Something else is there, or nothing.
    errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO,
})


def is_damage(error: BaseException) -> bool:
    """Whether it says that what was stored is not there any more as it was written, here or on another rank.

    What the system refuses for want of descriptors, memory, permission, or a connection says nothing about that; nor
    does a format that is too new for this reader.
    """
    if isinstance(error, RankError):
        return error.kind in ("DamagedError", "FormatError") or (error.kind == "StorageError" and error.errno in _LOST)
    if isinstance(error, StorageError):
        return error.errno in _LOST
    return isinstance(error, FormatError) and not isinstance(error, UnsupportedFormatError)


def is_absence(error: BaseException) -> bool:
    """Whether it says that a checkpoint is not there, here or on another rank."""
    return isinstance(error, NoCheckpointError) or (isinstance(error, RankError) and error.kind == "NoCheckpointError")


class StateChangedError(FlowstoneError):
    """Bytes of the state changed between `save` and their capture, or went away, so that save holds nothing.

    path, offset, length  where in the files of that save they would have been
    names                 of the tensors, once they are known
    gone                  whether their memory was not there any more: shared, resized or freed in place
    """

    def __init__(
        self, message: str, *, path: str, offset: int, length: int, names: tuple[str, ...] = (), gone: bool = False,
        **facts: object,
    ) -> None:
        super().__init__(message, **facts)
        self.path, self.offset, self.length, self.names, self.gone = path, offset, length, names, gone


class BudgetError(FlowstoneError):
    """A declared memory limit cannot hold what was asked for."""


class RankError(FlowstoneError):
    """A rank of the job failed, or was not heard of in time. The same error on every rank.

    rank       the one that it began on
    phase      what the ranks were agreeing on
    kind       the name of the error's class there
    errno      the system's reason, or 0
    ahead      ranks were in different calls: the step that the foremost were to save; else None
    undecided  rank 0 was to decide, and was not heard of since: it may have happened all the same
    """

    def __init__(
        self, message: str, *, rank: int, phase: str, kind: str = "RankError", errno: int = 0, undecided: bool = False,
        ahead: int | None = None, **facts: object,
    ) -> None:
        super().__init__(message, phase=phase, **({"kind": kind} if kind != "RankError" else {}), **facts)
        self.rank, self.phase, self.kind, self.errno = rank, phase, kind, errno
        self.undecided, self.ahead = undecided, ahead


class CancelledError(FlowstoneError):
    """The work was stopped before its end."""


class SaveFailedError(FlowstoneError):
    """A save failed in the background; the cause is chained."""
