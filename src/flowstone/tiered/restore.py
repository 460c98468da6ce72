"""Finds the checkpoint to load if there are several tiers: the newest step, and which tiers have it, the nearest first.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowstone.commit.locations import check_no_checkpoint, check_store
from flowstone.commit.manifests import read_marker
from flowstone.errors import NoCheckpointError, NotAStoreError, StorageError
from flowstone.format.manifest import MARKER_NAME
from flowstone.log import log
from flowstone.store.base import Store
from flowstone.tiered import lineage

NOT_THERE, _DOWN, _DAMAGED, _SET_ASIDE, _ANOTHER = range(5)
WHY = (
    "does not have the step", "does not answer", "has a damaged manifest of the step",
    "has the step from before a rewind", "has another checkpoint of that step",
)


class Candidate(msgspec.Struct, frozen=True):
    """A checkpoint that may be loaded: a step in a tier. `passed`: for each nearer tier, why it was not chosen."""

    step: int
    tier: int
    passed: tuple[int, ...]


class TierSurvey(msgspec.Struct, frozen=True, eq=False):
    """The contents of each tier, as read by rank 0.

    contents  the contents of each tier; None for a tier that does not answer
    aside     for each tier, its steps from before a rewind, which a load must ignore
    identity  the identity of the run's stores; "" if no tier that answers has one
    """

    contents: Sequence[lineage.TierContents | None]
    aside: Sequence[frozenset[int]]
    identity: str

    def steps(self) -> list[int]:
        """The steps that can be loaded from any tier, newest first."""
        steps = {
            step for contents, aside in zip(self.contents, self.aside, strict=True) if contents is not None
            for step in contents.steps if step not in aside
        }
        return sorted(steps, reverse=True)

    def candidates(self, step: int) -> list[Candidate]:
        """The tiers that have the step, nearest first; tiers with a damaged manifest last."""
        passed: list[int] = []
        candidates: list[Candidate] = []
        damaged: list[int] = []
        expected = ""
        for tier, (contents, aside) in enumerate(zip(self.contents, self.aside, strict=True)):
            reason = _DOWN if contents is None else _SET_ASIDE if step in aside else NOT_THERE
            if contents is not None and step in contents.steps and step not in aside:
                identity = contents.identity(step)
                if identity and identity == (expected or identity):
                    expected = identity
                    candidates.append(Candidate(step, tier, tuple(passed)))
                    passed.append(NOT_THERE)
                    continue
                reason = _ANOTHER if identity else _DAMAGED
                if not identity:
                    damaged.append(tier)
            passed.append(reason)
        return candidates + [Candidate(step, tier, tuple(passed[:tier])) for tier in damaged]


def survey_tiers(stores: Sequence[Store]) -> TierSurvey:
    """Read the contents of each tier.

    raises  NotAStoreError  a store belongs to another run
            StorageError    no tier that answers has a checkpoint, and some tier does not answer
    """
    contents: list[lineage.TierContents | None] = []
    failures: list[StorageError] = []
    identity = ""
    for number, store in enumerate(stores):
        try:
            (check_store if number else check_no_checkpoint)(store)
            own_identity = read_marker(store).store if store.exists(MARKER_NAME) else identity
            check_same_run(store, own_identity, identity or own_identity)
            identity = own_identity
            contents.append(lineage.read_contents(store))
        except StorageError as error:
            log.warning("tier %s does not answer: %s", store.location, error.message)
            failures.append(error)
            contents.append(None)
    answered = [tier for tier in contents if tier is not None]
    aside = [
        frozenset(() if tier is None else lineage.superseded(tier, [other for other in answered if other is not tier]))
        for tier in contents
    ]
    seen = TierSurvey(contents, aside, identity)
    if failures and not seen.steps():
        raise StorageError(
            "the tiers that answer have no checkpoint, and another tier does not answer (see the reason)",
            errno=failures[0].errno, reason=failures[0].message,
            next="wait until that tier answers; or leave it out of the list of tiers, to continue without its steps",
        ) from failures[0]
    return seen


def check_same_run(store: Store, store_identity: str, identity: str) -> None:
    """Raise NotAStoreError if `store`, whose identity is `store_identity`, belongs to another run than `identity`."""
    if store_identity != identity:
        raise NotAStoreError(
            f"{store.location} is a store of another run, not a tier of this one", expected=f"store {identity}",
            found=f"store {store_identity}", next="give each run a location of its own; or leave that tier out",
        )


def no_checkpoint(stores: Sequence[Store], seen: TierSurvey, step: int | None) -> NoCheckpointError:
    """The error that no tier has a checkpoint (`step` is None), or that no tier has `step`."""
    shown = ", ".join(map(str, reversed(seen.steps()[:10]))) or "none"
    return NoCheckpointError(
        "no tier has a checkpoint" if step is None else f"no tier has a checkpoint of step {step}",
        found=f"steps {shown}", tiers=", ".join(store.location for store in stores),
        next="check the list of tiers; to start without a checkpoint, call latest() first, and skip load() if it is "
             "None",
    )


def open_nearest(stores: Sequence[Store], step: int | None) -> tuple[Store, int]:
    """Returns the nearest tier that has a readable manifest of `step` (None: the newest step), and that step.

    raises  NoCheckpointError, NotAStoreError, StorageError
    """
    seen = survey_tiers(stores)
    steps = [candidate_step for candidate_step in seen.steps() if step in (None, candidate_step)]
    if not steps:
        raise no_checkpoint(stores, seen, step)
    first = seen.candidates(steps[0])[0]
    return stores[first.tier], first.step
