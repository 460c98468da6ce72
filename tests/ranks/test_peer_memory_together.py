"""Ranks of several nodes save into their memory as one store; nodes are lost, and others take their place."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from memory_agent import agent_process, kill, memory_files
from peer_nodes import at
from processes import run

from flowstone.store.agent_client import stop_agent

NODES = 4


@pytest.fixture
def base() -> Iterator[Path]:
    """Where the nodes' agents have their directories, node-0/agent and so on. At the end nothing is left."""
    with TemporaryDirectory(prefix="flowstone-nodes-") as above, ExitStack() as stack:
        place = Path(above)
        for node in range(NODES):
            (place / f"node-{node}").mkdir()
            stack.callback(_end, place / f"node-{node}/agent")
        yield place


def _end(directory: Path) -> None:
    with at(directory):
        stop_agent(60.0)
    assert not memory_files(directory)


def _lose(base: Path, *nodes: int) -> None:
    """Agent, server and memory are gone."""
    for node in nodes:
        kill(agent_process(base / f"node-{node}/agent"), signal.SIGKILL)


def test_a_lost_node_gets_its_part_from_its_group_and_saves_on(base: Path) -> None:
    held = run(NODES, "peer_acts", "save", str(base), 2, 1, 2, 3)
    small = {"index.safetensors", "manifest.json", "objects.json"}
    for rank, names in enumerate(held):
        pair = {f"rank-{rank & ~1:05d}.safetensors", f"rank-{rank | 1:05d}.safetensors"}
        assert isinstance(names, list)
        assert set(names) == small | pair, "its own, and the other one's of its group"
    _lose(base, 3)
    assert run(NODES, "peer_acts", "load", str(base), 2) == [[3, "", ""]] * NODES
    held = run(NODES, "peer_acts", "save", str(base), 2, 4)
    assert all(isinstance(names, list) and len(names) == 5 for names in held), "copies are made again"
    _lose(base, 0, 2)
    assert run(NODES, "peer_acts", "load", str(base), 2) == [[4, "", ""]] * NODES, "of different groups"


def test_a_lost_group_is_told_and_the_next_tier_has_the_step(base: Path, tmp_path: Path) -> None:
    run(NODES, "peer_acts", "save_to_both", str(base), 2, str(tmp_path / "disk"), 1, 2)
    _lose(base, 0, 1)
    for step, tier, why in run(NODES, "peer_acts", "load", str(base), 2, str(tmp_path / "disk")):  # type: ignore[misc]
        assert (step, tier) == (2, str(tmp_path / "disk"))
        assert "step-00000002 is not whole" in why
        assert "rank-00000.safetensors" in why
    assert run(NODES, "peer_acts", "load", str(base), 2) == [[-1, "", ""]] * NODES, "and nothing is made up"


def test_fewer_ranks_load_what_more_have_saved(base: Path) -> None:
    run(NODES, "peer_acts", "save", str(base), 2, 7)
    _lose(base, 1)
    assert run(3, "peer_acts", "load", str(base), 2, "", [0, 2, 3]) == [[7, "", ""]] * 3
