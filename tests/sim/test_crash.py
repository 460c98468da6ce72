"""Stop, or fail, at every change of every scenario; afterwards every promise of docs/ORDERING.md holds.

A failure prints SIM=<number>; `SIM=<number> pytest tests/sim` repeats exactly that case.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from sim_cases import EACH_WAY, MODES, SCENARIOS, Case, Moment, Simulation
from sim_world import STORE

import flowstone as fs
from flowstone.format.codec import CODECS

SHOWN_MAX = 5
Seeds = Callable[[int], Sequence[int]]
# By mode, the seeds of each change. Power: 0 to 2 are the extremes, and 2, everything written
# survives, is what a kill checks first. Error: which errno, and how it is learnt of. Freeze: whether the next job
# goes on, or the same one; and then, whether what was to be changed can be, and after how many changes of others.
SEEDS: dict[str, Seeds] = {
    "power": lambda at: (0, 1, 3), "kill": lambda at: (0,), "error": lambda at: (at % 4,),
    "freeze": lambda at: (at % 3,),
}
TRIES_SEEDS = SEEDS | {"freeze": lambda at: (3 + 2 * (at % 7), 4 + 2 * (at % 6))}
OVERLAPPING_SEEDS: dict[str, Seeds] = {  # some of the changes each
    "power": lambda at: (0, 3 + at) if at % 3 == 0 else (),
    "kill": lambda at: (0,) if at % 4 == 1 else (),
    "error": lambda at: (at // 4 % 4,) if at % 4 == 2 else (),
    "freeze": lambda at: (at // 4 % 3,) if at % 4 == 3 else (),
}
SAMPLED_SEEDS: dict[str, Seeds] = {  # a few of the changes each: the order of writes is that of other saves
    "power": lambda at: (0, 3 + at) if at % 12 == 0 else (),
    "kill": lambda at: (0,) if at % 20 == 1 else (),
    "error": lambda at: (at // 4 % 4,) if at % 20 == 2 else (),
    "freeze": lambda at: (at // 4 % 3,) if at % 24 == 3 else (),
}
LIFE_SEEDS: dict[str, Seeds] = SEEDS | {"power": lambda at: (0, 3 + at)}
SEEDS_OF = {
    "life": LIFE_SEEDS, "team_life": LIFE_SEEDS, "team_two_tries": TRIES_SEEDS, "team_overlapping": OVERLAPPING_SEEDS,
    **dict.fromkeys(("deltas_resumed", "team_deltas_resumed", "deltas_compacted"), OVERLAPPING_SEEDS),
    **{scenario.name: SAMPLED_SEEDS for scenario in SCENARIOS if scenario.coding is not None},
}
SOAK_SEEDS: dict[str, Seeds] = {
    "power": lambda at: (*range(3), *range(EACH_WAY, EACH_WAY + 57)), "kill": lambda at: range(8),
    "error": lambda at: range(4), "freeze": lambda at: range(15),
}
ALL = [
    pytest.param(at, mode, id=f"{mode}-{scenario.name}")
    for mode in MODES for at, scenario in enumerate(SCENARIOS)
    if mode in scenario.modes and (mode != "freeze" or scenario.ranks > 1)
]
# Without the longest, whose parts others play.
_LONG = {"kill-team_first_save", "error-team_first_save", "kill-team_life", "error-team_life", "freeze-team_life"}
PLAYED = [one for one in ALL if one.id not in _LONG]
ONLY = Case.of(int(os.environ["SIM"])) if "SIM" in os.environ else None


def _run(scenario: int, mode: str, seeds: Seeds, scratch: Path) -> None:
    simulation = Simulation(scenario, scratch)
    violations, count = [], 0
    for cases in simulation.cases(MODES[mode], seeds):
        violations += simulation.run(cases)
        count += len(cases)
    unlike = {violation.what.partition("\n")[0]: violation for violation in reversed(violations)}
    shown = "\n\n".join(str(violation) for violation in list(unlike.values())[:SHOWN_MAX])
    assert not violations, f"{len(violations)} of {count} cases violate a promise\n{shown}"


@pytest.mark.skipif(ONLY is not None, reason="SIM repeats one case")
@pytest.mark.parametrize(("scenario", "mode"), PLAYED)
def test_previous_or_new_step_survives(scenario: int, mode: str, scratch: Path) -> None:
    name = SCENARIOS[scenario].name
    _run(scenario, mode, SEEDS_OF.get(name, SEEDS)[mode], scratch)


def _settled(moment: Moment) -> tuple[object, ...]:
    """All of it but what a segment holds that the engine is writing: of that a power loss leaves any mixture."""
    nodes, now = moment.image.nodes, moment.image.now
    return nodes, {number: now[number] for number in now if not nodes[number].bulk}, moment.ledger


@pytest.mark.parametrize("name", ["second_save", "saves_beside_training", "team_second_save", "dcp_team_second_save"])
def test_what_is_seen_at_a_change_is_what_a_stop_there_leaves(name: str, scratch: Path) -> None:
    """So one play to the end stands for as many losses of power as it has changes."""
    number = [s.name for s in SCENARIOS].index(name)
    simulation = Simulation(number, scratch)
    for cases in simulation.cases(MODES["error"], lambda at: (0,)):
        seen, left = (_settled(moment) for moment in simulation.seen_and_left(cases[0].at))
        assert seen == left, f"at change {cases[0].at}"


@pytest.mark.parametrize(("name", "codecs"), [
    ("near", {"xor", "raw"}), ("team_near", {"xor", "raw"}), ("derived", {"raw", "cast"}),
    ("derived_compacted", {"raw", "cast"}), ("team_derived", {"raw", "cast"}),
])
def test_scenarios_of_codecs_use_these(name: str, codecs: set[str], scratch: Path) -> None:
    (at,) = (at for at, scenario in enumerate(SCENARIOS) if scenario.name == name)
    simulation = Simulation(at, scratch)
    checkpoint = fs.open(simulation.play_through() / STORE)
    found = {CODECS[one].name for one in checkpoint.index.chunks.codecs().tolist()}
    assert found >= codecs
    refers = any(row.home is not None for row in checkpoint.manifest.segments)
    assert refers != (name in ("derived", "team_derived"))


@pytest.mark.skipif(ONLY is not None, reason="SIM repeats one case")
def test_deletion_is_durable_before_the_next_writer_sweeps_it(scratch: Path) -> None:
    """Found by `make soak`: step-2 came back with its manifest and without its objects."""
    simulation = Simulation([s.name for s in SCENARIOS].index("retention"), scratch)
    cases = simulation.cases(MODES["kill"], lambda at: range(12), start=".deleting-00000002")
    for violation in [v for group in itertools.islice(cases, 3) for v in simulation.run(group)]:
        raise violation


@pytest.mark.soak
@pytest.mark.parametrize(("scenario", "mode"), ALL)
def test_previous_or_new_step_survives_many_seeds(scenario: int, mode: str, scratch: Path) -> None:
    _run(scenario, mode, SOAK_SEEDS[mode], scratch)


@pytest.mark.skipif(ONLY is None, reason="set SIM to the number of a case")
def test_case_of_sim(scratch: Path) -> None:
    assert ONLY is not None
    for violation in Simulation(ONLY.scenario, scratch).run([ONLY]):
        raise violation


def test_numbers_name_cases() -> None:
    case = Case(scenario=7, mode=2, at=123, seed=45)
    assert Case.of(case.number) == case
