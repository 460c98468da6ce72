"""What nodes of a job say to each other: a greeting in which both show that they know the job's secret, then messages.

A message is its length in four bytes, MessagePack, and a code of 16 bytes that only who knows the secret can make
(keyed BLAKE2b over direction, number and body), so that none is forged, left out or repeated. Bytes of files follow as
they are: their digests are checked where they arrive. Nothing is encrypted, and no clock is compared: docs/PEERS.md.
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
    """The server's first words. Those of other protocols begin with the same two fields."""

    protocol: int
    release: str
    nonce: bytes


class Introduction(msgspec.Struct, frozen=True):
    """The client's answer."""

    protocol: int
    release: str
    run: str
    nonce: bytes
    proof: bytes


class Verdict(msgspec.Struct, frozen=True):
    """The server's verdict. `error` says why it refuses; `node`: which node it is."""

    error: str
    protocol: int
    release: str
    node: str
    proof: bytes


class Ask(msgspec.Struct, frozen=True):
    """What one node asks of another. Verbs that agent_wire.Request has too mean the same.

    held    what this node holds: see Held
    read    size_bytes from `offset` on of the file at `path`, if that has this number: they follow the answer
    put     a new file: its payload_bytes follow
    create  a new file of size_bytes at `path`, to fill
    fill    payload_bytes that follow, from `offset` on of the file `number` that this connection has created; `text` is
            their digest
    gather  at least size_bytes of parity at `path`, in a draft, to which this connection will add `number` times what
            it sends; `target`: the column; its Contribution follows. The first one makes the file
    add     as fill, to what was gathered
    lock    text: the holder; the lock ends with the connection
    """

    verb: PeerVerb
    path: str = ""
    target: str = ""
    text: str = ""
    number: int = 0
    offset: int = 0
    size_bytes: int = 0
    payload_bytes: int = 0


class HeldStep(msgspec.Struct, frozen=True):
    """A checkpoint's directory on one node. `manifest`: digest of its manifest; files: number and size, by name."""

    manifest: str
    files: Mapping[str, tuple[int, int]]


class Held(msgspec.Struct, frozen=True):
    """What one node holds of the run.

    epoch  how many jobs have begun to save while this node took part, as its agent was told
    names  all that is in the root
    steps  of these, what has a manifest
    """

    epoch: int
    names: tuple[str, ...]
    steps: Mapping[str, HeldStep]


class Told(msgspec.Struct, frozen=True):
    """An answer; payload_bytes follow it. `full`: not enough memory, `text` needed and `size_bytes` available."""

    errno: int = 0
    error: str = ""
    full: bool = False
    number: int = 0
    size_bytes: int = 0
    payload_bytes: int = 0
    yes: bool = False
    text: str = ""
    names: tuple[str, ...] = ()
    held: Held | None = None


_Message = TypeVar("_Message", bound=msgspec.Struct)


class Channel:
    """A connection after its greeting. One thread at a time.

    node  the server's: who the other side is, for a client
    """

    def __init__(self, connection: socket.socket, key: bytes, *, is_client: bool, node: str) -> None:
        self.connection, self.node = connection, node
        self._key = key
        self._sent, self._taken = (b"c", b"s") if is_client else (b"s", b"c")
        self._numbers = {b"c": 0, b"s": 0}

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError."""
        body = msgspec.msgpack.encode(message)
        if len(body) > PEER_MESSAGE_BYTES_MAX:
            raise OSError(0, "a message that is too long")
        self.connection.sendall(b"".join((_LENGTH.pack(len(body)), body, self._code(self._sent, body))))

    def receive(self, kind: type[_Message]) -> _Message:
        """The next message. Raises EOFError at the end, OSError, PeerError for what is no message of the other side."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > PEER_MESSAGE_BYTES_MAX:
            raise PeerError("a peer sent what is no message", found=f"{length} bytes", next="see the other node's log")
        body = self._exactly(length)
        if not hmac.compare_digest(self._code(self._taken, body), self._exactly(_CODE_BYTES)):
            raise PeerError("a message of a peer was changed on its way", next="find out what is between the nodes")
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise PeerError("a peer sent what is no message", found=error, next="see the other node's log") from error

    def receive_into(self, target: memoryview) -> None:
        """Fill the memory. Raises OSError, EOFError."""
        while len(target):
            moved = self.connection.recv_into(target, len(target), socket.MSG_WAITALL)
            if not moved:
                raise EOFError
            target = target[moved:]

    def send_file(self, fd: int, offset: int, length: int) -> None:
        """Send a part of a file, which has it. Raises OSError."""
        while length:
            moved = os.sendfile(self.connection.fileno(), fd, offset, length)
            if not moved:
                raise EOFError("a file that became shorter")
            offset, length = offset + moved, length - moved

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # for a thread that waits in it
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


