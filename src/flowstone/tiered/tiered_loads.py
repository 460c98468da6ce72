"""Loads from several tiers: the newest undamaged step, from the nearest tier that has it. All ranks load the same.

Rank 0 reads every tier that answers. A tier that was down during a rewind still has steps that other tiers have set
aside. These are ignored (tiered/lineage.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as with_store

from flowstone.commit.entries import step_directory
from flowstone.errors import (
    ArgumentError,
    FlowstoneError,
    RankError,
    StorageError,
    is_absence,
    is_damage,
)
from flowstone.load.conductor import Loads
from flowstone.load.steps import skipped_step_note
from flowstone.log import log
from flowstone.ranks.exchange import Decision
from flowstone.reading.checkpoint import Checkpoint
from flowstone.session.load_outcome import LoadReport
from flowstone.session.multi_node import MultiNodeStore
from flowstone.session.shared import Shared
from flowstone.store.base import Store
from flowstone.tiered.restore import NOT_THERE, WHY, Candidate, TierSurvey, no_checkpoint, survey_tiers
from flowstone.tiered.tier_events import TierPassedOver

if TYPE_CHECKING:
    from flowstone.layouts.layout_rules import LoadRule


class TieredLoads(Loads):
    """The loads of one Checkpointer with several tiers, nearest first."""

    def __init__(
        self, shared: Shared, stores: Sequence[Store], on_loaded: Callable[[int, int], None],
        on_seen: Callable[[TierSurvey], None],
    ) -> None:
        """`on_loaded` is called after each load, with the tier's number and the step. `on_seen` is called whenever the
        tiers were read, with their contents.
        """
        super().__init__(shared)
        self._stores, self._on_loaded, self._on_seen = stores, on_loaded, on_seen
        self._by_tier = [Loads(with_store(shared, store=store)) for store in stores]

    def find_newest(self) -> Checkpoint | None:
        """The newest committed checkpoint, in the nearest tier that has it; None if no tier has a checkpoint.

        raises  StorageError if no tier has a checkpoint, but some tier does not answer
        """

        def choose() -> list[int]:
            seen = self._survey()
            for step in seen.steps():
                first = seen.candidates(step)[0]
                return [len(self._stores), first.step, first.tier]
            return [len(self._stores)]

        count, *newest = self._group.decide_on_rank_zero("which step is the newest", choose)
        self._check_alike(count)
        if not newest:
            self._check_that_none_is_seen()
            return None
        step, tier = newest
        return Checkpoint(self._stores[tier], step_directory(step), self._options)

    def _check_that_none_is_seen(self) -> None:
        """Raise RankError if rank 0 sees no checkpoint, but another rank does: training must not start from zero.

        A tier on a node's own disk has only that node's flushes, and rank 0 may have moved to another node.
        """
        if self._group.size == 1:
            return
        try:
            own: bytes | Exception = self._newest_in_words().encode()
        except Exception as error:  # the error is sent to the other ranks, which wait for this rank's message
            own = error

        def compare(messages: Sequence[bytes]) -> Decision:
            for rank, message in enumerate(messages):
                if message:
                    raise RankError(
                        f"rank {rank} sees {message.decode()}, but rank 0 sees no checkpoint in any tier",
                        rank=rank, phase="which step is the newest",
                        next="give tiers that every node sees; to load that step, start rank 0 on the node that sees "
                        "it",
                    )
            return Decision()

        self._group.decide_from_all("that no rank sees a checkpoint", own, compare)

    def _newest_in_words(self) -> str:
        """The newest step that this rank sees, as text; "" for none."""
        seen = self._survey()
        steps = seen.steps()
        return "" if not steps else f"step {steps[0]} in {self._stores[seen.candidates(steps[0])[0].tier].location}"

    def load_newest(
        self, step: int | None, state: Mapping[str, object], rules: Sequence[LoadRule], *, verify_first: bool,
        fallback: bool,
    ) -> LoadReport:
        """Load `step` (None: the newest step) from the nearest tier that has it undamaged. If it is damaged in
        all tiers, `fallback` loads the newest earlier step.
        """
        candidates = self._choose(step, fallback=fallback)
        tried: dict[int, str] = {}
        passed: list[str] = []
        for number, candidate in enumerate(candidates):
            try:
                report = self._by_tier[candidate.tier].load(candidate.step, state, rules, verify_first=verify_first)
            except FlowstoneError as error:
                following = candidates[number + 1] if number + 1 < len(candidates) else None
                if following is None or not _is_of_tier(error, same_step=following.step == candidate.step):
                    raise
                if following.step != candidate.step:
                    passed.append(skipped_step_note(candidate.step, error))
                tried = self._pass_over(candidate, following, error, tried)
            else:
                if candidate.tier:
                    self._outcome.drop_verified()  # the next save may refer only to files of the first tier
                if candidate.step != candidates[0].step:
                    self._outcome.fall_back(candidate.step)
                tier, notes = self._stores[candidate.tier].location, (*report.notes, *passed)
                report = replace(report, tier=tier, why=self._why(candidate, tried), notes=notes)
                log.info("step %d was loaded from %s%s", report.step, report.tier, f": {report.why}" * bool(report.why))
                self._on_loaded(candidate.tier, candidate.step)
                return report
        raise AssertionError("the last candidate for the load neither returned nor raised an error")

    def _pass_over(
        self, candidate: Candidate, following: Candidate, error: FlowstoneError, tried: Mapping[int, str]
    ) -> dict[int, str]:
        """Log why the next candidate is tried. Returns, for the next candidate's step, the errors so far by tier
        number.
        """
        location = self._stores[candidate.tier].location
        self._emit(TierPassedOver(candidate.step, location, str(error)))
        if following.step == candidate.step:
            log.warning("cannot load step %d from %s, trying the next tier: %s", candidate.step, location, error)
            return {**tried, candidate.tier: error.message}
        log.warning("cannot load step %d from any tier, trying an older one: %s", candidate.step, error)
        from flowstone.events.rare_events import FellBack  # imported here: few loads fall back

        self._emit(FellBack(candidate.step, str(error)))
        return {}

    def _why(self, candidate: Candidate, tried: Mapping[int, str]) -> str:
        """A text that says, for each tier that is nearer than the candidate's, why the step was not loaded from it."""
        words = [
            self._stores[tier].location + (f": {tried[tier]}" if tier in tried else f" {WHY[reason]}{self._gaps(tier)}")
            for tier, reason in enumerate(candidate.passed)
        ]
        farther = {tier: reason for tier, reason in tried.items() if tier >= len(candidate.passed)}
        words += [f"{self._stores[tier].location}: {reason}" for tier, reason in farther.items()]
        return "; ".join(words)

    def _gaps(self, tier: int) -> str:
        """Why a tier in the memory of several nodes lacks checkpoints, as text; "" for other tiers."""
        store = self._stores[tier]
        lack = store.missing_checkpoints() if isinstance(store, MultiNodeStore) else ""
        return f" ({lack})" if lack else ""

    def _choose(self, step: int | None, *, fallback: bool) -> list[Candidate]:
        """The candidates that a load tries, in order. Rank 0 finds them, so they are the same on all ranks."""
        tiers = len(self._stores)

        def choose() -> list[int]:
            seen = self._survey()
            steps = [
                other for other in seen.steps() if step is None or other == step or (fallback and other < step)
            ]
            if not steps or (step is not None and steps[0] != step):
                raise no_checkpoint(self._stores, seen, step)
            flat = [tiers]
            for candidate_step in steps if fallback else steps[:1]:
                for candidate in seen.candidates(candidate_step):
                    rest = tiers - len(candidate.passed)
                    flat += [candidate.step, candidate.tier, *candidate.passed, *[NOT_THERE] * rest]
            return flat

        count, *flat = self._group.decide_on_rank_zero("which step to load", choose)
        self._check_alike(count)
        return [
            Candidate(flat[index], flat[index + 1], tuple(flat[index + 2 : index + 2 + flat[index + 1]]))
            for index in range(0, len(flat), tiers + 2)
        ]

    def _check_alike(self, count: int) -> None:
        if count != len(self._stores):
            raise ArgumentError(
                f"this rank has {len(self._stores)} tiers, but rank 0 has {count}", next="give every rank the same list"
            )

    def _survey(self) -> TierSurvey:
        seen = survey_tiers(self._stores)
        self._on_seen(seen)
        return seen


def _is_of_tier(error: FlowstoneError, *, same_step: bool) -> bool:
    """Whether the error is of one tier (its bytes are damaged, missing or unreadable), so that the next candidate may
    succeed.
    """
    if is_damage(error) or (same_step and is_absence(error)):
        return True
    refuses = isinstance(error, StorageError) or (isinstance(error, RankError) and error.kind == "StorageError")
    return same_step and refuses
