"""A connection to the memory agent of this node, which is started where none listens.

The agent is a process of its own session, so what ends a job's processes does not end it. It is found by its socket in
a directory that only this user may enter, and both sides look at the other's user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import RLock

import msgspec

from flowstone._version import __version__
from flowstone.config import AGENT_ANSWER_S, AGENT_NAME_CHARS_MAX, AGENT_START_S
from flowstone.errors import FullError, MemoryAgentError
from flowstone.log import log
from flowstone.store.agent_wire import (
    LOG_NAME,
    PROTOCOL,
    SOCKET_NAME,
    Answer,
    Request,
    decode_answer,
    encode,
)
from flowstone.store.forks import forget_in_children
from flowstone.store.local_sockets import agent_directory, make_socket, open_directory, peer, receive, send, socket_path

_STOP = "`flowstone agent --stop` ends it, with what it holds"


class AgentClient:
    """Requests of one store about one run. Any thread; one request at a time.

    A connection that is lost is made anew by the next request: of a new agent, which holds nothing. The log says so.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._directory = agent_directory()  # now: the process may change its working directory
        self.ended = ""  # which agent ended while this was connected, in words; "" if none has
        self.connections = 0  # how many there were: what an agent does for one, it does for no later one
        self._connection: socket.socket | None = None
        self._guard = RLock()
        self._agent = 0
        self._released: deque[int] = deque()  # files that are no longer used here, since the last request
        forget_in_children(self)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        with self._guard:
            yield

    def ask(self, request: Request, fd: int | None = None, *, start: bool = False) -> tuple[Answer, int | None]:
        """The answer, and its descriptor, which is the caller's.

        start   start an agent where none listens; else the answer is then ENOENT

        raises  OSError           the agent refuses
                FullError         not enough memory
                MemoryAgentError  the agent has ended meanwhile, does not answer, or is not one for this process
        """
        if max(len(request.path), len(request.target), len(request.text)) > AGENT_NAME_CHARS_MAX:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))  # else it would end the connection
        with self._guard:
            if not self._is_connected() and not self._connect(start=start):
                raise self._is_gone() or OSError(errno.ENOENT, "no memory agent runs")
            assert self._connection is not None, "it is connected"
            while self._released:
                self._exchange(self._connection, Request("release", number=self._released.popleft()), None)
            answer, received = self._exchange(self._connection, request, fd)
        if answer.full:
            _close(received)
            raise FullError(
                f"not enough memory for memory://{self.run}: {answer.error}", errno=errno.ENOSPC,
                needed=f"{answer.needed_bytes} bytes", available=f"{answer.size_bytes} bytes",
                next="save less, free memory on this node, or give NodeMemory fewer generations (2 at least)",
            )
        if answer.errno:
            _close(received)
            gone = self._is_gone() if answer.errno == errno.ENOENT else None
            if gone is not None:
                raise gone
            raise OSError(answer.errno, answer.error)
        return answer, received[0] if received else None

    def release_later(self, number: int) -> None:
        """Tell the agent, with the next request, that a file is no longer used here. Any thread, at any point."""
        self._released.append(number)

    def is_there(self) -> bool:
        """Whether an agent listens, and this is connected to it."""
        with self._guard:
            return self._is_connected() or self._connect(start=False)

    def stands(self) -> bool:
        """Whether the newest connection still stands. Asks nothing of the agent, and makes none."""
        with self._guard:
            return self._is_connected()

    def close(self) -> None:
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def forget(self) -> None:
        """In a forked child: the connection is the parent's, and the agent would not see the parent's end."""
        self._guard = RLock()
        self.close()

    def _is_connected(self) -> bool:
        """Whether the connection stands, as far as this side can know without a request."""
        if self._connection is None:
            return False
        if not _is_readable(self._connection.fileno(), 0):
            return True
        self._lose("has ended")  # it says nothing unasked
        return False

    def _lose(self, how: str) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._released.clear()
        self.ended = f"the memory agent (process {self._agent}) {how}; the checkpoints that it held are lost"
        log.warning("memory://%s: %s", self.run, self.ended)

    def _exchange(self, connection: socket.socket, request: Request, fd: int | None) -> tuple[Answer, list[int]]:
        try:
            send(connection, encode(request), fd)
            data, fds = receive(connection)
            if data:
                return decode_answer(data), fds
            how = "has ended"
        except TimeoutError:
            how = f"did not answer within {AGENT_ANSWER_S:.0f} s"
        except ConnectionError:
            how = "has ended"
        except (OSError, msgspec.DecodeError) as error:
            how = f"said what is no answer ({error})"
        except BaseException:  # an answer may still come, and would be taken for that of the next request
            connection.close()
            self._connection = None
            raise
        self._lose(how)
        gone = self._is_gone()
        assert gone is not None, "it was lost"
        raise gone

    def _is_gone(self) -> MemoryAgentError | None:
        """The error for what was in an agent that is gone; None if none has gone since the last lock."""
        if not self.ended:
            return None
        return MemoryAgentError(
            self.ended, run=f"memory://{self.run}", next="save again: the next save starts a new agent"
        )

    # Connecting

    def _connect(self, *, start: bool) -> bool:
        """Whether there is an agent. Raises MemoryAgentError for one that is not for this process."""
        directory = self._directory
        deadline = time.monotonic() + AGENT_START_S
        while True:
            connection = _connected(directory, create=start)
            if connection is not None:
                if self._greet(connection, directory):
                    self._connection = connection
                    self.connections += 1
                    return True
                connection.close()
            if not start:
                return False
            if time.monotonic() > deadline:
                raise MemoryAgentError(
                    f"no memory agent listens in {directory} after {AGENT_START_S:.0f} s",
                    next=f"look into {directory}/{LOG_NAME}",
                )
            start_agent(directory)

    def _greet(self, connection: socket.socket, directory: Path) -> bool:
        """Whether the agent is there still: one that ends may have been asked. Raises as `_connect`; closes it then."""
        self._agent, uid = peer(connection)
        try:
            if uid != os.geteuid():
                raise MemoryAgentError(
                    f"what listens in {directory} is of another user", expected=f"user {os.geteuid()}",
                    found=f"user {uid}", next="find out who put it there; then remove it",
                )
            try:
                send(connection, encode(Request("hello", self.run, number=PROTOCOL, text=__version__)))
                data, fds = receive(connection)
            except ConnectionError:
                return False
            _close(fds)
            if not data:
                return False
            answer = decode_answer(data)
            if answer.errno or answer.number != PROTOCOL:
                raise MemoryAgentError(
                    f"the memory agent (process {self._agent}) does not serve this process: {answer.error}",
                    agent=f"flowstone {answer.text or 'unknown'}, protocol {answer.number}",
                    process=f"flowstone {__version__}, protocol {PROTOCOL}", next=f"use that release; or {_STOP}",
                )
        except (OSError, msgspec.DecodeError) as error:
            connection.close()
            raise MemoryAgentError(
                f"what listens in {directory} (process {self._agent}) does not answer as a memory agent does",
                found=error, next=f"use the release of flowstone that runs there; or {_STOP}",
            ) from error
        except BaseException:
            connection.close()
            raise
        return True


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _connected(directory: Path, *, create: bool) -> socket.socket | None:
    """A connection to the agent that listens in that directory; None if none does."""
    opened = open_directory(directory, create=create)
    if opened is None:
        return None
    connection = make_socket()
    try:
        # With a timeout of Python's it would be refused at once where many come together.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(AGENT_ANSWER_S), 0))
        connection.connect(socket_path(opened, SOCKET_NAME))
        connection.settimeout(AGENT_ANSWER_S)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise MemoryAgentError(
            f"cannot connect to the memory agent in {directory}", reason=error.strerror,
            next=f"look into {directory}/{LOG_NAME}",
        ) from error
    finally:
        os.close(opened)
    return connection


