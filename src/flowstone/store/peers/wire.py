"""The protocol between nodes of a job: a greeting in which both sides prove to know the job's secret, then messages.

A message consists of its length in four bytes, a body in MessagePack, and a message authentication code of 16 bytes.
The code (keyed BLAKE2b over direction, number and body) prevents that messages are forged, dropped or repeated. Bytes
of files have no such code; the receiver checks their digests. Nothing is encrypted, and no clocks are compared
(docs/PEERS.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec

from flowstone._version import __version__
from flowstone.config import PEER_ANSWER_S, PEER_GREETING_S, PEER_MESSAGE_BYTES_MAX, PEER_SILENCE_S
from flowstone.errors import PeerError, escaped

PEER_PROTOCOL = 2
_MAGIC = b"flowstone peer\n"
_GREETING_BYTES_MAX = 4096
_SHOWN_CHARS_MAX = 200
_LENGTH = struct.Struct(">I")
_TIME = struct.Struct("ll")
_CODE_BYTES = 16

PeerVerb = Literal[
    "exists", "names", "look", "make_directory", "remove", "rename", "agree", "free", "held", "read", "put", "create",
    "fill", "gather", "add", "lock", "unlock", "lost_lock",
]


class Greeting(msgspec.Struct, frozen=True):
    """The server's first message. In every version of the protocol it begins with the fields `protocol` and `release`.
    """

    protocol: int
    release: str
    nonce: bytes


class Introduction(msgspec.Struct, frozen=True):
    """The client's answer to the greeting."""

    protocol: int
    release: str
    run: str
    nonce: bytes
    proof: bytes


class GreetingReply(msgspec.Struct, frozen=True):
    """The server's reply to an Introduction. `error`: why the server refuses the client; "" if it does not. `node`: the
    id of the server's node.
    """

    error: str
    protocol: int
    release: str
    node: str
    proof: bytes


class PeerRequest(msgspec.Struct, frozen=True):
    """A node's request to another node. Verbs that are also in agent_wire.AgentRequest mean the same.

    held    return the node's inventory: see PeerInventory
    read    return size_bytes of the file at `path`, from `offset` on, if the file's number is `number`. The bytes
            follow the answer
    put     create a file, whose bytes (payload_bytes of them) follow the request
    create  create a file of size_bytes at `path`, for `fill`
    fill    write the payload_bytes that follow, from `offset` on, into the file `number` that this connection has
            created; `text` is their digest
    gather  create a parity file of at least size_bytes at `path`, unless it exists. `target` is the number of a
            data shard (a column), whose ParityContribution follows the request. Later `add` requests on this connection
            send the shard's bytes, which the node multiplies by `number` and adds to the parity file
    add     multiply the payload_bytes that follow (see `gather`), and add them to a parity file; the other fields mean
            the same as for `fill`
    lock    lock the run for the holder `text`. The lock ends with the connection
    """

    verb: PeerVerb
    path: str = ""
    target: str = ""
    text: str = ""
    number: int = 0
    offset: int = 0
    size_bytes: int = 0
    payload_bytes: int = 0


class StepInventory(msgspec.Struct, frozen=True):
    """A checkpoint's directory on one node. `manifest`: digest of its manifest. `files`: name -> (number, size in
    bytes).
    """

    manifest: str
    files: Mapping[str, tuple[int, int]]


class PeerInventory(msgspec.Struct, frozen=True):
    """The files that one node has of the run.

    epoch  the number of jobs that have begun to save with this node, as reported to its agent
    names  all entries at the store's root
    steps  the directories that have a manifest
    """

    epoch: int
    names: tuple[str, ...]
    steps: Mapping[str, StepInventory]


class PeerResponse(msgspec.Struct, frozen=True):
    """The answer to a PeerRequest. payload_bytes bytes follow it. `full`: whether the node lacks memory; `text` is then
    the size needed, and `names[0]` the size available.
    """

    errno: int = 0
    error: str = ""
    full: bool = False
    number: int = 0
    size_bytes: int = 0
    payload_bytes: int = 0
    yes: bool = False
    text: str = ""
    names: tuple[str, ...] = ()
    held: PeerInventory | None = None


_Message = TypeVar("_Message", bound=msgspec.Struct)


