"""What several tiers have to load: the newest step, and the tiers that have it, nearest first."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowstone.commit.locations import check_no_checkpoint, check_store
from flowstone.commit.manifests import read_marker
from flowstone.errors import NoCheckpointError, NotAStoreError, StorageError
from flowstone.format.manifest import MARKER_NAME
from flowstone.log import log
from flowstone.store.base import Store
from flowstone.tiers import lineage

NOT_THERE, _DOWN, _DAMAGED, _SET_ASIDE, _ANOTHER = range(5)
WHY = (
    "does not have the step", "does not answer", "has a damaged manifest of the step",
    "has the step from before a rewind", "has another checkpoint of that step",
)


class Candidate(msgspec.Struct, frozen=True):
    """A checkpoint that may be loaded: a step, and the number of the tier. `passed`: why not a nearer one, by tier."""

    step: int
    tier: int
    passed: tuple[int, ...]


class Seen(msgspec.Struct, frozen=True, eq=False):
    """What rank 0 has found in each tier; None for a tier that does not answer.

    aside     steps from before a rewind
    identity  of the run's stores; "" if no tier that answers has one
    """

    held: Sequence[lineage.Held | None]
    aside: Sequence[frozenset[int]]
    identity: str

    def steps(self) -> list[int]:
        """Of any tier, newest first."""
        found = {
            step for held, aside in zip(self.held, self.aside, strict=True) if held is not None
            for step in held.steps if step not in aside
        }
        return sorted(found, reverse=True)

    def candidates(self, step: int) -> list[Candidate]:
        """The tiers that have the step, nearest first; those that have it damaged come last."""
        passed: list[int] = []
        found: list[Candidate] = []
        damaged: list[int] = []
        known = ""
        for tier, (held, aside) in enumerate(zip(self.held, self.aside, strict=True)):
            why = _DOWN if held is None else _SET_ASIDE if step in aside else NOT_THERE
            if held is not None and step in held.steps and step not in aside:
                identity = held.identity(step)
                if identity and identity == (known or identity):
                    known = identity
                    found.append(Candidate(step, tier, tuple(passed)))
                    passed.append(NOT_THERE)
                    continue
                why = _ANOTHER if identity else _DAMAGED
                if not identity:
                    damaged.append(tier)
            passed.append(why)
        return found + [Candidate(step, tier, tuple(passed[:tier])) for tier in damaged]


def look_at(stores: Sequence[Store]) -> Seen:
    """What each tier has. A store of another run is refused.

    raises  NotAStoreError
            StorageError    no tier that answers has a checkpoint, and another one does not answer
    """
    held: list[lineage.Held | None] = []
    failures: list[StorageError] = []
    identity = ""
    for number, store in enumerate(stores):
        try:
            (check_store if number else check_no_checkpoint)(store)
            found = read_marker(store).store if store.exists(MARKER_NAME) else identity
            check_same_run(store, found, identity or found)
            identity = found
            held.append(lineage.look(store))
        except StorageError as error:
            log.warning("tier %s does not answer: %s", store.location, error.message)
            failures.append(error)
            held.append(None)
    there = [one for one in held if one is not None]
    aside = [
        frozenset(() if one is None else lineage.superseded(one, [other for other in there if other is not one]))
        for one in held
    ]
    seen = Seen(held, aside, identity)
    if failures and not seen.steps():
        raise StorageError(
            "no tier that answers has a checkpoint, and whether another one has cannot be asked now",
            errno=failures[0].errno, reason=failures[0].message,
            next="wait until it is back; or leave it out of the list to go on without it",
        ) from failures[0]
    return seen


def check_same_run(store: Store, found: str, identity: str) -> None:
    """Raise NotAStoreError, which names the store, if it is another run's."""
    if found != identity:
        raise NotAStoreError(
            f"{store.location} is a store of another run, not a tier of this one", expected=f"store {identity}",
            found=f"store {found}", next="give each run a place of its own; or leave that tier out",
        )


def no_checkpoint(stores: Sequence[Store], seen: Seen, step: int | None) -> NoCheckpointError:
    """The error where no tier has a checkpoint, or that one."""
    shown = ", ".join(map(str, reversed(seen.steps()[:10]))) or "none"
    return NoCheckpointError(
        "no tier has a checkpoint" if step is None else f"no tier has a checkpoint of step {step}",
        found=f"steps {shown}", tiers=", ".join(store.location for store in stores),
        next="check the list; to start fresh when there is no checkpoint, call latest() first",
    )


def open_nearest(stores: Sequence[Store], step: int | None) -> tuple[Store, int]:
    """The nearest tier that has `step`, or the newest one, with a manifest that can be read; and that step.

    raises  NoCheckpointError, NotAStoreError, StorageError
    """
    seen = look_at(stores)
    steps = [one for one in seen.steps() if step in (None, one)]
    if not steps:
        raise no_checkpoint(stores, seen, step)
    first = seen.candidates(steps[0])[0]
    return stores[first.tier], first.step
