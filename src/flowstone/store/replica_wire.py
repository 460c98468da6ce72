"""What a training, the replica of its state, and processes that ask how that is, say to each other (docs/REPLICA.md).

Training and replica have a pair of sockets, which no one else can reach; messages there are never waited for. The
replica also listens, in the memory agent's directory, which is its user's alone: it says how it is to each
connection, and reads nothing. Of a job of several ranks, all on one node, each has a replica.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from flowstone import _native
from flowstone.config import AGENT_MESSAGE_BYTES_MAX, REPLICA_ANSWER_S
from flowstone.store.local_sockets import agent_directory, make_socket, open_directory, peer, socket_path

Exactness = Literal["exact", "tolerance"]


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message: what to do.

    engine       EngineOptions, as a dictionary
    rank, ranks  of the training, and of its replicas
    port         where the replicas of several ranks meet, on this node
    listener     the descriptor that listens there, of rank 0's; -1: of another rank, or of a single one
    """

    trainer: int
    location: str
    build: str
    tolerance: bool
    engine: dict[str, object]
    rank: int = 0
    ranks: int = 1
    port: int = 0
    listener: int = -1


class Noted(msgspec.Struct, frozen=True, tag=True):
    """This step is durable, in that journal."""

    step: int
    journal: str


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """Training has ended, in order: there is nothing left to do."""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """How a replica is.

    location     the store
    does         "failed": `reason` says why, and it ends
    step         that its state is of; -1: of none yet
    newest       the newest step that training has told of; -1: none yet
    exactness    and `differs_from`: see pipeline.following.Following; of several ranks, of all
    is_orphaned  training has died
    has_ended    this rank of the training has ended in order, and others may not have yet
    """

    pid: int
    trainer: int
    location: str
    rank: int = 0
    does: Literal["starts", "follows", "persists", "failed"] = "starts"
    step: int = -1
    newest: int = -1
    exactness: Exactness = "exact"
    differs_from: int | None = None
    is_orphaned: bool = False
    has_ended: bool = False
    reason: str = ""


_TO_REPLICA: msgspec.msgpack.Decoder[Setup | Noted | Farewell] = msgspec.msgpack.Decoder(Setup | Noted | Farewell)
_STATUS = msgspec.msgpack.Decoder(ReplicaStatus)


def encode(message: Setup | Noted | Farewell | ReplicaStatus) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_order(data: bytes) -> Setup | Noted | Farewell:
    """Raises msgspec.DecodeError for anything else."""
    return _TO_REPLICA.decode(data)


def decode_status(data: bytes) -> ReplicaStatus:
    """Raises msgspec.DecodeError for anything else."""
    return _STATUS.decode(data)


def node() -> str:
    """This node, since it was started: processes that it names alike see each other, and one loopback network."""
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])


def socket_name(location: str, rank: int = 0) -> str:
    """The name, in the agent's directory, of the socket of the replica for a store, and a rank."""
    return f"{_stem(location)}{f'-{rank}' if rank else ''}.sock"


def _stem(location: str) -> str:
    return f"replica-{_native.xxh3_64(os.path.realpath(location).encode()):016x}"


def status_of(location: str, rank: int = 0) -> ReplicaStatus | None:
    """How the replica for a store, and a rank, is; None if there is none."""
    found = _asked(socket_name(location, rank))
    if found is None:
        return None
    found[1].close()
    return found[0]


def orphans(location: str) -> Iterator[ReplicaStatus]:
    """The replicas for a store whose training has died, of all ranks on this node."""
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(agent_directory())):
            if name.startswith(_stem(location)) and name.endswith(".sock"):
                found = _asked(name)
                if found is not None:
                    found[1].close()
                    if found[0].is_orphaned:
                        yield found[0]


def await_end(location: str, timeout_s: float, rank: int = 0) -> bool:
    """Wait until the replica for a store, and a rank, has ended, if its training has. Whether it has then."""
    found = _asked(socket_name(location, rank))
    if found is None or not found[0].is_orphaned:
        return True
    with found[1] as connection:
        pid, _ = peer(connection)
        try:
            gone = os.pidfd_open(pid)
        except OSError:
            return True
    try:
        return bool(select.select([gone], [], [], timeout_s)[0])
    finally:
        os.close(gone)


def _asked(name: str) -> tuple[ReplicaStatus, socket.socket] | None:
    directory = open_directory(agent_directory(), create=False)
    if directory is None:
        return None
    connection = make_socket()
    try:
        connection.settimeout(REPLICA_ANSWER_S)
        with contextlib.suppress(OSError, msgspec.DecodeError):  # safe: it is not there, or ends
            connection.connect(socket_path(directory, name))
            if peer(connection)[1] == os.geteuid():
                return decode_status(connection.recv(AGENT_MESSAGE_BYTES_MAX)), connection
        connection.close()
        return None
    finally:
        os.close(directory)