class Channel:
    """A connection after its greeting. For one thread at a time.

    node  the id of the server's node
    """

    def __init__(self, connection: socket.socket, key: bytes, *, is_client: bool, node: str) -> None:
        self.connection, self.node = connection, node
        self._key = key
        self._sent, self._taken = (b"c", b"s") if is_client else (b"s", b"c")
        self._numbers = {b"c": 0, b"s": 0}

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises OSError."""
        body = msgspec.msgpack.encode(message)
        if len(body) > PEER_MESSAGE_BYTES_MAX:
            raise OSError(0, "the message is too long")
        self.connection.sendall(b"".join((_LENGTH.pack(len(body)), body, self._code(self._sent, body))))

    def receive(self, kind: type[_Message]) -> _Message:
        """Receive the next message. Raises EOFError if the other side has closed the connection, OSError, and PeerError
        for an invalid message.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > PEER_MESSAGE_BYTES_MAX:
            raise PeerError(
                "another node sent an invalid message", found=f"a length of {length} bytes",
                next="read the other node's log",
            )
        body = self._exactly(length)
        if not hmac.compare_digest(self._code(self._taken, body), self._exactly(_CODE_BYTES)):
            raise PeerError(
                "a message from another node was changed during the transfer",
                next="find the device or program that changes messages between the nodes",
            )
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise PeerError(
                "another node sent an invalid message", found=error, next="read the other node's log"
            ) from error

    def receive_into(self, target: memoryview) -> None:
        """Fill `target` with received bytes. Raises OSError, EOFError."""
        while len(target):
            moved = self.connection.recv_into(target, len(target), socket.MSG_WAITALL)
            if not moved:
                raise EOFError
            target = target[moved:]

    def send_file(self, fd: int, offset: int, length: int) -> None:
        """Send a part of a file. Raises OSError; EOFError if the file is shorter."""
        while length:
            moved = os.sendfile(self.connection.fileno(), fd, offset, length)
            if not moved:
                raise EOFError("the file became shorter while it was sent")
            offset, length = offset + moved, length - moved

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for data of this connection
        self.connection.close()

    def _code(self, direction: bytes, body: bytes) -> bytes:
        number = self._numbers[direction]
        self._numbers[direction] += 1
        head = direction + number.to_bytes(8, "big")
        return hashlib.blake2b(head + body, key=self._key, digest_size=_CODE_BYTES).digest()

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return bytes(data)