def start_agent(directory: Path) -> None:
    """Start an agent, unless one listens by then. Returns once it does.

    It is in no session, process group or list of children of this process.
    """
    # Absolute: the agent has another working directory, and starts children of its own.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(one) for one in sys.path if one)}
    command = [sys.executable, "-P", "-m", "flowstone.agent", str(directory)]
    started = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
        start_new_session=True,
    )
    try:
        _, told = started.communicate(timeout=AGENT_START_S)
    except subprocess.TimeoutExpired:
        started.kill()
        started.communicate()
        told = b"it did not come to listen"
    if started.returncode:
        raise MemoryAgentError(
            "cannot start a memory agent", found=told.decode(errors="replace").strip()[-500:] or started.returncode,
            next=f"run `{sys.executable} -m flowstone.agent {directory}`, and look into {directory}/{LOG_NAME}",
        )


def stop_agent(timeout_s: float) -> int | None:
    """End this user's agent of this node, of whatever release, and wait until it has ended.

    returns its process; None: none runs

    raises  MemoryAgentError if it has not ended by then
    """
    connection = _connected(agent_directory(), create=False)
    if connection is None:
        return None
    with connection:
        pid, uid = peer(connection)
        if uid != os.geteuid() or not pid:
            raise MemoryAgentError("the memory agent cannot be seen from here", found=f"process {pid} of user {uid}",
                                   next="stop it where it was started")
        try:
            gone = os.pidfd_open(pid)
        except ProcessLookupError:
            return pid
    try:
        os.kill(pid, signal.SIGTERM)
        if _is_readable(gone, timeout_s):
            return pid
    finally:
        os.close(gone)
    raise MemoryAgentError(
        f"the memory agent (process {pid}) has not ended after {timeout_s:.0f} s",
        found="it makes durable what it was told to", next=f"wait; or end it with what it holds: kill -9 {pid}",
    )


def _is_readable(fd: int, timeout_s: float) -> bool:
    """Whether something has come, or the other side has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
