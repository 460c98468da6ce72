"""Events about the progress of saves and loads, with measurements; one class for each phase.

A Checkpointer passes each event to its `on_event`, on the thread where the event happened. Times are in seconds, sizes
in bytes. An exception from `on_event` is logged and otherwise ignored, so that it cannot break a save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING


@dataclass(frozen=True, slots=True)
class SaveStarted:
    """The tensors of the state are listed, and it is planned which rank writes which of them; the capture begins."""

    step: int
    tensors: int
    bytes: int
    plan_cached: bool
    described_s: float
    planned_s: float
    waited_s: float  # wait until an earlier save was durable, because too many saves were unfinished


@dataclass(frozen=True, slots=True)
class Captured:
    """Everything is captured: the state may change. (If an optimizer step began before the ranks had agreed on a plan,
    it copied the tensors, and could change the state before this event.)

    blocked_s      how long `save` blocked the caller, in total
    captured_s     time since `save` was called
    early_bytes    bytes captured before `save` returned; all others were captured later
    exact_bytes    how many of the later bytes were watched exactly: any change before the capture would have been
                   detected; on the host, even a write of equal bytes (docs/SAVING.md)
    sampled_bytes  how many of the later bytes were only compared by samples
    huge_bytes     how many of the exactly watched bytes are in huge pages of the host, where watching is almost free;
                   may be slightly too low
    """

    step: int
    blocked_s: float
    captured_s: float
    early_bytes: int
    exact_bytes: int
    sampled_bytes: int
    huge_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fenced:
    """An optimizer step, or a call of `fence`, waited for the capture to end.

    step  the step number of the newest save that was waited for
    """

    step: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Written:
    """All segment files of this rank are durable, but the checkpoint is not committed yet.

    copied_bytes  bytes that were copied into staging memory before they were written
    """

    step: int
    copied_bytes: int
    seconds: float  # since `save` was called


@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint exists and is durable."""

    step: int
    bytes: int  # length of all files of the checkpoint
    seconds: float  # since `save` was called

    def __str__(self) -> str:
        return f"committed step {self.step}: {self.bytes:,} bytes in {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """This save produced no checkpoint; earlier checkpoints are untouched."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A load has read `done_bytes` of `total_bytes` from files."""

    step: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The load is complete: the state has the checkpoint's values."""

    step: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"loaded step {self.step}: {self.bytes:,} bytes in {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Removed:
    """Retention, or the removal of leftovers of dead jobs, has removed a directory."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RemovalFailed:
    """Retention, or the removal of leftovers of dead jobs, could not remove a directory. It is tried again later."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """Retention, or the removal of leftovers of dead jobs, has kept an entry of the directory that this store did not
    write: a link, a step of another store, a file of the user.

    A Checkpointer reports each entry once.
    """

    name: str
    reason: str


if TYPE_CHECKING:
    from flowstone.events.rare_events import BuffersFromOneRank, Compressed, FellBack, PagesCollapsed, Prepared
    from flowstone.journal.journal_events import JournalEvent
    from flowstone.replica.replica_events import ReplicaEvent
    from flowstone.tiered.tier_events import TierEvent
else:
    # Imported at first use: few Checkpointers emit them.
    BuffersFromOneRank = Compressed = FellBack = PagesCollapsed = Prepared = LeftAlone
    JournalEvent = ReplicaEvent = TierEvent = LeftAlone

Event = (
    Prepared | SaveStarted | Captured | PagesCollapsed | Fenced | Written | Compressed | BuffersFromOneRank | Committed
    | SaveFailed | LoadProgress | Loaded | FellBack | Removed | RemovalFailed | LeftAlone | JournalEvent | ReplicaEvent
    | TierEvent
)
OnEvent = Callable[[Event], None]
