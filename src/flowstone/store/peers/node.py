"""A node of the job: its address, and connections to the server of its memory agent."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence

import msgspec

from flowstone.config import PEER_DOWN_S, PEER_GREETING_S
from flowstone.errors import FullError, PeerError
from flowstone.store.peers.wire import Channel, PeerRequest, PeerResponse, greet, set_timeouts


class NodeAddress(msgspec.Struct, frozen=True):
    """The address at which a node serves a run to other nodes; ranks exchange it. `node`: the node's unique id."""

    node: str
    address: str
    port: int

    @property
    def shown(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


class NodeLink:
    """A connection to a node's server. If the connection is lost, the next request connects again. For one thread at a
    time.
    """

    def __init__(self, place: NodeAddress, run: str, secret: bytes) -> None:
        self.place = place
        self._run, self._secret = run, secret
        self._channel: Channel | None = None

    def send(self, request: PeerRequest, payload: bytes | memoryview = b"") -> None:
        """Send a request; `receive` returns its answer. Several requests may be outstanding. Raises PeerError."""
        channel = self._channel or self._connect()
        try:
            channel.send(request)
            if payload:
                channel.connection.sendall(payload)
        except OSError as error:
            raise self._lost(error) from error

    def send_file(self, request: PeerRequest, fd: int, offset: int) -> None:
        """Send a request with `payload_bytes` of a file, from its `offset` on. Raises PeerError."""
        self.send(request)
        assert self._channel is not None, "it is connected"
        try:
            self._channel.send_file(fd, offset, request.payload_bytes)
        except (OSError, EOFError) as error:
            raise self._lost(error) from error

    def receive(self) -> PeerResponse:
        """Receive the next answer, which may be a refusal. If bytes follow it, the caller must receive them before the
        next answer. Raises PeerError.
        """
        if self._channel is None:
            raise self._lost(EOFError())
        try:
            return self._channel.receive(PeerResponse)
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        except BaseException:
            self.close()  # else the rest of this answer would be read as the next answer
            raise

    def request(self, request: PeerRequest, payload: bytes | memoryview = b"") -> PeerResponse:
        """Send a request, and return the answer. Raises OSError if the node refuses, FullError if its memory is full,
        and PeerError if it does not answer.
        """
        self.send(request, payload)
        return check_answer(self.receive(), self.place)

    def read_into(self, request: PeerRequest, target: memoryview) -> int:
        """Read a range of a file into `target`. Returns the number of bytes read, which is smaller if the file ends.
        Raises the errors of `request`.
        """
        answer = self.request(request)
        if answer.payload_bytes > len(target):
            self.close()
            raise PeerError(
                f"the node at {self.place.shown} sends more bytes than were requested",
                next="install the same release of flowstone on all nodes",
            )
        assert self._channel is not None, "it has answered"
        try:
            self._channel.receive_into(target[: answer.payload_bytes])
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        except BaseException:
            self.close()
            raise
        return answer.payload_bytes

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def forget(self) -> None:
        """Called in a forked child: close the copy of the connection, which the parent still uses."""
        if self._channel is not None:
            self._channel.connection.close()
            self._channel = None

    @property
    def node(self) -> str:
        """The id of the node at the other end; "" before that node has answered."""
        return "" if self._channel is None else self._channel.node

    @property
    def is_connected(self) -> bool:
        return self._channel is not None

    def _connect(self) -> Channel:
        address = self.place
        try:
            family = socket.AF_INET6 if ":" in address.address else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                set_timeouts(connection, PEER_GREETING_S)
                connection.connect((address.address, address.port))
                channel = greet(connection, self._run, self._secret, address.shown)
            except BaseException:
                connection.close()
                raise
        except PeerError:
            raise
        except OSError as error:
            raise self._lost(error, "cannot be reached") from error
        if address.node and channel.node != address.node:
            channel.close()
            raise self._lost(EOFError(), "was restarted")
        self._channel = channel
        return channel

    def _lost(self, error: OSError | EOFError, how: str = "has ended the connection") -> PeerError:
        self.close()
        number = error.errno or errno.ECONNRESET if isinstance(error, OSError) else errno.ECONNRESET
        if number in (errno.EAGAIN, errno.EINPROGRESS, errno.ETIMEDOUT):
            how = "does not answer"
        return PeerError(
            f"the node at {self.place.shown} {how}", errno=errno.EHOSTUNREACH, reason=os.strerror(number),
            next="check that node and its job; a restarted job continues without that node",
        )


def check_answer(answer: PeerResponse, address: NodeAddress) -> PeerResponse:
    """Return the answer. Raises OSError or FullError if the answer is a refusal."""
    if answer.full:
        raise FullError(
            f"the node at {address.shown}: {answer.error}", errno=errno.ENOSPC, needed=answer.text,
            available=answer.names[0] if answer.names else "unknown",
            next="save less, free memory on that node, or give PeerMemory fewer replicas or generations (2 at least)",
        )
    if answer.errno:
        raise OSError(answer.errno, answer.error)
    return answer


class Node:
    """A node of the job, with a connection for small requests. For one thread at a time.

    why_down  why the node did not answer; "" if it did
    """

    def __init__(self, place: NodeAddress, run: str, secret: bytes) -> None:
        self.place, self.link = place, NodeLink(place, run, secret)
        self.why_down = ""
        self._down_until = 0.0

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self._down_until

    def mark_down(self, error: PeerError) -> None:
        self.why_down, self._down_until = error.message, time.monotonic() + PEER_DOWN_S

    def mark_up(self) -> None:
        self.why_down, self._down_until = "", 0.0


def request_all(nodes: Sequence[Node], request: PeerRequest, payload: bytes = b"") -> list[PeerResponse | PeerError]:
    """Send a request to several nodes concurrently. Returns, in the order of the nodes, the answer of each (which may
    be a refusal), or its error.
    """
    answers: list[PeerResponse | PeerError] = []
    sent = [_try_to_send(node, request, payload) for node in nodes]
    for node, failure in zip(nodes, sent, strict=True):
        answers.append(failure or _try_to_receive(node))
    return answers


def _try_to_send(node: Node, request: PeerRequest, payload: bytes) -> PeerError | None:
    try:
        node.link.send(request, payload)
    except PeerError as error:
        node.mark_down(error)
        return error
    return None


def _try_to_receive(node: Node) -> PeerResponse | PeerError:
    try:
        answer = node.link.receive()
    except PeerError as error:
        node.mark_down(error)
        return error
    node.mark_up()
    return answer
