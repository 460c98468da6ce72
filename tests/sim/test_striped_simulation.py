"""The scenarios of docs/ORDERING.md over two paths of a simulated disk: cut off, refused and without power at each
change of either path, the promises hold; and no path keeps segments that no checkpoint names.
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
from sim_world import STORE, Ledger, Watching

from flowstone.config import EngineOptions
from flowstone.store.local import LocalStore
from flowstone.store.striped.store import StripedStore
from flowstone.store.system import System

OTHER = Path("other/gpt")  # in the sandbox: the second path

# Seeds of some changes, as test_crash.py has them for scenarios whose parts others play.
SEEDS: dict[str, Seeds] = {
    "power": lambda at: (0, 1, 3 + at) if at % 2 == 0 else (2,),
    "kill": lambda at: (0,) if at % 4 == 1 else (),
    "error": lambda at: (0,) if at % 16 == 15 else (),  # 31 is the last sync of a second save
}
SOAK_SEEDS: dict[str, Seeds] = {
    "power": lambda at: range(24), "kill": lambda at: range(4), "error": lambda at: range(4),
}
PLAYED = ["first_save", "second_save", "retention", "rewind"]


class WatchedStriped(Watching, StripedStore):
    def __init__(self, root: Path, options: EngineOptions, system: System) -> None:
        other = root.parent.parent / OTHER
        super().__init__([LocalStore(root, options, system), LocalStore(other, options, system)], now=lambda: 0.0)
        self.options = options


@pytest.fixture(autouse=True)
def _two_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Callable[..., None] = sim_world.check

    def check(sandbox: Path, ledger: Ledger, **more: Any) -> None:
        whole(sandbox, ledger, **more)
        if more.get("go_on", True):
            _check_paths(sandbox)

    told_of: Callable[..., None] = sim_cases._check_told

    def check_told(told: Exception | None, hurt: Any, disk: Any) -> None:
        if told is not None or hurt.store.paths()[1].is_usable:
            told_of(told, hurt, disk)  # else the first path has taken what the other one refused

    monkeypatch.setattr(sim_cases, "_check_told", check_told)
    monkeypatch.setattr(sim_world, "WatchedStore", WatchedStriped)
    monkeypatch.setattr(sim_cases, "check", check)


def _check_paths(sandbox: Path) -> None:
    store = WatchedStriped(sandbox / STORE, EngineOptions(), System())
    named = {store.segments_of(name) for name in os.listdir(sandbox / STORE)}
    there = {name for name in os.listdir(sandbox / OTHER) if name.startswith("segments-")}
    store.close()
    assert there <= named, f"no checkpoint names {there - named}"


def _run(name: str, mode: str, seeds: Seeds, scratch: Path) -> None:
    simulation = Simulation([one.name for one in SCENARIOS].index(name), scratch)
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


def test_segments_that_a_killed_writer_removed_are_gone_before_the_manifest_that_names_them(scratch: Path) -> None:
    """Found by `make soak`: after a power loss they were back, and no checkpoint named them."""
    simulation = Simulation([one.name for one in SCENARIOS].index("retention"), scratch)
    cases = simulation.cases(MODES["kill"], lambda at: range(4), start="segments-00000002")
    for violation in [v for group in itertools.islice(cases, 4) for v in simulation.run(group)]:
        raise violation


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["power", "kill", "error"])
@pytest.mark.parametrize("name", [*PLAYED, "deltas", "sweep", "life", "deltas_resumed", "team_first_save", "team_life"])
def test_previous_or_new_step_survives_on_two_paths_many_seeds(name: str, mode: str, scratch: Path) -> None:
    _run(name, mode, SOAK_SEEDS[mode], scratch)
