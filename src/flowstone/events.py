"""Typed records of progress and measurements, one kind for each phase.

A Checkpointer passes each to its `on_event`, on the thread where it happened. Times are in seconds,
sizes in bytes. An exception from `on_event` is logged and otherwise ignored, so that an observer
cannot break a save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING


@dataclass(frozen=True, slots=True)
class Prepared:
    """Staging memory is ready: by `Checkpointer.prepare`; or by the first save of a state on a GPU, after its commit.

    bytes             touched, so that the system has given it
    pinned_bytes      of those: a GPU copies from and to them directly. 0 without one
    unpinned_reason   why the others are not pinned, although a GPU is in use; "" if nothing was refused
    numa_node         memory was asked for on that node, the GPU's; -1: wherever the system puts it
    numa_node_reason  why so; "" if it was asked for
    seconds           that `prepare` took; 0.0 if a save did it
    """

    bytes: int
    pinned_bytes: int
    unpinned_reason: str
    numa_node: int
    numa_node_reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveStarted:
    """The state has been described and planned; capture begins."""

    step: int
    tensors: int
    bytes: int
    plan_cached: bool
    described_s: float
    planned_s: float
    waited_s: float  # for an earlier save to become durable, as too many were in flight


@dataclass(frozen=True, slots=True)
class Captured:
    """The state may change from now on. (Or earlier, if a step copied pieces of a save that had no plan yet.)

    blocked_s      how long `save` blocked the caller, in total
    captured_s     since `save` was called
    early_bytes    captured before `save` returned; the rest was captured later
    exact_bytes    of the later bytes: a change of any of them that was captured would have been detected; on the host
                   any write, also of the same bytes (docs/SAVING.md)
    sampled_bytes  of the later bytes: only samples were compared
    huge_bytes     of the exact bytes: in huge pages of the host, where watching costs next to nothing; or a few less
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

    step  the step of the newest save that it waited for
    """

    step: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Written:
    """All segments are durable, but not yet committed.

    copied_bytes  written, through the arena
    """

    step: int
    copied_bytes: int
    seconds: float  # since `save` was called


@dataclass(frozen=True, slots=True)
class BuffersFromOneRank:
    """Several ranks hold module buffers (BatchNorm statistics) whose values may differ: the lowest rank's are saved.

    tensors  the number of such buffers in the whole job
    """

    step: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint exists and is durable."""

    step: int
    bytes: int  # of all files
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
    """Bytes read from files so far, of `total_bytes`."""

    step: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The load is complete: the state holds the checkpoint."""

    step: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"loaded step {self.step}: {self.bytes:,} bytes in {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class FellBack:
    """A damaged checkpoint was skipped for an older one, as `fallback` allows."""

    damaged_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Removed:
    """Retention or a sweep removed a directory."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RemovalFailed:
    """Retention or a sweep could not remove a directory; it tries again later."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """Retention or a sweep kept what this store did not write: a link, another store's step, a user's file.

    A Checkpointer reports each once.
    """

    name: str
    reason: str


if TYPE_CHECKING:
    from flowstone.journal_events import JournalEvent
    from flowstone.save_events import Compressed, PagesCollapsed
    from flowstone.state_replica import ReplicaEvent
    from flowstone.tier_events import TierEvent
else:
    # Imported at first use: few emit any.
    Compressed = PagesCollapsed = JournalEvent = ReplicaEvent = TierEvent = LeftAlone

Event = (
    Prepared | SaveStarted | Captured | PagesCollapsed | Fenced | Written | Compressed | BuffersFromOneRank | Committed
    | SaveFailed | LoadProgress | Loaded | FellBack | Removed | RemovalFailed | LeftAlone | JournalEvent | ReplicaEvent
    | TierEvent
)
OnEvent = Callable[[Event], None]
