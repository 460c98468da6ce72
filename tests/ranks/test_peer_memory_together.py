"""Ranks of several nodes save into their memory as one store; nodes are lost, and others replace them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import run

from flowstone.store.memory.node_memory import AgentTree
from flowstone.store.peers.erasure import is_available
from memory_agent import agent_process, kill
from peer_nodes import agent_below, at, nodes_below

NODES = 4


@pytest.fixture
def base() -> Iterator[Path]:
    with nodes_below(NODES) as place:
        yield place


def _lose(base: Path, *nodes: int) -> None:
    """Agent, server and memory are gone."""
    for node in nodes:
        kill(agent_process(agent_below(base, node)), signal.SIGKILL)


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
        assert "step-00000002 is incomplete" in why
        assert "rank-00000.safetensors" in why
    assert run(NODES, "peer_acts", "load", str(base), 2) == [[-1, "", ""]] * NODES, "and nothing is made up"


def test_fewer_ranks_load_what_more_have_saved(base: Path) -> None:
    run(NODES, "peer_acts", "save", str(base), 2, 7)
    _lose(base, 1)
    assert run(3, "peer_acts", "load", str(base), 2, "", [0, 2, 3]) == [[7, "", ""]] * 3


# Parity


PARITY = pytest.mark.skipif(not is_available(), reason="ISA-L is not installed: pip install 'flowstone[parity]'")


@PARITY
def test_with_parity_any_one_of_four_nodes_is_rebuilt_for_a_third_of_the_memory(base: Path) -> None:
    run(NODES, "peer_acts", "save", str(base), [3, 1], 1, 2)
    for node in range(NODES):
        with at(agent_below(base, node)):
            sizes = {name: size_bytes for name, (_, size_bytes) in _held("run", "step-00000002").items()}
        segment = sizes[f"rank-{node:05d}.safetensors"]
        parity = sum(size_bytes for name, size_bytes in sizes.items() if name.startswith(".parity-"))
        assert segment / 3 <= parity < segment / 3 + 10_000
    for node in (3, 0):
        _lose(base, node)
        assert run(NODES, "peer_acts", "load", str(base), [3, 1]) == [[2 if node else 4, "", ""]] * NODES
        run(NODES, "peer_acts", "save", str(base), [3, 1], 4 if node else 5)


@PARITY
def test_with_two_rows_of_parity_any_two_nodes_are_rebuilt_and_fewer_ranks_load_it(base: Path) -> None:
    run(NODES, "peer_acts", "save", str(base), [2, 2], 1)
    _lose(base, 0, 1)
    assert run(NODES, "peer_acts", "load", str(base), [2, 2]) == [[1, "", ""]] * NODES
    assert run(3, "peer_acts", "load", str(base), [2, 2], "", [0, 2, 3]) == [[1, "", ""]] * 3


@PARITY
def test_more_nodes_than_parity_has_rows_are_told_and_the_next_tier_has_the_step(base: Path, tmp_path: Path) -> None:
    run(NODES, "peer_acts", "save_to_both", str(base), [3, 1], str(tmp_path / "disk"), 1, 2)
    _lose(base, 1, 2)
    for step, tier, why in run(NODES, "peer_acts", "load", str(base), [3, 1], str(tmp_path / "disk")):  # type: ignore[misc]
        assert (step, tier) == (2, str(tmp_path / "disk"))
        assert "the remaining parity cannot rebuild them" in why


@PARITY
def test_several_ranks_of_a_node_share_its_parity(base: Path) -> None:
    places = [0, 0, 1, 2, 2]
    run(5, "peer_acts", "save_at", str(base), [2, 1], places, 1)
    _lose(base, 0)
    assert run(5, "peer_acts", "load", str(base), [2, 1], "", places) == [[1, "", ""]] * 5


def _held(run_: str, directory: str) -> dict[str, tuple[int, int]]:
    """Number and size of each file on the node."""
    tree = AgentTree(run_, run_)
    try:
        return {name: tree.stat(f"{directory}/{name}") for name in tree.names(directory)}
    finally:
        tree.close()
