"""Typed records of farther tiers (docs/ORDERING.md, Tiers), which a Checkpointer passes to its `on_event` as well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flushed:
    """A farther tier has this checkpoint now, durably.

    tier     its location
    bytes    that were copied; 0 where it had it already
    waiting  how many checkpoints still wait for this tier
    """

    step: int
    tier: str
    bytes: int
    seconds: float
    waiting: int


@dataclass(frozen=True, slots=True)
class TierFailed:
    """A farther tier could not be used: it is down, full, or refuses. Training goes on, and it is tried again.

    step        that was to be flushed; None: the tier was being opened
    again_in_s  until the next try
    waiting     the steps that wait for this tier, oldest first
    """

    step: int | None
    tier: str
    reason: str
    again_in_s: float
    waiting: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlushDropped:
    """This step will not come to that tier: more waited than may, or no tier has it whole any more."""

    step: int
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class TiersBehind:
    """A Checkpointer was closed while checkpoints still waited for a tier. The next start catches up."""

    tier: str
    waiting: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class TierPassedOver:
    """A load did not take this step from that tier, which has it, but from another one."""

    step: int
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a load has taken from a farther tier, `source`, has come to a nearer one that wants it (Tier.prefetch).

    bytes   that were copied; 0 where the tier had it
    reason  why it did not come; "" if it did
    """

    step: int
    tier: str
    source: str
    bytes: int
    seconds: float
    reason: str


TierEvent = Flushed | TierFailed | FlushDropped | TiersBehind | TierPassedOver | Prefetched
