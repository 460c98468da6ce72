"""A node of four is lost, with its trainer, its agent and its memory: each node has a network of its own, over a shaped
link, and what was lost comes back over that from the others."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from memory_agent import agent_process, kill, memory_files
from peer_nodes import at
from processes import Ranks

from bench.networks import Networks, refusal, several_networks
from flowstone.store.agent_client import stop_agent
from flowstone.store.peers.erasure import is_there

NODES = 4
MBIT_PER_S = 80.0
ATTEMPTS = 3  # other processes of this machine only make a load slower; what is rebuilt is not kept for the next one
BYTES_PER_S = MBIT_PER_S * 1e6 / 8
REASON = refusal()

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
PARITY = pytest.mark.skipif(not is_there(), reason="ISA-L is not installed: pip install 'flowstone[parity]'")


class Job:
    """Four nodes, a rank on each."""

    def __init__(self, base: Path, networks: Networks, how: dict[str, Any], elements: int) -> None:
        self.base, self.how, self.elements = base, how, elements
        self._networks = networks

    def save(self, *steps: int, disk: str = "") -> None:
        self._run("save", disk, *steps)

    def load(self, disk: str = "") -> list[dict[str, Any]]:
        return self._run("load", disk)  # type: ignore[return-value]

    def lose(self, *nodes: int) -> None:
        """Its trainers have ended; agent, server and memory are killed."""
        for node in nodes:
            kill(agent_process(self.base / f"node-{node}/agent"), signal.SIGKILL)

    def _run(self, act: str, *arguments: object) -> list[object]:
        given = (str(self.base), self.how, self.elements, *arguments)
        return Ranks(NODES, "network_acts", act, *given, networks=self._networks).results()


@pytest.fixture
def nodes() -> Iterator[tuple[Path, Networks]]:
    with TemporaryDirectory(prefix="flowstone-nodes-") as above, several_networks(NODES, MBIT_PER_S) as networks:
        base = Path(above)
        with ExitStack() as stack:
            for node in range(NODES):
                (base / f"node-{node}").mkdir()
                stack.callback(_end, base / f"node-{node}/agent")
            yield base, networks


def _end(directory: Path) -> None:
    with at(directory):
        stop_agent(60.0)
    assert not memory_files(directory)


def test_a_lost_node_comes_back_from_its_peer_at_the_rate_of_its_link(nodes: tuple[Path, Networks]) -> None:
    job = Job(*nodes, {"replicas": 2}, 6_000_000)
    job.save(1)
    job.lose(3)
    others = _check_rate(job, 3, 8 * job.elements)
    assert all(one["received"] < job.elements for one in others), "they have theirs"


@PARITY
def test_a_lost_node_is_rebuilt_from_parity_at_the_rate_of_its_link(nodes: tuple[Path, Networks]) -> None:
    job = Job(*nodes, {"parity": [3, 1]}, 2_000_000)
    job.save(1)
    job.lose(2)
    _check_rate(job, 2, 3 * 8 * job.elements)


def test_two_lost_nodes_of_different_groups_come_back_and_two_of_one_from_the_next_tier(
    nodes: tuple[Path, Networks], tmp_path: Path
) -> None:
    job, disk = Job(*nodes, {"replicas": 2}, 100_000), str(tmp_path / "disk")
    job.save(1, disk=disk)
    job.lose(1, 2)
    assert [(one["step"], one["tier"]) for one in job.load(disk)] == [(1, "memory://run")] * NODES
    job.save(2, disk=disk)
    job.lose(2, 3)
    for one in job.load(disk):
        assert (one["step"], one["tier"]) == (2, disk)
        assert "step-00000002 is not whole" in one["why"]


def _check_rate(job: Job, lost: int, bytes_: int) -> list[dict[str, Any]]:
    """The lost node loads so many bytes over its link. What the others tell."""
    rates = []
    for _ in range(ATTEMPTS):
        told = job.load()
        assert [one["step"] for one in told] == [1] * NODES
        own = told.pop(lost)
        assert own["received"] > bytes_, "over the network"
        assert own["seconds"] >= 0.9 * bytes_ / BYTES_PER_S, "the link is shaped"
        rates.append(bytes_ / own["seconds"] / BYTES_PER_S)
        if rates[-1] >= 0.8:
            return told
    pytest.fail(f"{rates} of the link's rate")
