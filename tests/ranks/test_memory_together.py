"""Several ranks of one node save into its memory: each has a segment there, and any number of ranks loads them."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Ranks, run

import flowstone as fs
from flowstone.store.memory.node_memory import NodeMemory
from memory_agent import agent_process, kill, own_agent

RUN = "memory://job"


@pytest.fixture
def agent() -> Iterator[Path]:
    with own_agent() as directory:
        yield directory


def _killed(size: int, *arguments: object) -> None:
    ended = Ranks(size, "memory_acts", "save_until_killed", *arguments).end()
    assert [rank.code for rank in ended] == [-signal.SIGKILL] * size, [rank.said for rank in ended]


@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 2), (2, 1)])
def test_ranks_that_are_killed_come_back_in_another_number(
    agent: Path, tmp_path: Path, saved: int, loaded: int
) -> None:
    _killed(saved, str(agent), RUN, str(tmp_path / "noted"), 3)
    names = NodeMemory("job").names("step-00000003")
    assert [name for name in names if name.startswith("rank-")] == [f"rank-{r:05d}.safetensors" for r in range(saved)]
    assert run(loaded, "memory_acts", "load", str(agent), RUN) == [[3, ""]] * loaded
    assert fs.open(RUN).verify().sound
    _killed(loaded, str(agent), RUN, str(tmp_path / "noted"), 5)  # they go on from step 3
    assert run(saved, "memory_acts", "load", str(agent), RUN) == [[5, ""]] * saved


def test_ranks_that_are_killed_at_any_instant_go_on_from_the_previous_or_the_next_step(
    agent: Path, tmp_path: Path
) -> None:
    chance, noted = random.Random(2), tmp_path / "noted"
    noted.write_text("0")
    for victim in (0, 1, 0):
        committed = int(noted.read_text())
        ranks = Ranks(2, "memory_acts", "save_until_killed", str(agent), RUN, str(noted), 0)
        deadline = time.monotonic() + 60.0
        while int(noted.read_text()) < committed + 2:
            assert time.monotonic() < deadline, "no rank has committed a step"
            time.sleep(0.002)
        time.sleep(chance.random() * 0.02)
        ranks.kill(victim)
        ranks.kill(1 - victim)
        ranks.end()
        committed = int(noted.read_text())
        [step, _], other = run(2, "memory_acts", "load", str(agent), RUN)  # type: ignore[misc]
        assert other == [step, ""]
        assert committed <= step <= committed + 2
    assert fs.open(RUN).verify().sound


def test_with_tiers_behind_memory_they_come_back_from_memory_else_from_the_disk(agent: Path, tmp_path: Path) -> None:
    stores = [RUN, str(tmp_path / "disk")]
    _killed(2, str(agent), stores, str(tmp_path / "noted"), 3)
    assert run(4, "memory_acts", "load", str(agent), stores) == [[3, RUN]] * 4
    kill(agent_process(agent), signal.SIGKILL)
    assert run(4, "memory_acts", "load", str(agent), stores) == [[3, stores[1]]] * 4
    assert fs.open(tmp_path / "disk").verify().sound
    NodeMemory("job").make_directory()  # the next agent takes over the socket that the killed one has left


def test_an_agent_that_is_killed_costs_a_save_at_most(agent: Path) -> None:
    for result in run(2, "memory_acts", "outlive_the_agent", str(agent)):
        assert isinstance(result, list)
        assert result[0] == result[-1] == "", result
        assert all("memory agent" in item for item in result if item), result
    assert run(2, "memory_acts", "load", str(agent), RUN) == [[4, ""]] * 2
