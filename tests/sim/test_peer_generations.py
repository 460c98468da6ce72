"""Agents, servers and trainers of several nodes are killed at each operation, with copies and with parity.

They are killed alone and together. After each kill all ranks load the same generation, the previous one or the next,
bit for bit, and continue.

An ordinary run has some of the operations, `make soak` all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from sim_nodes import Strike, World, failures, job

import flowstone as fs
from flowstone.agent.parities import Parity
from flowstone.agent.runs import MemoryRun
from flowstone.store.peers.erasure import is_available

ROWS = 60_000
MISSING = "ISA-L is not installed: pip install 'flowstone[parity]'"
KILLS = {
    "agent": frozenset({"agent"}), "trainer": frozenset({"trainer"}), "both": frozenset({"agent", "trainer"}),
    "server": frozenset({"server"}),
}


@dataclass(frozen=True)
class Scenario:
    """So many nodes keep each other's.

    lost   how many are struck at once
    every  an ordinary run has one of so many operations
    """

    name: str
    nodes: int
    how: Mapping[str, Any]
    lost: int = 1
    every: int = 40


SCENARIOS = (
    Scenario("two_copies", 3, {"replicas": 2}),
    Scenario("parity", 3, {"parity": (2, 1)}, every=48),
    Scenario("parity_of_two_rows", 4, {"parity": (2, 2)}, lost=2, every=100),
)
PLAYED = [
    pytest.param(run, id=run.name, marks=pytest.mark.skipif("parity" in run.how and not is_available(), reason=MISSING))
    for run in SCENARIOS
]


@dataclass
class Promised:
    """The newest step that a rank was told is committed, and the newest one that any has begun."""

    committed: int = 0
    begun: int = 0
    loaded: list[int] = field(default_factory=list)


def state_of(rank: int, size: int, step: int) -> dict[str, object]:
    begin, end = ROWS * rank // size, ROWS * (rank + 1) // size
    rows = torch.arange(begin, end, dtype=torch.float64) + step * 1e6
    return {"w": fs.Shard(rows, (ROWS,), (begin,)), "step": step, "own": fs.PerRank({"rank": rank})}


def train(world: World, how: Mapping[str, Any], promised: Promised, to: int, strike: Strike | None = None) -> None:
    """Go on from what there is."""

    def act(rank: int, checkpointer: fs.Checkpointer) -> None:
        done = 0
        if checkpointer.latest() is not None:
            state = state_of(rank, world.size, 0)
            done = checkpointer.load(state).step
            wanted = state_of(rank, world.size, done)
            assert torch.equal(state["w"].tensor, wanted["w"].tensor), f"not what step {done} was"  # type: ignore[attr-defined]
            assert (state["step"], state["own"].value) == (done, {"rank": rank})  # type: ignore[attr-defined]
        promised.loaded.append(done)
        for step in range(done + 1, to + 1):
            promised.begun = max(promised.begun, step)
            save = checkpointer.save(step, state_of(rank, world.size, step))
            while not save.committed.done():
                world.turns.check(rank)
                wait_futures([save.committed], timeout=0.01)
            save.committed.result()
            promised.committed = max(promised.committed, step)

    with job(world, how, 0 if strike is None else strike.at) as caught:
        outcomes = caught.each(act, strike)
    for error in failures(outcomes):
        raise error
    if strike is None:
        assert not any(outcomes), outcomes


def play(scenario: Scenario, strike: Strike | None) -> int:
    """A job of two generations that may be struck in the second one, and what the next one finds. How many operations.
    """
    world = World(scenario.nodes)
    train(world, scenario.how, Promised(), 1)
    promised = Promised(1, 1)
    train(world, scenario.how, promised, 3, strike)
    count = len(world.operations)
    if strike is None:
        assert promised.committed == 3
    promises = Promised()
    train(world, scenario.how, promises, promised.begun + 1)
    assert len(set(promises.loaded)) == 1, f"ranks load different generations: {promises.loaded}"
    assert promised.committed <= promises.loaded[0] <= promised.begun, f"loads step {promises.loaded[0]}; {promised}"
    assert promises.committed == promised.begun + 1, "the next job goes on"
    _check_kept(world, scenario)
    return count


def _check_kept(world: World, scenario: Scenario) -> None:
    """No draft is left once that job has ended, and memory for no more than two generations."""
    world.begin(None, 0)
    for agent in world.agents:
        assert agent is not None
        run = agent.runs.of("run")
        assert not [name for name in run.contents.names() if name.startswith((".saving", ".deleting"))]
        assert len(run.steps()) <= 2, run.steps()


def campaign(scenario: Scenario, kill: str, *, every: int) -> None:
    count, first = play(scenario, None), sorted(KILLS).index(kill)
    assert count > 100
    for offset in range(first * every // len(KILLS), count, every):
        lost = tuple((offset + index) % scenario.nodes for index in range(scenario.lost))
        strike = Strike(offset, lost, KILLS[kill], after=offset // every % 2 == 1)
        try:
            play(scenario, strike)
        except BaseException as error:
            raise AssertionError(f"{scenario.name}, {strike}: {error!r}") from error


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("scenario", PLAYED)
def test_a_kill_leaves_the_previous_generation_or_the_next(scenario: Scenario, kill: str) -> None:
    campaign(scenario, kill, every=scenario.every)


@pytest.mark.soak
@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("scenario", PLAYED)
def test_a_kill_at_any_operation_leaves_the_previous_generation_or_the_next(scenario: Scenario, kill: str) -> None:
    campaign(scenario, kill, every=1)


# What the simulation would find


def _found_out(scenario: Scenario, kill: str) -> None:
    play(scenario, None)  # without a kill it does no harm
    with pytest.raises(AssertionError):
        campaign(scenario, kill, every=5)


def test_a_commit_that_does_not_wait_for_copies_is_found_out() -> None:
    with mock.patch("flowstone.store.peers.store.send"):
        _found_out(SCENARIOS[0], "both")


def test_agents_that_drop_the_generation_that_is_whole_together_are_found_out() -> None:
    def begin_draft(run: MemoryRun) -> None:
        for name in [name for name in run.contents.names() if name.startswith("step-")]:
            run.remove_all(name)

    with mock.patch.object(MemoryRun, "begin_draft", begin_draft):
        _found_out(SCENARIOS[0], "trainer")


@pytest.mark.skipif(not is_available(), reason=MISSING)
def test_parity_that_adds_nothing_is_found_out() -> None:
    def add(parity: Parity, column: str, factor: int, offset: int, part: bytearray) -> None:
        parity._left[column] -= len(part)

    with mock.patch.object(Parity, "add", add):
        _found_out(SCENARIOS[1], "agent")
