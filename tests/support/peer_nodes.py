"""Several nodes of one job on this machine; the directory of its memory agent distinguishes each node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from flowstone.store.memory.agent_client import stop_agent
from flowstone.store.memory.local_sockets import DIRECTORY_VARIABLE
from flowstone.store.peers.store import PeerMemory
from memory_agent import agent_process, kill, memory_files, own_agent

SECRET = "a secret of 32 characters, or so"
HERE = "127.0.0.1"


@contextmanager
def at(directory: Path) -> Iterator[None]:
    """Act as on the node whose agent listens there."""
    with mock.patch.dict(os.environ, {DIRECTORY_VARIABLE: str(directory)}):
        yield


class Nodes:
    """Directories of agents."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = list(directories)

    def stores(
        self, run: str, replicas: int | None = 2, nodes: Sequence[int] | None = None, **options: object
    ) -> list[PeerMemory]:
        """A store on each of these nodes, after they have exchanged addresses."""
        made, messages = [], []
        for node in range(len(self.directories)) if nodes is None else nodes:
            with at(self.directories[node]):
                made.append(PeerMemory(run, secret=SECRET, interface=HERE, replicas=replicas, **options))  # type: ignore[arg-type]
                messages.append(made[-1].introduce())
        for store, own in zip(made, messages, strict=True):
            store.use_addresses(messages, own)
        return made

    def lose(self, node: int, how: int = 9) -> None:
        """The node loses its memory; a new agent that starts there holds nothing."""
        kill(agent_process(self.directories[node]), how)


@contextmanager
def several_nodes(count: int) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes([stack.enter_context(own_agent()) for _ in range(count)])


@contextmanager
def nodes_below(count: int) -> Iterator[Path]:
    """Directories for the agents of that many nodes, node-0/agent and so on. At the end, nothing is left."""
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
