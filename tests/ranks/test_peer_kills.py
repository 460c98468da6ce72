"""Trainers of three nodes save each step into the memory of all nodes, as one store.

Agents, servers and trainers are killed at random times, alone and together. The next job loads the previous generation
or the next one, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Ranks

from flowstone.store.peers.erasure import is_available
from memory_agent import agent_process, processes_of
from peer_nodes import agent_below, nodes_below

NODES = 3
HOWS = [
    pytest.param(2, id="two_copies"),
    pytest.param(
        [2, 1], id="parity",
        marks=pytest.mark.skipif(not is_available(), reason="ISA-L is not installed: pip install 'flowstone[parity]'"),
    ),
]
KILLS = ("both", "agent", "trainer", "server")
LONGEST_S = 0.2  # a few saves of this size


@pytest.fixture
def base() -> Iterator[Path]:
    with nodes_below(NODES) as place:
        yield place


class Told:
    """What ranks have said: the newest step that each word was about, and where they began."""

    def __init__(self, names: list[str]) -> None:
        words = [line.split() for name in names for line in name.splitlines() if len(line.split()) == 2]
        steps = {word: [int(step) for result, step in words if result == word and step.isdecimal()]
                 for word in ("loaded", "begun", "committed")}
        self.loaded = set(steps["loaded"])
        self.begun, self.committed = max(steps["begun"], default=0), max(steps["committed"], default=0)


def _play(base: Path, how: int | list[int], kills: int, seed: int) -> None:
    chance, committed, begun = random.Random(seed), 0, 0
    for number in range(kills):
        ranks = Ranks(NODES, "peer_acts", "train", str(base), how)
        _await(ranks, committed + chance.randint(1, 3))
        time.sleep(chance.random() * LONGEST_S)  # the moment of the kill is what this test draws
        kill, node = KILLS[number % len(KILLS)], chance.randrange(NODES)
        _strike(ranks, base, kill, node)
        time.sleep(chance.random() * LONGEST_S)
        for rank in range(NODES):
            ranks.kill(rank)
        events = Told([item.said for item in ranks.end()])
        where = f"seed {seed}, kill {number}, {kill} of node {node}"
        assert len(events.loaded) == 1, f"{where}: ranks load different steps, {events.loaded}"
        (loaded,) = events.loaded
        assert committed <= loaded <= max(begun, committed), f"{where}: {loaded} of {committed} to {begun}"
        committed, begun = max(events.committed, loaded), max(events.begun, loaded)
    ranks = Ranks(NODES, "peer_acts", "train", str(base), how)
    _await(ranks, begun + 2)  # and it goes on
    for rank in range(NODES):
        ranks.kill(rank)
    events = Told([item.said for item in ranks.end()])
    assert len(events.loaded) == 1
    assert committed <= min(events.loaded) <= begun


def _await(ranks: Ranks, step: int) -> None:
    """Until a rank was told that this step is committed."""
    deadline = time.monotonic() + 60.0
    while Told([ranks.said(rank) for rank in range(NODES)]).committed < step:
        if time.monotonic() > deadline or any(process.poll() is not None for process in ranks.processes):
            raise AssertionError("\n".join(f"--- rank {rank}\n{ranks.said(rank)}" for rank in range(NODES)))
        time.sleep(0.005)


def _strike(ranks: Ranks, base: Path, kind: str, node: int) -> None:
    agent = agent_process(agent_below(base, node))
    servers = [
        int(process.name) for process in processes_of(agent_below(base, node))
        if b"flowstone.agent.peers" in (process / "cmdline").read_bytes()
    ]
    assert len(servers) == 1, "one serves other nodes"
    if kind in ("both", "trainer"):
        ranks.kill(node)
    if kind in ("both", "agent", "server"):
        os.kill(servers[0] if kind == "server" else agent, signal.SIGKILL)


@pytest.mark.parametrize("how", HOWS)
def test_what_is_killed_at_any_instant_leaves_the_previous_generation_or_the_next(
    base: Path, how: int | list[int]
) -> None:
    _play(base, how, len(KILLS), 3)


@pytest.mark.soak
@pytest.mark.parametrize("how", HOWS)
def test_a_hundred_kills_leave_the_previous_generation_or_the_next(base: Path, how: int | list[int]) -> None:
    _play(base, how, 100, 11)
