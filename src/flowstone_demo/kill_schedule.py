"""The schedule of kills, which depends only on a seed. The kills are spread over the run, and some of them are during a
save.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from flowstone_demo.sizes import DemoSize


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """One planned SIGKILL.

    after_step  the kill is due some time after this step was reported
    aimed       whether to wait, in addition, until the next save has begun
    share       how long to wait after that, as a fraction of the duration of the shortest save if `aimed`, and
                otherwise of a step
    """

    after_step: int
    aimed: bool
    share: float


def plan_kills(form: DemoSize, seed: int) -> tuple[PlannedKill, ...]:
    """Plan `form.kills` kills. The run is divided into as many equal parts, and each has one kill. `form.aimed` of them
    wait for a save.
    """
    chance = random.Random(seed)
    aimed = [position < form.aimed for position in range(form.kills)]
    chance.shuffle(aimed)
    # one save before the kills is measured, and one after them ends the run
    first, end = 2, form.steps // form.save_every - 1
    assert end - first >= form.kills, "each part of the run holds a save"
    parts = [(first + (end - first) * part // form.kills) * form.save_every for part in range(form.kills + 1)]
    steps = [chance.randrange(low, high) for low, high in pairwise(parts)]
    return tuple(
        PlannedKill(_before_save(step, form.save_every) if aim else step, aim, _share(chance, aim))
        for step, aim in zip(steps, aimed, strict=True)
    )


def one_more(form: DemoSize, seed: int, number: int) -> PlannedKill:
    """Plan an additional kill, at the first save of a process. `number`: how many kills there were so far."""
    chance = random.Random(f"{seed} {number}")
    return PlannedKill(form.save_every - 1, True, _share(chance, True))


def _before_save(step: int, save_every: int) -> int:
    """The last step before the next save after `step`, so that the supervisor begins in time to wait for that save."""
    return step - step % save_every + save_every - 1


def _share(chance: random.Random, aimed: bool) -> float:
    """A random fraction. For a save it is never near 1, as the save may be faster than all before, and would then be
    complete.
    """
    return chance.uniform(0.0, 0.6) if aimed else chance.random()
