"""The messages between training, the replica of its state, and processes that ask for its status (docs/REPLICA.md).

Training and replica have a pair of sockets, which no other process can reach; neither waits for messages there. The
replica also listens in the memory agent's directory, which only its user may enter: it sends its status to each
connection, and reads nothing. In a job of several ranks, all on one node, each rank has a replica.
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

from flowstone._native import xxh3_64
from flowstone.config import AGENT_MESSAGE_BYTES_MAX, REPLICA_ANSWER_S
from flowstone.store.memory.local_sockets import (
    agent_directory,
    make_socket,
    open_directory,
    peer_credentials,
    socket_path,
)

Exactness = Literal["exact", "tolerance"]


class Setup(msgspec.Struct, frozen=True, tag="Setup"):
    """The first message: the replica's settings.

    engine    EngineOptions, as a dictionary
    rank      the rank of the training process; its replica has the same rank
    ranks     the number of ranks of the training job, which is also the number of replicas
    port      where the replicas of several ranks connect, on this node
    listener  descriptor of the listening socket, for rank 0 of several ranks; otherwise -1
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


class DurableStepMessage(msgspec.Struct, frozen=True, tag="Noted"):
    """The message that a step is durable in a journal."""

    step: int
    journal: str


class Farewell(msgspec.Struct, frozen=True, tag="Farewell"):
    """The message that training has ended normally, so that the replica may end."""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """The status of a replica.

    location     location of the store
    does         "starts": it has no state yet. "follows": it replays training's steps. "persists": training has died,
                 and it saves the newest step. "failed": it is about to end, and `reason` says why
    step         the step of its state; -1: none yet
    newest       the newest step that training has reported; -1: none yet
    exactness, differs_from  as in replica.following.JournalFollower, but combined over all ranks
    is_orphaned  whether training has died
    has_ended    whether this rank of the training job has ended normally; other ranks may still run
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


_TO_REPLICA: msgspec.msgpack.Decoder[
    Setup | DurableStepMessage | Farewell
] = msgspec.msgpack.Decoder(Setup | DurableStepMessage | Farewell)
_STATUS = msgspec.msgpack.Decoder(ReplicaStatus)


def encode(message: Setup | DurableStepMessage | Farewell | ReplicaStatus) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_order(data: bytes) -> Setup | DurableStepMessage | Farewell:
    """The message of the trainer that `data` contains. Raises msgspec.DecodeError if it is not one."""
    return _TO_REPLICA.decode(data)


def decode_status(data: bytes) -> ReplicaStatus:
    """The replica's status that `data` contains. Raises msgspec.DecodeError if it is not one."""
    return _STATUS.decode(data)


def node_and_network() -> str:
    """A text that identifies this node since its last start. It is equal for processes that see each other and share a
    loopback network.
    """
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])


def socket_name(location: str, rank: int = 0) -> str:
    """The name of the socket, in the memory agent's directory, at which a replica listens. `location`: its store."""
    return f"{_stem(location)}{f'-{rank}' if rank else ''}.sock"


def _stem(location: str) -> str:
    return f"replica-{xxh3_64(os.path.realpath(location).encode()):016x}"


def replica_status(location: str, rank: int = 0) -> ReplicaStatus | None:
    """Ask the replica of a store and rank for its status. None if there is no such replica."""
    answer = _query(socket_name(location, rank))
    if answer is None:
        return None
    answer[1].close()
    return answer[0]


def orphans(location: str) -> Iterator[ReplicaStatus]:
    """The status of each replica on this node, of any rank, that belongs to the store and whose training has died."""
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(agent_directory())):
            if name.startswith(_stem(location)) and name.endswith(".sock"):
                answer = _query(name)
                if answer is not None:
                    answer[1].close()
                    if answer[0].is_orphaned:
                        yield answer[0]


def await_end(location: str, timeout_s: float, rank: int = 0) -> bool:
    """If the trainer of a store's replica has died, wait until that replica has ended. Returns False after
    `timeout_s`.
    """
    answer = _query(socket_name(location, rank))
    if answer is None or not answer[0].is_orphaned:
        return True
    with answer[1] as connection:
        pid, _ = peer_credentials(connection)
        try:
            process_fd = os.pidfd_open(pid)
        except OSError:
            return True
    try:
        return bool(select.select([process_fd], [], [], timeout_s)[0])
    finally:
        os.close(process_fd)


def _query(name: str) -> tuple[ReplicaStatus, socket.socket] | None:
    directory = open_directory(agent_directory(), create=False)
    if directory is None:
        return None
    connection = make_socket()
    try:
        connection.settimeout(REPLICA_ANSWER_S)
        with contextlib.suppress(OSError, msgspec.DecodeError):  # the replica does not exist, or is ending
            connection.connect(socket_path(directory, name))
            if peer_credentials(connection)[1] == os.geteuid():
                return decode_status(connection.recv(AGENT_MESSAGE_BYTES_MAX)), connection
        connection.close()
        return None
    finally:
        os.close(directory)
