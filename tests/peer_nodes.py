"""Several nodes of one job on this machine: each has a memory agent of its own, by its directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from memory_agent import agent_process, kill, memory_files, own_agent

from flowstone.store.agent_client import stop_agent
from flowstone.store.local_sockets import DIRECTORY_VARIABLE
from flowstone.store.peers.store import PeerMemory

SECRET = "a secret of 32 characters, or so"
HERE = "127.0.0.1"


@contextmanager
def at(directory: Path) -> Iterator[None]:
    """On the node whose agent listens there."""
    with mock.patch.dict(os.environ, {DIRECTORY_VARIABLE: str(directory)}):
        yield


class Nodes:
    """Directories of agents."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = list(directories)

    def stores(
        self, run: str, replicas: int | None = 2, nodes: Sequence[int] | None = None, **options: object
    ) -> list[PeerMemory]:
        """A store on each of these nodes, which have met."""
        made, said = [], []
        for node in range(len(self.directories)) if nodes is None else nodes:
            with at(self.directories[node]):
                made.append(PeerMemory(run, secret=SECRET, interface=HERE, replicas=replicas, **options))  # type: ignore[arg-type]
                said.append(made[-1].introduce())
        for store, own in zip(made, said, strict=True):
            store.use_addresses(said, own)
        return made

    def lose(self, node: int, how: int = 9) -> None:
        """The node's memory is gone; another agent that starts there holds nothing."""
        kill(agent_process(self.directories[node]), how)


@contextmanager
def several_nodes(count: int) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes([stack.enter_context(own_agent()) for _ in range(count)])


@contextmanager
def nodes_below(count: int) -> Iterator[Path]:
    """Where so many nodes' agents have their directories, node-0/agent and so on. At the end nothing is left."""
    with TemporaryDirectory(prefix="flowstone-nodes-") as above, ExitStack() as stack:
        base = Path(above)
        for node in range(count):
            agent_below(base, node).parent.mkdir()
            stack.callback(_end, agent_below(base, node))
        yield base


def agent_below(base: Path, node: int) -> Path:
    return base / f"node-{node}/agent"


def _end(directory: Path) -> None:
    with at(directory):
        stop_agent(60.0)
    assert not memory_files(directory)
