"""The errors of Flowstone, one class per cause that a caller can treat differently.

FlowstoneError
├── NoCheckpointError        no committed checkpoint, or none of the requested step
├── NotAStoreError           the path is neither a store nor a checkpoint
├── StepExistsError          saving at or below the newest step
├── LockedError              another job writes into this store
├── ClosedError              the Checkpointer was closed
├── ArgumentError            a call does not accept an argument (also a ValueError)
├── NoTensorError            the checkpoint has no tensor of that name (also a KeyError)
├── BusyError                a call inside another, or on one of Flowstone's own threads: it would wait for itself
├── StateError               the state cannot be saved or loaded as it is
│   ├── UnsupportedStateError    an object that cannot be described
│   │   └── ProviderError            a provider that violates its contract
│   ├── CollisionError           two tensors or values of the state would get the same name
│   ├── MismatchError            state and checkpoint differ (missing, unexpected, shape, dtype)
│   └── ReplayError              a step replayed from a journal is not bit-identical to the original
├── CoverageError            a requested part of a tensor is not stored
├── FormatError              stored files cannot be read
│   ├── DamagedError             stored bytes do not match their digests
│   └── UnsupportedFormatError   written by a newer version, or needs an unknown feature
├── StorageError             the operating system refused: operation, errno, path, range
│   ├── FullError                no space: bytes needed and free
│   ├── MemoryAgentError         the memory agent of this node ended, or cannot serve this process
│   └── PeerError                another node of the job does not answer, or refuses this node
├── StateChangedError        the state changed, or its memory was freed, before it was captured
├── BudgetError              a memory limit is too small for the call
├── RankError                another rank failed or did not answer: which one, in which phase
├── CancelledError           the work was stopped before it ended
├── FrameworkError           a framework or option is missing, or has an unknown interface (also an ImportError)
└── SaveFailedError          an earlier save failed in the background

Each message says what failed, on which object, the expected and found values, and what to do next.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

_LINE_LENGTH_MAX = 1000


class FlowstoneError(Exception):
    """The base class of all errors of Flowstone. `facts` are printed one per line under the message, in the given
    order. In lines of more than a thousand characters the middle is left out, as names from files may have any length.
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
        """Let an error of any class be pickled with all its attributes, as jobs send errors from rank to rank."""
        return _copied, (type(self), self.args, self.__dict__)


def _copied(kind: type[FlowstoneError], args: tuple[object, ...], state: dict[str, object]) -> FlowstoneError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def _shortened(line: str) -> str:
    half = _LINE_LENGTH_MAX // 2
    left_out = len(line) - 2 * half
    return line if left_out <= 0 else f"{line[:half]} [{left_out} characters more] {line[-half:]}"


class NoCheckpointError(FlowstoneError):
    """No committed checkpoint was found where one was requested."""


class NotAStoreError(FlowstoneError):
    """The path is neither a store nor a checkpoint."""


class StepExistsError(FlowstoneError):
    """`save` was called with a step at or below the newest one; `rewind` sets newer steps aside."""


class LockedError(FlowstoneError):
    """Another job holds the store's writer lock."""


class ClosedError(FlowstoneError):
    """The Checkpointer was used after close, or in a forked child."""


class ArgumentError(FlowstoneError, ValueError):
    """A call got an argument that it does not accept. Nothing was changed."""


class NoTensorError(FlowstoneError, KeyError):
    """The checkpoint has no tensor of the requested name."""

    def __str__(self) -> str:  # KeyError would show the message in quotes
        return str(self.args[0])


class BusyError(FlowstoneError):
    """A call was made from inside another call of the same Checkpointer, or on one of Flowstone's own threads (for
    example, in a callback of a Future). The call would wait for itself.
    """


class StateError(FlowstoneError):
    """The state cannot be saved or loaded as it is."""


class UnsupportedStateError(StateError):
    """An object in the state cannot be saved; the message names its path and the remedy."""


class ProviderError(UnsupportedStateError):
    """A provider, or its registration, violates the contract; the message names provider and path."""


class CollisionError(StateError):
    """Two tensors or values of the state would be stored under the same name."""


class ReplayError(StateError):
    """A step replayed from a journal is not bit-identical to the original; the state now belongs to no step. If a save
    fails with this error, one of several ranks could not log the step.
    """


