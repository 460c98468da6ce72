"""The cases of a scenario that run: in an ordinary run, and in `make soak`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim_cases import EACH_WAY, SCENARIOS

Seeds = Callable[[int], Sequence[int]]
# By mode, the seeds of each change. Power: 0 to 2 are the extremes, and 2, everything written
# survives, is what a kill checks first. Error: which errno, and how it is learnt of. Freeze: whether the next job
# goes on, or the same one; and then, whether what was to be changed can be, and after how many changes of others.
SEEDS: dict[str, Seeds] = {
    "power": lambda position: (0, 1, 3), "kill": lambda position: (0,), "error": lambda position: (position % 4,),
    "freeze": lambda position: (position % 3,),
}
# Of these, what an ordinary run plays: each loss of power in one way, and every fourth stop of a rank or error. Those
# are runs of the whole scenario and of the job after it; neighbours differ by one change.
PLAYED_SEEDS: dict[str, Seeds] = {
    "power": lambda index: ((0, 3, 1)[index % 3],),
    "kill": lambda position: (0,) if position % 4 == 0 else (),
    "error": lambda position: (position // 4 % 4,) if position % 4 == 1 else (),
    "freeze": lambda position: (position // 4 % 3,) if position % 4 == 2 else (),
}
TRIES_SEEDS = PLAYED_SEEDS | {"freeze": lambda position: (3 + position // 2 % 14,) if position % 2 == 0 else ()}
SOME_SEEDS: dict[str, Seeds] = {  # some of the changes each: what they consist of, others play at all
    "power": lambda position: (0, 3 + position) if position % 5 == 0 else (),
    "kill": lambda position: (0,) if position % 7 == 1 else (),
    "error": lambda position: (position // 7 % 4,) if position % 7 == 2 else (),
    "freeze": lambda position: (position // 7 % 3,) if position % 7 == 3 else (),
}
SAMPLED_SEEDS: dict[str, Seeds] = {  # a few of the changes each: the order of writes is that of other saves
    "power": lambda position: (0, 3 + position) if position % 12 == 0 else (),
    "kill": lambda position: (0,) if position % 20 == 1 else (),
    "error": lambda position: (position // 4 % 4,) if position % 20 == 2 else (),
    "freeze": lambda position: (position // 4 % 3,) if position % 24 == 3 else (),
}
LIFE_SEEDS: dict[str, Seeds] = SOME_SEEDS | {"power": lambda position: (0 if position % 2 else 3 + position,)}
_LONG_SAVES = ("saves_beside_training", "deltas", "team_deltas")
_SEEDS_OF = {
    "life": LIFE_SEEDS, "team_life": LIFE_SEEDS, "team_two_tries": TRIES_SEEDS,
    "team_held_two_tries": TRIES_SEEDS,
    **dict.fromkeys((
        "team_overlapping", "deltas_resumed", "team_deltas_resumed", "deltas_compacted", "team_held_overlapping",
    ), SOME_SEEDS),
    **dict.fromkeys(_LONG_SAVES, SOME_SEEDS | {"power": PLAYED_SEEDS["power"]}),
    **dict.fromkeys(("deltas_rewound", "deltas_fallback", "team_deltas_compacted"), SAMPLED_SEEDS),
    **{scenario.name: SAMPLED_SEEDS for scenario in SCENARIOS if scenario.coding is not None},
}
SOAK_SEEDS: dict[str, Seeds] = {
    "power": lambda position: (*range(3), *range(EACH_WAY, EACH_WAY + 57)), "kill": lambda position: range(8),
    "error": lambda position: range(4), "freeze": lambda position: range(15),
}


def seeds_of(scenario: str, mode: str) -> Seeds:
    """The seeds of each change in an ordinary run."""
    return _SEEDS_OF.get(scenario, PLAYED_SEEDS)[mode]


def mutants_seeds_of(scenario: str, mode: str) -> Seeds:
    """The same where a mutant has to be found out: of shorter scenarios at each change."""
    if scenario in _LONG_SAVES and mode == "power":
        return SEEDS[mode]
    return _SEEDS_OF.get(scenario, SEEDS)[mode]
