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
├── RankError                another rank failed or did not answer: which one, in which phase
├── CancelledError           stopped before the end
├── FrameworkError           a framework is missing, or of an unknown interface (also an ImportError)
└── SaveFailedError          an earlier save failed in the background

Each message says what failed, on which object, what was expected and found, and what to do next.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

_LINE_LENGTH_MAX = 1000


class FlowstoneError(Exception):
    """The base class. `facts` are printed one per line under the message, in the order given.

    Lines of over a thousand characters are cut in the middle: names and values from files may have any length.
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

    def __reduce__(self) -> tuple[object, ...]:
        """As it is, whichever arguments its class takes: jobs hand errors from rank to rank."""
        return _copied, (type(self), self.args, self.__dict__)


def _copied(kind: type[FlowstoneError], args: tuple[object, ...], state: dict[str, object]) -> FlowstoneError:
    found = kind.__new__(kind, *args)
    found.__dict__.update(state)
    return found


def _shortened(line: str) -> str:
    half = _LINE_LENGTH_MAX // 2
    left_out = len(line) - 2 * half
    return line if left_out <= 0 else f"{line[:half]} [{left_out} characters more] {line[-half:]}"


class NoCheckpointError(FlowstoneError):
    """No committed checkpoint was found where one was requested."""


class NotAStoreError(FlowstoneError):
    """The path holds neither a store nor a checkpoint."""


class StepExistsError(FlowstoneError):
    """`save` was called with a step at or below the newest one; `rewind` sets newer steps aside."""


class LockedError(FlowstoneError):
    """Another job holds the store's writer lock."""


class ClosedError(FlowstoneError):
    """The Checkpointer was used after close, or in a forked child."""


class ArgumentError(FlowstoneError, ValueError):
    """A call got an argument that it does not accept; it did nothing."""


class NoTensorError(FlowstoneError, KeyError):
    """The checkpoint holds no tensor of the requested name."""

    def __str__(self) -> str:  # KeyError's own shows it in quotes
        return str(self.args[0])


class BusyError(FlowstoneError):
    """A call on a Checkpointer could only wait for itself: it was made inside of another call, or on its thread."""


class StateError(FlowstoneError):
    """The state cannot be saved or loaded as it is."""


class UnsupportedStateError(StateError):
    """An object in the state cannot be described; names its path and the remedy."""


class ProviderError(UnsupportedStateError):
    """A provider, or its registration, violates the contract; names provider and path."""


class CollisionError(StateError):
    """Two paths of the state make the same name."""


class ReplayError(StateError):
    """A step that was replayed from a journal is not bit for bit what it was; the state is of no step. As the
    failure of a save: one of several ranks could not log what replays the step.
    """


class MismatchError(StateError):
    """State and checkpoint differ, and no memory was changed.

    differences  all of them, one line each; the message shows the first fifty
    """

    def __init__(self, message: str, *, differences: tuple[str, ...] = (), **facts: object) -> None:
        self.differences = differences
        super().__init__(message, **facts)


class CoverageError(FlowstoneError):
    """No stored piece holds a requested region."""


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


class MemoryAgentError(StorageError):
    """The memory agent of this node ended, could not be started, or is not one for this process."""


class PeerError(StorageError):
    """Another node of the job does not answer, refuses this one, or is not one of this job."""


class FullError(StorageError):
    """No space is left: the facts say how many bytes are needed and how many are free."""


_LOST = frozenset({
    # The device cannot read it any more: the codes that several file systems give for that.
    errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EUCLEAN, errno.EREMOTEIO,
    # Something else is there, or nothing is.
    errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO,
})


def is_damage(error: BaseException) -> bool:
    """Whether `error` says that stored bytes are no longer what was written, on this rank or on another.

    Refusals by the system (descriptors, memory, permission, connection) say nothing about that; nor does a format
    that is too new for this reader.
    """
    if isinstance(error, RankError):
        return error.kind in ("DamagedError", "FormatError") or (error.kind == "StorageError" and error.errno in _LOST)
    if isinstance(error, StorageError):
        return error.errno in _LOST
    return isinstance(error, FormatError) and not isinstance(error, UnsupportedFormatError)


def is_absence(error: BaseException) -> bool:
    """Whether `error` says that a checkpoint does not exist, on this rank or on another."""
    return isinstance(error, NoCheckpointError) or (isinstance(error, RankError) and error.kind == "NoCheckpointError")


class StateChangedError(FlowstoneError):
    """Bytes of the state changed, or their memory went away, between `save` and capture, so that save was discarded.

    path, offset, length  the place in the files of that save that the bytes were meant for
    names                 of the tensors, once they are known
    gone                  whether their memory was no longer there: shared, resized or freed in place
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
    """A rank of the job failed, or did not answer in time. The same error on every rank.

    rank       the rank on which the failure began
    phase      what the ranks were agreeing on
    kind       the name of the error's class on that rank
    errno      the system's reason, or 0
    ahead      set if ranks were in different calls: the step that the furthest rank was to save; else None
    undecided  rank 0 was to decide and has not answered since: the call may have succeeded all the same
    """

    def __init__(
        self, message: str, *, rank: int, phase: str, kind: str = "RankError", errno: int = 0, undecided: bool = False,
        ahead: int | None = None, **facts: object,
    ) -> None:
        super().__init__(message, phase=phase, **({"kind": kind} if kind != "RankError" else {}), **facts)
        self.rank, self.phase, self.kind, self.errno = rank, phase, kind, errno
        self.undecided, self.ahead = undecided, ahead


class CancelledError(FlowstoneError):
    """The work was stopped before it ended."""


class FrameworkError(FlowstoneError, ImportError):
    """A framework that an adapter or a format needs is not installed, or is of a version whose interface is unknown."""


class SaveFailedError(FlowstoneError):
    """A save failed in the background; its cause is chained."""


def printable(text: str) -> str:
    """Text from a file, escaped so that a terminal only shows it; line breaks are kept."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text])


def escaped(text: str) -> str:
    """Foreign text as a part of one line: line breaks and control characters are escaped."""
    return printable(text).replace("\n", "\\n")