class MismatchError(StateError):
    """State and checkpoint differ, and no memory was changed.

    differences  all differences, one line each; the message shows the first fifty
    """

    def __init__(self, message: str, *, differences: tuple[str, ...] = (), **facts: object) -> None:
        self.differences = differences
        super().__init__(message, **facts)


class CoverageError(FlowstoneError):
    """A requested part of a tensor is not stored in the checkpoint."""


class FormatError(FlowstoneError):
    """The stored files cannot be read as a checkpoint."""


class DamagedError(FormatError):
    """Stored bytes do not match their digests, or contradict each other.

    written  names of the tensors whose memory this load has changed, fully or in part; empty if the damage was found
             before any memory was changed
    """

    def __init__(self, message: str, *, written: tuple[str, ...] = (), **facts: object) -> None:
        self.written = written
        super().__init__(message, **facts)


class UnsupportedFormatError(FormatError):
    """The checkpoint needs a newer reader, or a feature that this reader does not know."""


class StorageError(FlowstoneError):
    """The operating system refused an operation; `errno` says why."""

    def __init__(self, message: str, *, errno: int = 0, **facts: object) -> None:
        self.errno = errno
        super().__init__(message, **facts)


class MemoryAgentError(StorageError):
    """The memory agent of this node ended, could not be started, or cannot serve this process."""


class PeerError(StorageError):
    """Another node of the job does not answer, refuses this node, or belongs to another job."""


class FullError(StorageError):
    """No space is left: the facts say how many bytes are needed and how many are free."""


_LOST = frozenset({
    # The device can no longer read the bytes. File systems report that by different error numbers.
    errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EUCLEAN, errno.EREMOTEIO,
    # The file is missing, or something else has its name.
    errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO,
})


def is_damage(error: BaseException) -> bool:
    """Whether `error` means that stored bytes were lost or changed, on this rank or on another.

    False for refusals by the system (descriptors, memory, permission, connection), and for a format that is too new for
    this reader.
    """
    if isinstance(error, RankError):
        return error.kind in ("DamagedError", "FormatError") or (error.kind == "StorageError" and error.errno in _LOST)
    if isinstance(error, StorageError):
        return error.errno in _LOST
    return isinstance(error, FormatError) and not isinstance(error, UnsupportedFormatError)


def is_absence(error: BaseException) -> bool:
    """Whether `error` means that a checkpoint does not exist, on this rank or on another."""
    return isinstance(error, NoCheckpointError) or (isinstance(error, RankError) and error.kind == "NoCheckpointError")


class StateChangedError(FlowstoneError):
    """Bytes of the state changed, or their memory was freed, between `save` and capture; the save was discarded.

    path, offset, length  where the bytes would have been stored: a file of that save, and a range in bytes
    names                 names of the changed tensors, once they are known
    gone                  whether the tensors' memory no longer exists: the storage was shared, resized or freed
    """

    def __init__(
        self, message: str, *, path: str, offset: int, length: int, names: tuple[str, ...] = (), gone: bool = False,
        **facts: object,
    ) -> None:
        super().__init__(message, **facts)
        self.path, self.offset, self.length, self.names, self.gone = path, offset, length, names, gone


class BudgetError(FlowstoneError):
    """A memory limit is too small for the call."""


class RankError(FlowstoneError):
    """A rank of the job failed, or did not answer in time. Every rank raises the same error.

    rank       the rank on which the failure began
    phase      what the ranks wanted to agree on, or were doing, when it failed
    kind       the name of the error's class on that rank
    errno      error number of the system call that failed, or 0
    ahead      if ranks were in different calls: the step that the rank furthest ahead was saving; otherwise None
    undecided  whether rank 0 had to decide and did not answer: the call may have succeeded
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
    """A framework, or an option of Flowstone, that a call needs is not installed, or has an unknown interface."""


class SaveFailedError(FlowstoneError):
    """A save failed in the background; its cause is chained."""


def printable(text: str) -> str:
    """Text from a file, with control characters escaped for a terminal; line breaks are kept."""
    if text.isprintable():
        return text
    return "".join([char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text])


def escaped(text: str) -> str:
    """Foreign text for use inside of one line: line breaks and control characters are escaped."""
    return printable(text).replace("\n", "\\n")
