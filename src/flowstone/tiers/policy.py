"""What the user says about several stores: which checkpoints go how far, and what each store keeps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowstone.arguments import shown, store_at, to_keep, to_store
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
from flowstone.store.base import Store, place_of

if TYPE_CHECKING:
    StorePlace = str | os.PathLike[str] | Store


@dataclass(frozen=True, slots=True)
class Tier:
    """One store of several, and what comes to it. The first of a list takes every save, and has no option but `keep`.

    store        a directory, or an open Store, which the Checkpointer closes
    every        in steps: a checkpoint comes here if its step is so much above the last one's that does
    keep         which checkpoints stay here, as for a Checkpointer; None: all
    bytes_per_s  how fast it is written, at most; None: as fast as it takes them
    lag          how many checkpoints may wait for it, at least 1. When one more comes, the oldest waits no longer: the
                 event FlushDropped says so. Nearer tiers keep those that wait, whatever their own `keep` says; but the
                 memory of a node, or of several, keeps its `generations` alone: what it gives up is dropped likewise
    lag_bytes    the same in bytes of their segments; the newest may always wait. None: no limit
    drain_s      how long `close` waits until it has all that it should have
    prefetch     whether what a load takes from a farther tier is copied here, in the background, until the first save.
                 A tier that says so is locked and written into by a job that only loads, too
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
                f"Tier(every={self.every}): no checkpoint could come to {shown(self.store)}",
                expected=f"a number of steps within 1..{STEP_MAX}", next="1 sends every save there",
            )
        if self.lag < 1:
            raise ArgumentError(
                f"Tier(lag={self.lag}): no checkpoint could come to {shown(self.store)}", expected="1 or more",
                next="1 lets the newest wait alone",
            )
        if self.lag_bytes is not None and self.lag_bytes < 0:
            raise ArgumentError(f"Tier(lag_bytes={self.lag_bytes}) is less than none", next="leave it out for no limit")
        if self.bytes_per_s is not None and self.bytes_per_s < REQUEST_BYTES_MIN:
            raise ArgumentError(
                f"Tier(bytes_per_s={self.bytes_per_s}) is less than one request of 2 MiB a second",
                expected=f"at least {REQUEST_BYTES_MIN}", next="give more, or leave it out",
            )
        if isinstance(self.drain_s, bool) or not isinstance(self.drain_s, int | float) or not self.drain_s >= 0:
            raise ArgumentError(f"Tier(drain_s={self.drain_s!r:.60}) is not a number of seconds", next="give 0 or more")
        if not isinstance(self.prefetch, bool):
            raise ArgumentError(f"Tier(prefetch={self.prefetch!r:.60}) is neither True nor False", next="leave it out")


@dataclass(frozen=True, slots=True)
class Placed:
    """A tier of a list, with its store."""

    tier: Tier
    store: Store

    @property
    def is_volatile(self) -> bool:
        return self.store.capabilities.volatile


def stores_of(given: object, engine: EngineOptions) -> list[Store]:
    """The stores of a list, nearest first, to be read. Raises ArgumentError, else as `to_store`."""
    return [_store_at(one.store if isinstance(one, Tier) else one, engine) for one in _listed(given)]


def _listed(given: object) -> tuple[StorePlace | Tier, ...]:
    listed = tuple(given) if isinstance(given, Sequence) else ()
    if not listed:
        raise ArgumentError(
            "a list of tiers is empty", expected="one store or more",
            next='give the nearest first: ["/nvme/run", fs.Tier("/mnt/run", every=100)]',
        )
    return listed


def _store_at(place: object, engine: EngineOptions) -> Store:
    return store_at(to_store(place), engine)


_FIRST_TAKES_ALL = {"every": 1, "bytes_per_s": None, "lag": TIER_LAG, "lag_bytes": None, "drain_s": TIER_DRAIN_S}


def to_tiers(given: object, keep: Keep | KeepRule | None, engine: EngineOptions) -> tuple[Placed, ...]:
    """The tiers of a list, nearest first.

    keep    of the Checkpointer: of the first tier, unless that has its own
    raises  ArgumentError for a list that cannot be; else as `to_store`
    """
    tiers = [one if isinstance(one, Tier) else Tier(one) for one in _listed(given)]
    placed = [Placed(tier, _store_at(tier.store, engine)) for tier in tiers]
    _check_first(placed[0].tier, keep)
    if placed[-1].tier.prefetch:
        raise ArgumentError(
            f"prefetch of the last tier, {placed[-1].store.location}: there is none that is farther",
            next="leave it out, or put that tier further forward",
        )
    _check_apart(placed)
    if all(one.is_volatile for one in placed):
        raise ArgumentError(
            f"none of {len(placed)} tiers is durable" if len(placed) > 1 else "the one tier is not durable",
            found=", ".join(one.store.location for one in placed),
            next="add a directory, or an object store; a single store in memory is given without a list",
        )
    if placed[0].tier.keep is None and keep is not None:
        placed[0] = Placed(replace(placed[0].tier, keep=keep), placed[0].store)
    return tuple(placed)


def _check_first(tier: Tier, keep: Keep | KeepRule | None) -> None:
    for name, default in _FIRST_TAKES_ALL.items():
        if getattr(tier, name) != default:
            remedy = "give engine=EngineOptions(write_bytes_per_s=...)" if name == "bytes_per_s" else "leave it out"
            raise ArgumentError(
                f"{name}={getattr(tier, name)} of the first tier, {shown(tier.store)}",
                expected="the first tier takes every save, before `committed`",
                next=f"{remedy}, or put it further back",
            )
    if keep is not None and tier.keep is not None and keep != tier.keep:
        raise ArgumentError(
            f"keep={keep} of the Checkpointer, and keep={tier.keep} of its first tier", next="give one of them"
        )


def _check_apart(placed: Sequence[Placed]) -> None:
    """No store twice, and none inside of another."""
    roots = [place_of(one.store.location) for one in placed]
    for at, root in enumerate(roots):
        for before, earlier in enumerate(roots[:at]):
            if placed[at].store is placed[before].store or root == earlier:
                raise ArgumentError(
                    f"tiers {before + 1} and {at + 1} are one store", found=placed[at].store.location,
                    next="leave one of them out",
                )
            inner, outer = (root, earlier) if len(root) > len(earlier) else (earlier, root)
            if inner.startswith(f"{outer}/"):
                raise ArgumentError(
                    f"tiers {before + 1} and {at + 1} lie one inside the other", found=f"{inner} in {outer}",
                    next="give each tier a place of its own",
                )
