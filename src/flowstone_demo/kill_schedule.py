"""The kill schedule, made from a seed: kills are spread over the run, and some fall inside a save."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from flowstone_demo.sizes import DemoSize


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """One planned SIGKILL.

    after_step  it is armed once this step has been reported
    aimed       wait for the next save to begin
    share       how long to wait then: a share of the shortest save's duration if aimed, of a step's
                duration if not
    """

    after_step: int
    aimed: bool
    share: float


def plan_kills(form: DemoSize, seed: int) -> tuple[PlannedKill, ...]:
    """`form.kills` kills, one in each equal part of the run; `form.aimed` of them wait for a save. Pure."""
    chance = random.Random(seed)
    aimed = [position < form.aimed for position in range(form.kills)]
    chance.shuffle(aimed)
    first, end = 2, form.steps // form.save_every - 1  # a save to measure before, one to end with
    assert end - first >= form.kills, "each part of the run holds a save"
    parts = [(first + (end - first) * part // form.kills) * form.save_every for part in range(form.kills + 1)]
    steps = [chance.randrange(low, high) for low, high in pairwise(parts)]
    return tuple(
        PlannedKill(_before_save(step, form.save_every) if aim else step, aim, _share(chance, aim))
        for step, aim in zip(steps, aimed, strict=True)
    )


def one_more(form: DemoSize, seed: int, number: int) -> PlannedKill:
    """A kill beyond the plan, at the first save of a process. Pure; `number` of kills so far."""
    chance = random.Random(f"{seed} {number}")
    return PlannedKill(form.save_every - 1, True, _share(chance, True))


def _before_save(step: int, save_every: int) -> int:
    """The last step before the save that follows `step`, so that watching for it begins in time."""
    return step - step % save_every + save_every - 1


def _share(chance: random.Random, aimed: bool) -> float:
    """Never the very end of a save: it may be faster than the shortest so far, and then nothing is torn."""
    return chance.uniform(0.0, 0.6) if aimed else chance.random()