def prepare(connection: socket.socket, timeout_s: float, *, idle: bool = False) -> None:
    """Bound each wait of a connection, and have the system find out when the other machine is gone.

    idle  the other side may say nothing for as long as it likes
    """
    connection.settimeout(None)  # the system's timeouts: one call then moves many bytes
    for which, seconds in ((socket.SO_RCVTIMEO, 0 if idle else timeout_s), (socket.SO_SNDTIMEO, timeout_s)):
        connection.setsockopt(socket.SOL_SOCKET, which, _TIME.pack(int(seconds), 0))
    for option, value in (
        (socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, PEER_SILENCE_S - 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


# The greeting: messages without a code, as short as they have to be.


def greet(connection: socket.socket, run: str, secret: bytes, where: str) -> Channel:
    """The client's side. Raises PeerError, which says what differs; OSError."""
    prepare(connection, PEER_GREETING_S)
    until = time.monotonic() + PEER_GREETING_S
    greeting = _hear(connection, Greeting, where, until)
    if greeting.protocol != PEER_PROTOCOL:
        raise _of_another_release(where, greeting.protocol, greeting.release)
    nonce = secrets.token_bytes(16)
    said = greeting.nonce + nonce + run.encode()
    _say(connection, Introduction(PEER_PROTOCOL, __version__, run, nonce, _proof(secret, b"client", said)))
    verdict = _hear(connection, Verdict, where, until)
    if verdict.error:
        if verdict.protocol != PEER_PROTOCOL:
            raise _of_another_release(where, verdict.protocol, verdict.release)
        raise PeerError(
            f"the node at {where} does not serve this job: {_shown(verdict.error)}", run=f"memory://{run}",
            next="give all nodes of a job the same run and secret, and other jobs others",
        )
    if not hmac.compare_digest(verdict.proof, _proof(secret, b"server", said)):
        raise PeerError(
            f"what answers at {where} does not know this job's secret", run=f"memory://{run}",
            next="find out what it is; give all nodes of a job the same secret",
        )
    prepare(connection, PEER_ANSWER_S)
    return Channel(connection, _proof(secret, b"session", said), is_client=True, node=verdict.node)


def welcome(connection: socket.socket, run: str, secret: bytes, node: str) -> Channel:
    """The server's side. Raises PeerError, which says why the other one is refused, and was told; OSError, EOFError."""
    prepare(connection, PEER_GREETING_S)
    until = time.monotonic() + PEER_GREETING_S
    ours = secrets.token_bytes(16)
    connection.sendall(_MAGIC)
    _say(connection, Greeting(PEER_PROTOCOL, __version__, ours))
    found = _hear(connection, Introduction, "the other end", until)
    said = ours + found.nonce + found.run.encode()
    error = ""
    if found.protocol != PEER_PROTOCOL:
        error = f"it speaks protocol {found.protocol} (flowstone {_shown(found.release)}), not {PEER_PROTOCOL}"
    elif not hmac.compare_digest(found.proof, _proof(secret, b"client", said)):
        error = "its secret is another one"
    elif found.run != run:
        error = f"this is memory://{run}, not memory://{_shown(found.run)}"
    proof = b"" if error else _proof(secret, b"server", said)
    _say(connection, Verdict(error, PEER_PROTOCOL, __version__, node, proof))
    if error:
        raise PeerError(f"a client is refused: {error}", next="give all nodes of a job the same run and secret")
    prepare(connection, PEER_ANSWER_S, idle=True)
    return Channel(connection, _proof(secret, b"session", said), is_client=False, node=node)


def _proof(secret: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, who + b"\0" + said, "sha256")


def _say(connection: socket.socket, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _hear(connection: socket.socket, kind: type[_Message], where: str, until: float) -> _Message:
    """The next message of a greeting, which ends at `until`, however slowly the other side sends it."""
    try:
        if kind is Greeting and _taken(connection, len(_MAGIC), until) != _MAGIC:
            raise _no_peer(where)
        (length,) = _LENGTH.unpack(_taken(connection, _LENGTH.size, until))
        if length > _GREETING_BYTES_MAX:
            raise _no_peer(where)
        return msgspec.msgpack.decode(_taken(connection, length, until), type=kind)
    except (msgspec.DecodeError, EOFError) as error:
        raise _no_peer(where) from error
    except BlockingIOError as error:
        raise PeerError(
            f"the server at {where} did not finish its greeting in {PEER_GREETING_S:.0f} s",
            next="check what listens there; if it is a node of the job, check how busy it is",
        ) from error


def _taken(connection: socket.socket, length: int, until: float) -> bytes:
    data = b""
    while len(data) < length:
        left = until - time.monotonic()
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
    """Text from an unknown sender, escaped as a part of one line."""
    return escaped(text[:_SHOWN_CHARS_MAX]) + "..." * (len(text) > _SHOWN_CHARS_MAX)


def _no_peer(where: str) -> PeerError:
    return PeerError(
        f"what answers at {where} is no node of a flowstone job",
        next="check addresses and ports; see what listens at that one",
    )


def _of_another_release(where: str, protocol: int, release: str) -> PeerError:
    return PeerError(
        f"the node at {where} is of another release", expected=f"protocol {PEER_PROTOCOL}, flowstone {__version__}",
        found=f"protocol {protocol}, flowstone {_shown(release)}",
        next="use one release on all nodes; `flowstone agent --stop` ends the other one, with what it holds",
    )
