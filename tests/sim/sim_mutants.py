"""The library with one step of its order of writes left out or moved."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import pytest
from sim_cases import MODES, SCENARIOS, Simulation
from sim_seeds import mutants_seeds_of

Changes = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`changes` are pairs of text, in function `name` of `owner`; `scenario` and `mode` must notice.

    start  where in the scenario to begin, by a part of a path
    seeds  of each change; none: those of an ordinary run
    also   changes of other functions, to which something has moved
    """

    owner: object
    name: str
    changes: Changes
    scenario: str
    mode: str = "power"
    start: str = ""
    seeds: range | None = None
    also: tuple[tuple[object, str, Changes], ...] = ()


def is_found_out(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, scratch: Path) -> bool:
    """Whether a case of its scenario violates a promise. Where nothing is stopped and nothing fails, it must work."""
    for owner, name, changes in ((mutant.owner, mutant.name, mutant.changes), *mutant.also):
        monkeypatch.setattr(owner, name, mutated(owner, name, changes))
    scenario = next(index for index, scenario in enumerate(SCENARIOS) if scenario.name == mutant.scenario)
    simulation = Simulation(scenario, scratch)
    seeds = mutants_seeds_of(mutant.scenario, mutant.mode) if mutant.seeds is None else lambda index: mutant.seeds or ()
    return any(simulation.run(group) for group in simulation.cases(MODES[mutant.mode], seeds, mutant.start))


def mutated(owner: object, name: str, changes: Iterable[tuple[str, str]]) -> FunctionType:
    """Function `name` of `owner`, with each first text of `changes` replaced by the second; each is in it once."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert source.count(old) == 1, f"{name} has no {old!r} any more: bring the mutant up to date"
        source = source.replace(old, new)
    scope: dict[str, FunctionType] = {}
    code = compile(source, f"<mutant of {name}>", "exec", __future__.annotations.compiler_flag)
    exec(code, function.__globals__, scope)
    return scope[name]
