"""What a training, the replica of its state, and processes that ask how that is, say to each other (docs/REPLICA.md).

Training and replica have a pair of sockets, which no one else can reach; messages there are never waited for. The
replica also listens, in the memory agent's directory, which is its user's alone: it says how it is to each
connection, and reads nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Literal

import msgspec

from flowstone import _native
from flowstone.config import AGENT_MESSAGE_BYTES_MAX, REPLICA_ANSWER_S
from flowstone.store.agent_wire import agent_directory, open_directory, peer

Exactness = Literal["exact", "tolerance"]


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message: what to do. `engine`: EngineOptions, as a dictionary."""

    trainer: int
    location: str
    build: str
    tolerance: bool
    engine: dict[str, object]


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
    exactness    and `differs_from`: see pipeline.following.Following
    is_orphaned  training has died
    """

    pid: int
    trainer: int
    location: str
    does: Literal["starts", "follows", "persists", "failed"] = "starts"
    step: int = -1
    newest: int = -1
    exactness: Exactness = "exact"
    differs_from: int | None = None
    is_orphaned: bool = False
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


def socket_name(location: str) -> str:
    """The name, in the agent's directory, of the socket of the replica for a store."""
    return f"replica-{_native.xxh3_64(os.path.realpath(location).encode()):016x}.sock"


def status_of(location: str) -> ReplicaStatus | None:
    """How the replica for a store is; None if there is none."""
    found = _asked(location)
    if found is None:
        return None
    found[1].close()
    return found[0]


def await_end(location: str, timeout_s: float) -> bool:
    """Wait until the replica for a store has ended, if its training has. Whether it has then."""
    found = _asked(location)
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


def _asked(location: str) -> tuple[ReplicaStatus, socket.socket] | None:
    directory = open_directory(agent_directory(), create=False)
    if directory is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(REPLICA_ANSWER_S)
        with contextlib.suppress(OSError, msgspec.DecodeError):  # safe: it is not there, or ends
            connection.connect(f"/proc/self/fd/{directory}/{socket_name(location)}")
            if peer(connection)[1] == os.geteuid():
                return decode_status(connection.recv(AGENT_MESSAGE_BYTES_MAX)), connection
        connection.close()
        return None
    finally:
        os.close(directory)