def set_timeouts(connection: socket.socket, timeout_s: float, *, idle: bool = False) -> None:
    """Limit each wait of a connection, and enable keepalive, which detects that the other machine is gone.

    idle  whether the other side may be silent for any length of time
    """
    connection.settimeout(None)  # one call then moves many bytes; the system's own timeouts limit its waits
    for timeout_option, seconds in ((socket.SO_RCVTIMEO, 0 if idle else timeout_s), (socket.SO_SNDTIMEO, timeout_s)):
        connection.setsockopt(socket.SOL_SOCKET, timeout_option, _TIME.pack(int(seconds), 0))
    for option, value in (
        (socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, PEER_SILENCE_S - 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


# The greeting: short messages, which have no authentication codes.


def greet(connection: socket.socket, run: str, secret: bytes, address: str) -> Channel:
    """Greet the server, as the client. Raises PeerError, which says what does not match, and OSError."""
    set_timeouts(connection, PEER_GREETING_S)
    deadline = time.monotonic() + PEER_GREETING_S
    greeting = _receive_greeting(connection, Greeting, address, deadline)
    if greeting.protocol != PEER_PROTOCOL:
        raise _of_another_release(address, greeting.protocol, greeting.release)
    nonce = secrets.token_bytes(16)
    transcript = greeting.nonce + nonce + run.encode()
    proof = _proof(secret, b"client", transcript)
    _send_greeting(connection, Introduction(PEER_PROTOCOL, __version__, run, nonce, proof))
    verdict = _receive_greeting(connection, GreetingReply, address, deadline)
    if verdict.error:
        if verdict.protocol != PEER_PROTOCOL:
            raise _of_another_release(address, verdict.protocol, verdict.release)
        raise PeerError(
            f"the node at {address} does not serve this job: {_shown(verdict.error)}",
            run=f"memory://{run}",
            next="give all nodes of a job the same run and secret, and other jobs another run or secret",
        )
    if not hmac.compare_digest(verdict.proof, _proof(secret, b"server", transcript)):
        raise PeerError(
            f"the server at {address} does not know this job's secret", run=f"memory://{run}",
            next="check which program listens at this address; give all nodes of a job the same secret",
        )
    set_timeouts(connection, PEER_ANSWER_S)
    return Channel(connection, _proof(secret, b"session", transcript), is_client=True, node=verdict.node)


def welcome(connection: socket.socket, run: str, secret: bytes, node: str) -> Channel:
    """Answer a client's greeting, as the server. Raises PeerError if the client is refused (the client gets the
    reason), OSError, and EOFError.
    """
    set_timeouts(connection, PEER_GREETING_S)
    deadline = time.monotonic() + PEER_GREETING_S
    nonce = secrets.token_bytes(16)
    connection.sendall(_MAGIC)
    _send_greeting(connection, Greeting(PEER_PROTOCOL, __version__, nonce))
    introduction = _receive_greeting(connection, Introduction, "the other end", deadline)
    transcript = nonce + introduction.nonce + introduction.run.encode()
    error = ""
    if introduction.protocol != PEER_PROTOCOL:
        release = _shown(introduction.release)
        error = f"the client uses protocol {introduction.protocol} (flowstone {release}), not {PEER_PROTOCOL}"
    elif not hmac.compare_digest(introduction.proof, _proof(secret, b"client", transcript)):
        error = "the secrets of client and node differ"
    elif introduction.run != run:
        error = f"the client asks for memory://{_shown(introduction.run)}, the node serves memory://{run}"
    proof = b"" if error else _proof(secret, b"server", transcript)
    _send_greeting(connection, GreetingReply(error, PEER_PROTOCOL, __version__, node, proof))
    if error:
        raise PeerError(f"refused a client: {error}", next="give all nodes of a job the same run and secret")
    set_timeouts(connection, PEER_ANSWER_S, idle=True)
    return Channel(connection, _proof(secret, b"session", transcript), is_client=False, node=node)


def _proof(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + transcript, "sha256")


def _send_greeting(connection: socket.socket, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _receive_greeting(connection: socket.socket, kind: type[_Message], address: str, deadline: float) -> _Message:
    """Receive the next message of a greeting. All of it must have arrived by `deadline`."""
    try:
        if kind is Greeting and _receive_exactly(connection, len(_MAGIC), deadline) != _MAGIC:
            raise _no_peer(address)
        (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, deadline))
        if length > _GREETING_BYTES_MAX:
            raise _no_peer(address)
        return msgspec.msgpack.decode(_receive_exactly(connection, length, deadline), type=kind)
    except (msgspec.DecodeError, EOFError) as error:
        raise _no_peer(address) from error
    except BlockingIOError as error:
        raise PeerError(
            f"the server at {address} did not finish its greeting in {PEER_GREETING_S:.0f} s",
            next="check which program listens at this address; if it is a node of the job, check how busy the node is",
        ) from error


def _receive_exactly(connection: socket.socket, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        left = deadline - time.monotonic()
        if left <= 0:
            raise BlockingIOError
        seconds, part = divmod(left, 1.0)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(int(seconds), max(1, int(part * 1e6)))
        )
        more = connection.recv(length - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _shown(text: str) -> str:
    """Text from an unknown sender, with escapes, so that it can be shown in one line."""
    return escaped(text[:_SHOWN_CHARS_MAX]) + "..." * (len(text) > _SHOWN_CHARS_MAX)


def _no_peer(address: str) -> PeerError:
    return PeerError(
        f"the server at {address} is not a node of a flowstone job",
        next="check the addresses and ports of the nodes, and which program listens there",
    )


def _of_another_release(address: str, protocol: int, release: str) -> PeerError:
    return PeerError(
        f"the node at {address} uses another release", expected=f"protocol {PEER_PROTOCOL}, flowstone {__version__}",
        found=f"protocol {protocol}, flowstone {_shown(release)}",
        next="install the same release of flowstone on all nodes; `flowstone agent --stop` ends a running agent and "
        "loses its checkpoints",
    )
