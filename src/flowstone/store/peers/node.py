"""A node of the job as this process sees it: its address, and connections to its peer server."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence

import msgspec

from flowstone.config import PEER_DOWN_S, PEER_GREETING_S
from flowstone.errors import FullError, PeerError
from flowstone.store.peers.wire import Ask, Channel, Told, greet, prepare


class Place(msgspec.Struct, frozen=True):
    """Where a node serves a run, as the ranks tell each other. `node` tells it apart from all others."""

    node: str
    address: str
    port: int

    @property
    def shown(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


class Link:
    """One connection to a node's server, made anew where it was lost. One thread at a time."""

    def __init__(self, place: Place, run: str, secret: bytes) -> None:
        self.place = place
        self._run, self._secret = run, secret
        self._channel: Channel | None = None

    def send(self, asked: Ask, payload: bytes | memoryview = b"") -> None:
        """Raises PeerError. The answer is taken by `receive`: several may be under way, in their order."""
        channel = self._channel or self._connect()
        try:
            channel.send(asked)
            if payload:
                channel.connection.sendall(payload)
        except OSError as error:
            raise self._lost(error) from error

    def send_file(self, asked: Ask, fd: int, offset: int) -> None:
        """The same, with payload_bytes of a file from `offset` on, which is not that of what is asked."""
        self.send(asked)
        assert self._channel is not None, "it is connected"
        try:
            self._channel.send_file(fd, offset, asked.payload_bytes)
        except (OSError, EOFError) as error:
            raise self._lost(error) from error

    def receive(self) -> Told:
        """The next answer, of whatever kind. What follows it is to be taken before the next. Raises PeerError."""
        if self._channel is None:
            raise self._lost(EOFError())
        try:
            return self._channel.receive(Told)
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        except BaseException:
            self.close()  # what comes next would be taken for another answer
            raise

    def ask(self, asked: Ask, payload: bytes | memoryview = b"") -> Told:
        """The answer. Raises OSError where it is a refusal, FullError, PeerError."""
        self.send(asked, payload)
        return checked(self.receive(), self.place)

    def read_into(self, asked: Ask, target: memoryview) -> int:
        """Read a range of a file. Returns how many bytes it has there. Raises as `ask`."""
        told = self.ask(asked)
        if told.payload_bytes > len(target):
            self.close()
            raise PeerError(f"the node at {self.place.shown} sends more than was asked for", next="use one release")
        assert self._channel is not None, "it has answered"
        try:
            self._channel.receive_into(target[: told.payload_bytes])
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        except BaseException:
            self.close()
            raise
        return told.payload_bytes

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def forget(self) -> None:
        """In a forked child: the connection stays its parent's."""
        if self._channel is not None:
            self._channel.connection.close()
            self._channel = None

    @property
    def node(self) -> str:
        """Which node answers; "" before it has."""
        return "" if self._channel is None else self._channel.node

    @property
    def is_connected(self) -> bool:
        return self._channel is not None

    def _connect(self) -> Channel:
        place = self.place
        try:
            family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                prepare(connection, PEER_GREETING_S)
                connection.connect((place.address, place.port))
                channel = greet(connection, self._run, self._secret, place.shown)
            except BaseException:
                connection.close()
                raise
        except PeerError:
            raise
        except OSError as error:
            raise self._lost(error, "cannot be reached") from error
        if place.node and channel.node != place.node:
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
            next="see whether that node is up, and its job; a job that starts again goes on without it",
        )


def checked(told: Told, place: Place) -> Told:
    """The answer, unless it is a refusal: raises OSError, FullError."""
    if told.full:
        raise FullError(
            f"the node at {place.shown}: {told.error}", errno=errno.ENOSPC, needed=told.text,
            available=told.names[0] if told.names else "unknown",
            next="save less, free memory on that node, or keep fewer replicas or generations",
        )
    if told.errno:
        raise OSError(told.errno, told.error)
    return told


class Node:
    """A node with the connection over which it is asked small things. The caller has one thread do so at a time.

    why_down  why it has not answered; "" if it has
    """

    def __init__(self, place: Place, run: str, secret: bytes) -> None:
        self.place, self.link = place, Link(place, run, secret)
        self.why_down = ""
        self._down_until = 0.0

    @property
    def is_down(self) -> bool:
        return time.monotonic() < self._down_until

    def failed(self, error: PeerError) -> None:
        self.why_down, self._down_until = error.message, time.monotonic() + PEER_DOWN_S

    def answered(self) -> None:
        self.why_down, self._down_until = "", 0.0


def ask_all(nodes: Sequence[Node], asked: Ask, payload: bytes = b"") -> list[Told | PeerError]:
    """Ask several nodes at once. The answers, refusals among them, in their order; an error where there is none."""
    answers: list[Told | PeerError] = []
    sent = [_try_to_send(node, asked, payload) for node in nodes]
    for node, failure in zip(nodes, sent, strict=True):
        answers.append(failure or _try_to_receive(node))
    return answers


def _try_to_send(node: Node, asked: Ask, payload: bytes) -> PeerError | None:
    try:
        node.link.send(asked, payload)
    except PeerError as error:
        node.failed(error)
        return error
    return None


def _try_to_receive(node: Node) -> Told | PeerError:
    try:
        told = node.link.receive()
    except PeerError as error:
        node.failed(error)
        return error
    node.answered()
    return told
