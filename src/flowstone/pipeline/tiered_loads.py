"""Loads from several tiers: the newest step that is whole, from the nearest tier that has it whole; all ranks alike.

Rank 0 looks at every tier that answers. What a rewind has set aside elsewhere does not count (tiers/lineage.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as with_store

from flowstone.checkpoint import Checkpoint
from flowstone.commit.entries import step_directory
from flowstone.errors import (
    ArgumentError,
    FlowstoneError,
    RankError,
    StorageError,
    is_absence,
    is_damage,
)
from flowstone.events import FellBack
from flowstone.log import log
from flowstone.pipeline.load import Loads, skipped_step_note
from flowstone.pipeline.load_outcome import LoadReport
from flowstone.pipeline.multi_node import MultiNodeStore
from flowstone.pipeline.shared import Shared
from flowstone.ranks.wire import Decision
from flowstone.store.base import Store
from flowstone.tier_events import TierPassedOver
from flowstone.tiers.restore import NOT_THERE, WHY, Candidate, Seen, look_at, no_checkpoint

if TYPE_CHECKING:
    from flowstone.layout_rules import LoadRule


class TieredLoads(Loads):
    """The loads of one Checkpointer with several tiers, nearest first."""

    def __init__(
        self, shared: Shared, stores: Sequence[Store], on_loaded: Callable[[int, int], None],
        on_seen: Callable[[Seen], None],
    ) -> None:
        """`on_loaded` is told the number of the tier, and the step, of each load; `on_seen` what was found."""
        super().__init__(shared)
        self._stores, self._on_loaded, self._on_seen = stores, on_loaded, on_seen
        self._by_tier = [Loads(with_store(shared, store=store)) for store in stores]

    def newest(self) -> Checkpoint | None:
        """The newest committed checkpoint, of the nearest tier that has it; None if no tier has one yet.

        raises  StorageError where there is none, but a tier does not answer
        """

        def look() -> list[int]:
            seen = self._look()
            for step in seen.steps():
                first = seen.candidates(step)[0]
                return [len(self._stores), first.step, first.tier]
            return [len(self._stores)]

        count, *found = self._group.decide("which step is the newest", look)
        self._check_alike(count)
        if not found:
            self._check_that_none_is_seen()
            return None
        step, tier = found
        return Checkpoint(self._stores[tier], step_directory(step), self._options)

    def _check_that_none_is_seen(self) -> None:
        """Raise RankError if another rank sees a checkpoint where rank 0 sees none: else training would begin anew.

        Tiers that are each node's own have what is flushed on one node alone, and rank 0 may be on another one by now.
        """
        if self._group.size == 1:
            return
        try:
            words: bytes | Exception = self._newest_in_words().encode()
        except Exception as error:  # told to the others, which wait for this rank's words
            words = error

        def compare(said: Sequence[bytes]) -> Decision:
            for rank, one in enumerate(said):
                if one:
                    raise RankError(
                        f"rank {rank} sees {one.decode()}, rank 0 sees no checkpoint in any tier", rank=rank,
                        phase="which step is the newest",
                        next="give tiers that every node sees; to load that step, start rank 0 where it is",
                    )
            return Decision()

        self._group.ask("that no rank sees a checkpoint", words, compare)

    def _newest_in_words(self) -> str:
        """What this rank sees itself; "" for nothing."""
        seen = self._look()
        steps = seen.steps()
        return "" if not steps else f"step {steps[0]} in {self._stores[seen.candidates(steps[0])[0].tier].location}"

    def load_newest(
        self, step: int | None, state: Mapping[str, object], rules: Sequence[LoadRule], *, verify_first: bool,
        fallback: bool,
    ) -> LoadReport:
        """Load the newest step, or `step`: from the nearest tier, from the next one if it is damaged there; with
        `fallback`, then the newest one before it.
        """
        candidates = self._choose(step, fallback=fallback)
        tried: dict[int, str] = {}
        passed: list[str] = []
        for number, one in enumerate(candidates):
            try:
                report = self._by_tier[one.tier].load(one.step, state, rules, verify_first=verify_first)
            except FlowstoneError as error:
                following = candidates[number + 1] if number + 1 < len(candidates) else None
                if following is None or not _is_of_tier(error, same_step=following.step == one.step):
                    raise
                if following.step != one.step:
                    passed.append(skipped_step_note(one.step, error))
                tried = self._pass_over(one, following, error, tried)
            else:
                if one.tier:
                    self._outcome.verified = None  # a save refers to files of the first tier alone
                if one.step != candidates[0].step:
                    self._outcome.superseded_above = one.step
                tier, notes = self._stores[one.tier].location, (*report.notes, *passed)
                report = replace(report, tier=tier, why=self._why(one, tried), notes=notes)
                log.info("step %d was loaded from %s%s", report.step, report.tier, f": {report.why}" * bool(report.why))
                self._on_loaded(one.tier, one.step)
                return report
        raise AssertionError("there is a candidate, and the last one returns or raises")

    def _pass_over(
        self, one: Candidate, following: Candidate, error: FlowstoneError, tried: Mapping[int, str]
    ) -> dict[int, str]:
        """Say why the next candidate is tried. Returns the reasons for its step, by tier."""
        location = self._stores[one.tier].location
        self._emit(TierPassedOver(one.step, location, str(error)))
        if following.step == one.step:
            log.warning("cannot load step %d from %s, trying the next tier: %s", one.step, location, error)
            return {**tried, one.tier: error.message}
        log.warning("cannot load step %d from any tier, trying an older one: %s", one.step, error)
        self._emit(FellBack(one.step, str(error)))
        return {}

    def _why(self, one: Candidate, tried: Mapping[int, str]) -> str:
        """For each nearer tier, why it was not that one."""
        words = [
            self._stores[tier].location + (f": {tried[tier]}" if tier in tried else f" {WHY[why]}{self._lack(tier)}")
            for tier, why in enumerate(one.passed)
        ]
        words += [f"{self._stores[tier].location}: {why}" for tier, why in tried.items() if tier >= len(one.passed)]
        return "; ".join(words)

    def _lack(self, tier: int) -> str:
        """What a tier in the memory of several nodes has lost."""
        store = self._stores[tier]
        lack = store.absent() if isinstance(store, MultiNodeStore) else ""
        return f" ({lack})" if lack else ""

    def _choose(self, step: int | None, *, fallback: bool) -> list[Candidate]:
        """What to try, in order; the same on all ranks."""
        tiers = len(self._stores)

        def look() -> list[int]:
            seen = self._look()
            steps = [one for one in seen.steps() if step is None or one == step or (fallback and one < step)]
            if not steps or (step is not None and steps[0] != step):
                raise no_checkpoint(self._stores, seen, step)
            flat = [tiers]
            for one in steps if fallback else steps[:1]:
                for candidate in seen.candidates(one):
                    rest = tiers - len(candidate.passed)
                    flat += [candidate.step, candidate.tier, *candidate.passed, *[NOT_THERE] * rest]
            return flat

        count, *flat = self._group.decide("which step to load", look)
        self._check_alike(count)
        return [
            Candidate(flat[at], flat[at + 1], tuple(flat[at + 2 : at + 2 + flat[at + 1]]))
            for at in range(0, len(flat), tiers + 2)
        ]

    def _check_alike(self, count: int) -> None:
        if count != len(self._stores):
            raise ArgumentError(
                f"this rank has {len(self._stores)} tiers, and rank 0 has {count}", next="give every rank the same list"
            )

    def _look(self) -> Seen:
        seen = look_at(self._stores)
        self._on_seen(seen)
        return seen


def _is_of_tier(error: FlowstoneError, *, same_step: bool) -> bool:
    """Whether the next candidate may do better: the bytes here are damaged, or gone; or this tier refuses them."""
    if is_damage(error) or (same_step and is_absence(error)):
        return True
    refuses = isinstance(error, StorageError) or (isinstance(error, RankError) and error.kind == "StorageError")
    return same_step and refuses
