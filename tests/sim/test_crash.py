"""Stop, or fail, at changes of every scenario (selected by sim_seeds.py); then the promises of docs/ORDERING.md hold.

A failure prints SIM=<number>; `SIM=<number> pytest tests/sim` repeats exactly that case.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from sim_cases import MODES, SCENARIOS, Case, Moment, Simulation
from sim_seeds import SOAK_SEEDS, Seeds, seeds_of
from sim_world import STORE

import flowstone as fs
from flowstone.format.codec import CODECS

SHOWN_MAX = 5
ALL = [
    pytest.param(index, mode, id=f"{mode}-{scenario.name}")
    for mode in MODES for index, scenario in enumerate(SCENARIOS)
    if mode in scenario.modes and (mode != "freeze" or scenario.ranks > 1)
]
# Without the longest, whose parts others play.
_LONG = {"kill-team_first_save", "error-team_first_save", "kill-team_life", "error-team_life", "freeze-team_life"}
PLAYED = [item for item in ALL if item.id not in _LONG]
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
    _run(scenario, mode, seeds_of(SCENARIOS[scenario].name, mode), scratch)


def _settled(moment: Moment) -> tuple[object, ...]:
    """All of it but what a segment holds that the engine is writing: of that a power loss leaves any mixture."""
    nodes, now = moment.image.nodes, moment.image.now
    return nodes, {number: now[number] for number in now if not nodes[number].bulk}, moment.oracle


@pytest.mark.parametrize("name", ["second_save", "saves_beside_training", "team_second_save", "dcp_team_second_save"])
def test_what_is_seen_at_a_change_is_what_a_stop_there_leaves(name: str, scratch: Path) -> None:
    """So one play to the end stands for as many losses of power as it has changes."""
    number = [s.name for s in SCENARIOS].index(name)
    simulation = Simulation(number, scratch)
    for cases in simulation.cases(MODES["error"], lambda position: (0,)):
        seen, left = (_settled(moment) for moment in simulation.seen_and_left(cases[0].at))
        assert seen == left, f"at change {cases[0].at}"


@pytest.mark.parametrize(("name", "codecs"), [
    ("near", {"xor", "raw"}), ("team_near", {"xor", "raw"}), ("derived", {"raw", "cast"}),
    ("derived_compacted", {"raw", "cast"}), ("team_derived", {"raw", "cast"}),
])
def test_scenarios_of_codecs_use_these(name: str, codecs: set[str], scratch: Path) -> None:
    (index,) = (number for number, scenario in enumerate(SCENARIOS) if scenario.name == name)
    simulation = Simulation(index, scratch)
    checkpoint = fs.open(simulation.play_through() / STORE)
    names = {CODECS[codec].name for codec in checkpoint.index.chunks.codecs().tolist()}
    assert names >= codecs
    refers = any(row.home is not None for row in checkpoint.manifest.segments)
    assert refers != (name in ("derived", "team_derived"))


@pytest.mark.parametrize(("name", "waits"), [
    ("team_held", 2), ("team_held_two_tries", 2), ("team_held_overlapping", 4), ("team_second_save", 0),
])
def test_scenarios_of_saves_that_wait_have_them(
    name: str, waits: int, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Simulation([s.name for s in SCENARIOS].index(name), scratch).play_through()
    assert sum("save waits until all ranks have called it" in message for message in caplog.messages) == waits


@pytest.mark.skipif(ONLY is not None, reason="SIM repeats one case")
def test_deletion_is_durable_before_the_next_writer_sweeps_it(scratch: Path) -> None:
    """Found by `make soak`: step-2 came back with its manifest and without its objects."""
    simulation = Simulation([s.name for s in SCENARIOS].index("retention"), scratch)
    cases = simulation.cases(MODES["kill"], lambda position: range(12), start=".deleting-00000002")
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
