"""Typed records of what is happening: progress and measures, one kind for each phase.

A Checkpointer hands each to its `on_event`, from the thread in which it happened. Times are
seconds, sizes bytes. An exception from `on_event` is logged and otherwise ignored: watching
a save must not be able to break it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveStarted:
    """The state has been described and planned; capture begins."""

    step: int
    tensors: int
    bytes: int
    plan_cached: bool
    described_s: float
    planned_s: float
    waited_s: float  # for an earlier save to become durable, when too many were in flight


@dataclass(frozen=True, slots=True)
class Captured:
    """The state may change from here on; or has been able to, since a step copied what had no plan yet.

    blocked_s     what the caller waited in `save`, all told
    captured_s    since `save` was called
    early_bytes   captured before `save` returned; the others lazily, for which see Written
    exact_bytes, sampled_bytes  of those others: every write to them until their capture would have been noticed, or
                  some of their bytes were compared (docs/LIMITS.md)
    """

    step: int
    blocked_s: float
    captured_s: float
    early_bytes: int
    exact_bytes: int
    sampled_bytes: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """A step, or a call of `fence`, waited for what was not captured yet.

    step  of the newest save that was waited for
    """

    step: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Written:
    """All segments are durable, not yet committed. copied: through the arena; direct: from where they lay."""

    step: int
    copied_bytes: int
    direct_bytes: int
    seconds: float  # since `save` was called


@dataclass(frozen=True, slots=True)
class BuffersFromOneRank:
    """Buffers of modules (statistics of BatchNorm) that several ranks hold, each perhaps its own. Saved: the lowest's.

    tensors  how many there are, in the whole job
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
    """This save ended without a checkpoint; earlier ones are untouched."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of file ranges read so far, of `total_bytes` wanted."""

    step: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The state holds the checkpoint."""

    step: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"loaded step {self.step}: {self.bytes:,} bytes in {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class FellBack:
    """A damaged checkpoint was passed over for an older one, as `fallback` allows."""

    damaged_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Removed:
    """Retention or a sweep removed a directory."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RemovalFailed:
    """Retention or a sweep could not remove a directory; it is tried again later."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """Retention or a sweep has met what is not this store's own, and left it: a link, another store's, a user's file.

    Told once of each by a Checkpointer.
    """

    name: str
    reason: str


Event = (
    SaveStarted | Captured | Fenced | Written | BuffersFromOneRank | Committed | SaveFailed | LoadProgress | Loaded
    | FellBack | Removed | RemovalFailed | LeftAlone
)
OnEvent = Callable[[Event], None]
