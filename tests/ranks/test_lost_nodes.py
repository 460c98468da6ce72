"""One of four nodes is lost, with its trainer, its agent and its memory.

Each node has a network of its own, over a shaped link. The lost data is loaded over it from the other nodes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import Ranks

from bench.networks import Networks, refusal, several_networks
from flowstone.store.peers.erasure import is_available
from memory_agent import agent_process, kill
from peer_nodes import agent_below, nodes_below

NODES = 4
MBIT_PER_S = 50.0
ATTEMPTS = 12  # other processes of this machine only make a load slower; what is rebuilt is not kept for the next one
BYTES_PER_S = MBIT_PER_S * 1e6 / 8
REASON = refusal()

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
PARITY = pytest.mark.skipif(not is_available(), reason="ISA-L is not installed: pip install 'flowstone[parity]'")


class Job:
    """Four nodes, a rank on each."""

    def __init__(self, base: Path, networks: Networks, how: dict[str, Any], elements: int) -> None:
        self.base, self.how, self.elements = base, how, elements
        self._networks = networks
        self._trainers: Ranks | None = None

    def save(self, *steps: int, disk: str = "") -> None:
        """The trainers go on after that."""
        self._trainers = trainers = self._ranks("save", disk, *steps)
        reported = [self.base / f"saved-{steps[-1]}-{rank}" for rank in range(NODES)]
        while not all(path.exists() for path in reported):
            if any(process.poll() is not None for process in trainers.processes):
                trainers.results()  # one has failed
            time.sleep(0.01)

    def load(self, disk: str = "") -> list[dict[str, Any]]:
        return self._ranks("load", disk).results()  # type: ignore[return-value]

    def lose(self, *nodes: int) -> None:
        """Trainer, agent, server and memory are killed at once; then the launcher ends the other ranks of the job."""
        agents = [agent_process(agent_below(self.base, node)) for node in nodes]
        assert self._trainers is not None, "it trains"
        assert all(process.poll() is None for process in self._trainers.processes), "all of them are alive"
        for node, agent in zip(nodes, agents, strict=True):
            self._trainers.kill(node)
            kill(agent, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        trainers, self._trainers = self._trainers, None
        if trainers is not None:
            for rank in range(NODES):
                trainers.kill(rank)
            assert {item.code for item in trainers.end()} == {-signal.SIGKILL}

    def _ranks(self, act: str, *arguments: object) -> Ranks:
        given = (str(self.base), self.how, self.elements, *arguments)
        return Ranks(NODES, "network_acts", act, *given, networks=self._networks)


Making = Callable[[dict[str, Any], int], Job]


@pytest.fixture
def job_of() -> Iterator[Making]:
    """Makes the job; given how its nodes keep each other's, and the elements of a rank."""
    with several_networks(NODES, MBIT_PER_S) as networks, nodes_below(NODES) as base, ExitStack() as stack:

        def make(how: dict[str, Any], elements: int) -> Job:
            job = Job(base, networks, how, elements)
            stack.callback(job.end)
            return job

        yield make


def test_a_lost_node_comes_back_from_its_peer_at_the_rate_of_its_link(job_of: Making) -> None:
    job = job_of({"replicas": 2}, 6_000_000)
    job.save(1)
    job.lose(3)
    others = _check_rate(job, 3, 8 * job.elements)
    assert all(row["received"] < job.elements for row in others), "they have theirs"


@PARITY
def test_a_lost_node_is_rebuilt_from_parity_at_the_rate_of_its_link(job_of: Making) -> None:
    job = job_of({"parity": [3, 1]}, 2_000_000)
    job.save(1)
    job.lose(2)
    _check_rate(job, 2, 3 * 8 * job.elements)


def test_two_lost_nodes_of_different_groups_come_back_and_two_of_one_from_the_next_tier(
    job_of: Making, tmp_path: Path
) -> None:
    job, disk = job_of({"replicas": 2}, 100_000), str(tmp_path / "disk")
    job.save(1, disk=disk)
    job.lose(1, 2)
    assert [(row["step"], row["tier"]) for row in job.load(disk)] == [(1, "memory://run")] * NODES
    job.save(2, disk=disk)
    job.lose(2, 3)
    for record in job.load(disk):
        assert (record["step"], record["tier"]) == (2, disk)
        assert "step-00000002 is incomplete" in record["why"]


def _check_rate(job: Job, lost: int, bytes_: int) -> list[dict[str, Any]]:
    """The lost node loads so many bytes over its link. What the others tell."""
    rates = []
    for _ in range(ATTEMPTS):
        report = job.load()
        assert [row["step"] for row in report] == [1] * NODES
        own = report.pop(lost)
        assert own["received"] > bytes_, "over the network"
        assert own["seconds"] >= 0.9 * bytes_ / BYTES_PER_S, "the link is shaped"
        rates.append(bytes_ / own["seconds"] / BYTES_PER_S)
        if rates[-1] >= 0.8:
            return report
    pytest.fail(f"{rates} of the link's rate")
