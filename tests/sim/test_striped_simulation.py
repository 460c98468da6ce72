"""The scenarios of docs/ORDERING.md over two and three paths of a simulated disk.

They are cut off, refused and without power at each change of any path. The promises hold, and no path keeps segments
that no checkpoint names.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sim_cases
import sim_world
from sim_cases import MODES, SCENARIOS, Simulation
from sim_seeds import Seeds
from sim_world import STORE, Oracle, Watching

from flowstone.config import EngineOptions
from flowstone.store.local import LocalStore
from flowstone.store.striped.store import StripedStore
from flowstone.store.system import System

OTHERS = Path("other/gpt"), Path("third/gpt")  # in the sandbox: the further paths

# Seeds of some changes, as test_crash.py has them for scenarios whose parts others play.
SEEDS: dict[str, Seeds] = {
    "power": lambda index: ((0, 3 + index), (1,), (2,))[index % 3],
    "kill": lambda position: (0,) if position % 4 == 1 else (),
    "error": lambda position: (0,) if position % 16 == 15 else (),  # 31 is the last sync of a second save
}
SOAK_SEEDS: dict[str, Seeds] = {
    "power": lambda position: range(24), "kill": lambda position: range(4), "error": lambda position: range(4),
}
THREE_SEEDS: dict[str, Seeds] = {
    "power": lambda index: (0, 3 + index) if index % 4 == 0 else (), "kill": lambda i: (0,) if i % 4 == 1 else (),
    "error": lambda position: (position // 4 % 4,) if position % 4 == 2 else (),
}
PLAYED = ["first_save", "second_save", "retention", "rewind"]


class WatchedStriped(Watching, StripedStore):
    further, given = OTHERS[:1], (None, None)  # paths and weights

    def __init__(self, root: Path, options: EngineOptions, system: System) -> None:
        paths = [root, *(root.parent.parent / other for other in self.further)]
        super().__init__([LocalStore(path, options, system) for path in paths], self.given, now=lambda: 0.0)
        self.options = options


class WatchedThree(WatchedStriped):
    """What the second path refuses goes to the third, and the other way."""

    further, given = OTHERS, (0.0, 1.0, 1.0)


@pytest.fixture(autouse=True)
def _two_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Callable[..., None] = sim_world.check

    def check(sandbox: Path, oracle: Oracle, **more: Any) -> None:
        whole(sandbox, oracle, **more)
        if more.get("proceed", True):
            _check_paths(sandbox)

    told_of: Callable[..., None] = sim_cases._check_told

    def check_told(error: Exception | None, hurt: Any, disk: Any) -> None:
        paths = [path for job in getattr(hurt, "members", [hurt]) for path in job.store.paths().values()]
        if error is not None or all(path.is_usable for path in paths):
            told_of(error, hurt, disk)  # else another path has taken what one refused

    monkeypatch.setattr(sim_cases, "_check_told", check_told)
    monkeypatch.setattr(sim_world, "WatchedStore", WatchedStriped)
    monkeypatch.setattr(sim_cases, "check", check)


def _check_paths(sandbox: Path) -> None:
    store = sim_world.WatchedStore(sandbox / STORE, EngineOptions(), System())  # type: ignore[arg-type]
    named = {store.segments_of(name) for name in os.listdir(sandbox / STORE)}  # type: ignore[attr-defined]
    paths = [sandbox / other for other in OTHERS if (sandbox / other).exists()]
    there = {name for path in paths for name in os.listdir(path) if name.startswith("segments-")}
    store.close()
    assert there <= named, f"no checkpoint names {there - named}"


def _run(name: str, mode: str, seeds: Seeds, scratch: Path) -> None:
    simulation = Simulation([scenario.name for scenario in SCENARIOS].index(name), scratch)
    violations, count = [], 0
    for cases in simulation.cases(MODES[mode], seeds):
        violations += simulation.run(cases)
        count += len(cases)
    assert not violations, f"{len(violations)} of {count} cases violate a promise\n{violations[0]}"
    assert count


@pytest.mark.parametrize("mode", ["power", "kill", "error"])
@pytest.mark.parametrize("name", PLAYED)
def test_previous_or_new_step_survives_on_two_paths(name: str, mode: str, scratch: Path) -> None:
    _run(name, mode, SEEDS[mode], scratch)


@pytest.mark.parametrize("mode", ["power", "kill", "error"])
@pytest.mark.parametrize("name", ["first_save", "second_save", "retention"])
def test_previous_or_new_step_survives_on_three_paths_one_of_which_refuses(
    name: str, mode: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_world, "WatchedStore", WatchedThree)
    _run(name, mode, THREE_SEEDS[mode], scratch)


def test_segments_that_a_killed_writer_removed_are_gone_before_the_manifest_that_names_them(scratch: Path) -> None:
    """Found by `make soak`: after a power loss they were back, and no checkpoint named them."""
    simulation = Simulation([scenario.name for scenario in SCENARIOS].index("retention"), scratch)
    cases = simulation.cases(MODES["kill"], lambda position: range(4), start="segments-00000002")
    for violation in [v for group in itertools.islice(cases, 4) for v in simulation.run(group)]:
        raise violation


def test_links_that_are_not_needed_do_not_come_back(scratch: Path) -> None:
    """Found by `make soak`: a step had a link to a segment that no chunk of it was in."""
    simulation = Simulation([scenario.name for scenario in SCENARIOS].index("deltas"), scratch)
    cases = simulation.cases(MODES["power"], lambda position: range(8), start="step-00000054")
    for violation in [v for group in itertools.islice(cases, 2) for v in simulation.run(group)]:
        raise violation


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["power", "kill", "error"])
@pytest.mark.parametrize("name", [*PLAYED, "deltas", "sweep", "life", "deltas_resumed", "team_first_save", "team_life"])
def test_previous_or_new_step_survives_on_two_paths_many_seeds(name: str, mode: str, scratch: Path) -> None:
    _run(name, mode, SOAK_SEEDS[mode], scratch)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["power", "kill", "error"])
@pytest.mark.parametrize("name", [*PLAYED, "deltas", "sweep", "life"])
def test_previous_or_new_step_survives_on_three_paths_many_seeds(
    name: str, mode: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_world, "WatchedStore", WatchedThree)
    _run(name, mode, SOAK_SEEDS[mode], scratch)
