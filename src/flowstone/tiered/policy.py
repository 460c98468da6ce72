"""The options of a Checkpointer with several stores: which checkpoints each store gets, and which it keeps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowstone.config import (
    REQUEST_BYTES_MIN,
    STEP_MAX,
    TIER_DRAIN_S,
    TIER_LAG,
    EngineOptions,
    Keep,
    KeepRule,
    whole_number,
)
from flowstone.errors import ArgumentError
from flowstone.store.base import Store, canonical_location
from flowstone.stores.arguments import shown, store_at, to_keep, to_store

if TYPE_CHECKING:
    StorePlace = str | os.PathLike[str] | Store


@dataclass(frozen=True, slots=True)
class Tier:
    """One store of several, and the checkpoints that it gets. The first tier gets every save, so of the options below
    it can have only `keep` and `prefetch`.

    store        a directory, or an open Store, which the Checkpointer closes
    every        number of steps: a checkpoint is flushed to this tier if its step is at least this much above the last
                 flushed step
    keep         the retention in this tier, as for a Checkpointer; None: keep all
    bytes_per_s  limit on the rate of writes; None: no limit
    lag          how many checkpoints may wait for a flush, at least 1. If one more is saved, the oldest is dropped,
                 with the event FlushDropped. Nearer tiers do not remove a waiting checkpoint, whatever their `keep`.
                 But NodeMemory and PeerMemory keep only the newest checkpoints (their option `generations` says how
                 many): others are dropped, too
    lag_bytes    how many bytes of segments may wait for a flush; the newest checkpoint may always wait. None: no limit
    drain_s      how long `close` waits, in seconds, until all waiting checkpoints are flushed
    prefetch     whether a checkpoint that was loaded from a farther tier is copied to this one in the background. The
                 first save cancels the copy. A job locks and writes a tier with this option even if it only loads
    """

    store: StorePlace
    every: int = 1
    keep: Keep | KeepRule | int | None = None
    bytes_per_s: int | None = None
    lag: int = TIER_LAG
    lag_bytes: int | None = None
    drain_s: float = TIER_DRAIN_S
    prefetch: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "bytes_per_s", "lag", "lag_bytes"):
            value = getattr(self, name)
            if value is not None or name in ("every", "lag"):
                object.__setattr__(self, name, whole_number(f"Tier: {name}", value))
        object.__setattr__(self, "keep", to_keep(self.keep))
        if not 1 <= self.every <= STEP_MAX:
            raise ArgumentError(
                f"Tier(every={self.every}) for {shown(self.store)}: every must be within 1..{STEP_MAX}",
                next="give a number of steps; 1 flushes every save",
            )
        if self.lag < 1:
            raise ArgumentError(
                f"Tier(lag={self.lag}) for {shown(self.store)}: lag must be at least 1",
                next="give 1 if only the newest checkpoint may wait for a flush",
            )
        if self.lag_bytes is not None and self.lag_bytes < 0:
            raise ArgumentError(
                f"Tier(lag_bytes={self.lag_bytes}): lag_bytes must be at least 0", next="leave it out for no limit"
            )
        if self.bytes_per_s is not None and self.bytes_per_s < REQUEST_BYTES_MIN:
            raise ArgumentError(
                f"Tier(bytes_per_s={self.bytes_per_s}): bytes_per_s must be at least {REQUEST_BYTES_MIN}",
                next="give more, or leave it out for no limit",
            )
        if isinstance(self.drain_s, bool) or not isinstance(self.drain_s, int | float) or not self.drain_s >= 0:
            raise ArgumentError(
                f"Tier(drain_s={self.drain_s!r:.60}): drain_s must be a number of seconds, at least 0",
                next="correct it, or leave it out",
            )
        if not isinstance(self.prefetch, bool):
            raise ArgumentError(f"Tier(prefetch={self.prefetch!r:.60}) is neither True nor False", next="leave it out")


@dataclass(frozen=True, slots=True)
class PlacedTier:
    """One tier of a Checkpointer, with its open store."""

    tier: Tier
    store: Store

    @property
    def is_volatile(self) -> bool:
        return self.store.capabilities.volatile


def stores_of(given: object, engine: EngineOptions) -> list[Store]:
    """The stores of a list, nearest first, for reading. Raises ArgumentError and the errors of `to_store`."""
    return [_store_at(entry.store if isinstance(entry, Tier) else entry, engine) for entry in _listed(given)]


def _listed(given: object) -> tuple[StorePlace | Tier, ...]:
    listed = tuple(given) if isinstance(given, Sequence) else ()
    if not listed:
        raise ArgumentError(
            "the list of tiers is empty", expected="at least one store",
            next='give the nearest first: ["/nvme/run", fs.Tier("/mnt/run", every=100)]',
        )
    return listed


def _store_at(place: object, engine: EngineOptions) -> Store:
    return store_at(to_store(place), engine)


_FIRST_TAKES_ALL = {"every": 1, "bytes_per_s": None, "lag": TIER_LAG, "lag_bytes": None, "drain_s": TIER_DRAIN_S}


def to_tiers(given: object, keep: Keep | KeepRule | None, engine: EngineOptions) -> tuple[PlacedTier, ...]:
    """The tiers of a list, nearest first.

    keep    the Checkpointer's option `keep`, which applies to the first tier
    raises  ArgumentError for an invalid list; the errors of `to_store`
    """
    tiers = [entry if isinstance(entry, Tier) else Tier(entry) for entry in _listed(given)]
    placed = [PlacedTier(tier, _store_at(tier.store, engine)) for tier in tiers]
    _check_first(placed[0].tier, keep)
    if placed[-1].tier.prefetch:
        raise ArgumentError(
            f"prefetch of the last tier, {placed[-1].store.location}, has no farther tier to copy from",
            next="leave prefetch out, or put that tier earlier in the list",
        )
    _check_apart(placed)
    if all(entry.is_volatile for entry in placed):
        raise ArgumentError(
            f"none of the {len(placed)} tiers is durable" if len(placed) > 1 else "the only tier is not durable",
            found=", ".join(entry.store.location for entry in placed),
            next="add a directory or an object store; or, to keep checkpoints in memory only, pass a single store "
            "instead of a list",
        )
    if placed[0].tier.keep is None and keep is not None:
        placed[0] = PlacedTier(replace(placed[0].tier, keep=keep), placed[0].store)
    return tuple(placed)


def _check_first(tier: Tier, keep: Keep | KeepRule | None) -> None:
    for name, default in _FIRST_TAKES_ALL.items():
        if getattr(tier, name) != default:
            remedy = "give engine=EngineOptions(write_bytes_per_s=...)" if name == "bytes_per_s" else "leave it out"
            raise ArgumentError(
                f"the first tier, {shown(tier.store)}, has {name}={getattr(tier, name)}",
                expected=f"no option {name}: each save is written to the first tier before its `committed` completes",
                next=f"{remedy}, or put this tier later in the list",
            )
    if keep is not None and tier.keep is not None and keep != tier.keep:
        raise ArgumentError(
            f"the Checkpointer has keep={keep}, but its first tier has keep={tier.keep}", next="give only one of them"
        )


def _check_apart(placed: Sequence[PlacedTier]) -> None:
    """Raise ArgumentError if a store is given twice, or lies in the directory of another."""
    roots = [canonical_location(entry.store.location) for entry in placed]
    for number, root in enumerate(roots):
        for other, earlier in enumerate(roots[:number]):
            if placed[number].store is placed[other].store or root == earlier:
                raise ArgumentError(
                    f"tiers {other + 1} and {number + 1} are the same store", found=placed[number].store.location,
                    next="leave one of them out",
                )
            inner, outer = (root, earlier) if len(root) > len(earlier) else (earlier, root)
            if inner.startswith(f"{outer}/"):
                raise ArgumentError(
                    f"of tiers {other + 1} and {number + 1}, one is inside the other", found=f"{inner} in {outer}",
                    next="give each tier a directory of its own",
                )
