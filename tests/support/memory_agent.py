"""A memory agent for tests, in a directory of its own."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from flowstone.store.memory.agent_client import stop_agent
from flowstone.store.memory.agent_wire import SOCKET_NAME
from flowstone.store.memory.local_sockets import DIRECTORY_VARIABLE, peer_credentials

NO_ONE = 65534


@contextmanager
def own_agent() -> Iterator[Path]:
    """The directory of agents that are started while this is open. At the end, all are ended and nothing is left."""
    with TemporaryDirectory(prefix="flowstone-agent-") as above:
        directory = Path(above) / "agent"
        with mock.patch.dict(os.environ, {DIRECTORY_VARIABLE: str(directory)}):
            yield directory
            stop_agent(60.0)
        assert files_of(directory) <= {"agent.log"}, "what an agent leaves"
        assert not memory_files(directory)


def files_of(directory: Path) -> set[str]:
    return set(os.listdir(directory)) if directory.exists() else set()


def agent_process(directory: Path) -> int:
    """The agent that listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(directory / SOCKET_NAME))
        return peer_credentials(connection)[0]


def kill(pid: int, number: int) -> None:
    """Send a signal that ends the process, and wait until it has ended."""
    gone = os.pidfd_open(pid)
    try:
        os.kill(pid, number)
        assert select.select([gone], [], [], 60.0)[0], "it ends"
    finally:
        os.close(gone)


def processes_of(directory: Path) -> list[Path]:
    """The agent of that directory and its children, as the system lists them."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            reported = command + (process / "environ").read_bytes()
            if b"flowstone.agent" in command and str(directory).encode() in reported:
                processes.append(process)
        except OSError:
            continue  # it has ended
    return processes


def memory_files(directory: Path) -> list[str]:
    """Files in memory that an agent of that directory, or a child of it, has open."""
    collected = []
    for process in processes_of(directory):
        try:
            collected += [os.readlink(fd) for fd in (process / "fd").iterdir()]
        except OSError:
            continue  # it has ended
    return [name for name in collected if "memfd:flowstone" in name]
