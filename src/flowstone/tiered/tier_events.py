"""The events of farther tiers (docs/ORDERING.md, Tiers), which a Checkpointer passes to its `on_event`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flushed:
    """A farther tier now has this checkpoint, durably.

    tier     the location of the tier
    bytes    bytes copied; 0 if the tier already had the checkpoint
    waiting  how many checkpoints still wait for this tier
    """

    step: int
    tier: str
    bytes: int
    seconds: float
    waiting: int


@dataclass(frozen=True, slots=True)
class TierFailed:
    """A farther tier could not be used: it is down, full, or denies access. Training continues, with later retries.

    step        step that was being flushed; None: the tier was being opened
    again_in_s  time until the next attempt
    waiting     steps that wait for this tier, oldest first
    """

    step: int | None
    tier: str
    reason: str
    again_in_s: float
    waiting: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlushDropped:
    """This step will not be flushed to this tier, because too many steps were waiting, or because no tier has all files
    of the checkpoint any more.
    """

    step: int
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class TiersBehind:
    """A Checkpointer was closed while checkpoints still waited for a tier. The next start flushes them."""

    tier: str
    waiting: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class TierPassedOver:
    """A load could not read this step from this tier, which has it, and tried the next tier or an older step."""

    step: int
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The copy of a loaded checkpoint from a farther tier, `source`, to a nearer tier has ended (Tier.prefetch).

    bytes   bytes copied; 0 if the tier already had the checkpoint
    reason  why the checkpoint was not copied; "" if it was copied
    """

    step: int
    tier: str
    source: str
    bytes: int
    seconds: float
    reason: str


TierEvent = Flushed | TierFailed | FlushDropped | TiersBehind | TierPassedOver | Prefetched
