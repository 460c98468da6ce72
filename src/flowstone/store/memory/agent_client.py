"""A connection to this node's memory agent, which is started if none is running.

The agent has its own session, so a signal to the job's processes does not end it. Its socket is in a directory that
only this user may enter. Client and agent check that the other process is this user's, too.
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
from flowstone.extensions import extension
from flowstone.log import log
from flowstone.store.forks import forget_in_children
from flowstone.store.memory.agent_wire import (
    LOG_NAME,
    PROTOCOL,
    SOCKET_NAME,
    AgentRequest,
    AgentResponse,
    decode_answer,
    encode,
)
from flowstone.store.memory.local_sockets import (
    agent_directory,
    make_socket,
    open_directory,
    peer_credentials,
    receive,
    send,
    socket_path,
)

_STOP = "run `flowstone agent --stop`, which ends the agent and loses the checkpoints that it holds"


class AgentClient:
    """Sends the requests of one store to the agent, all about one run. Can be called on any thread; sends one request
    at a time.

    If the connection is lost, the next request connects again, perhaps to a new agent, which has no checkpoints. That
    is logged.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._directory = agent_directory()  # an absolute path, as the process may change its working directory
        self.lost_message = ""  # describes an agent that has ended while this object was connected to it; "": none has
        # number of connections so far; locks and files of the agent belong to one connection, and end with it
        self.connections = 0
        self._connection: socket.socket | None = None
        self._guard = RLock()
        self._agent = 0
        self._released: deque[int] = deque()  # files that this process has stopped using since the last request
        forget_in_children(self)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        with self._guard:
            yield

    def request(
        self, request: AgentRequest, fd: int | None = None, *, start: bool = False
    ) -> tuple[AgentResponse, int | None]:
        """Send a request. Returns the answer, and the descriptor that came with it, which the caller must close.

        start   whether to start an agent if none is running. False: OSError (ENOENT) is raised in that case

        raises  OSError           the agent refuses the request
                FullError         not enough memory
                MemoryAgentError  the agent has ended meanwhile, does not answer, or refuses to serve this process
        """
        if max(len(request.path), len(request.target), len(request.text)) > AGENT_NAME_CHARS_MAX:
            # if it were sent, the agent would end the connection
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        with self._guard:
            if not self._is_connected() and not self._connect(start=start):
                raise self._lost_error() or OSError(errno.ENOENT, "no memory agent is running")
            assert self._connection is not None, "there is a connection"
            while self._released:
                self._exchange(self._connection, AgentRequest("release", number=self._released.popleft()), None)
            answer, received = self._exchange(self._connection, request, fd)
        if answer.full:
            _close(received)
            raise FullError(
                f"not enough memory for memory://{self.run}: {answer.error}", errno=errno.ENOSPC,
                needed=f"{answer.needed_bytes} bytes", available=f"{answer.size_bytes} bytes",
                next="save less, free memory on this node, or keep fewer checkpoints in it (`generations`, at least 2)",
            )
        if answer.errno:
            _close(received)
            lost = self._lost_error() if answer.errno == errno.ENOENT else None
            if lost is not None:
                raise lost
            raise OSError(answer.errno, answer.error)
        return answer, received[0] if received else None

    def release_later(self, number: int) -> None:
        """Tell the agent, with the next request, that this process no longer uses a file. Can be called on any thread
        at any time.
        """
        self._released.append(number)

    def find_agent(self) -> bool:
        """Whether an agent is running. If one is, connects to it."""
        with self._guard:
            return self._is_connected() or self._connect(start=False)

    def is_connected(self) -> bool:
        """Whether the newest connection is still open. Sends nothing to the agent, and does not connect again."""
        with self._guard:
            return self._is_connected()

    def close(self) -> None:
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def forget(self) -> None:
        """Called in a forked child: close the copy of the connection; otherwise the agent would not notice when the
        parent ends.
        """
        self._guard = RLock()
        self.close()

    def _is_connected(self) -> bool:
        """Whether the connection is open, as far as this side can know without a request."""
        if self._connection is None:
            return False
        if not _is_readable(self._connection.fileno(), 0):
            return True
        self._mark_lost("has ended")  # data without a request cannot come from a running agent
        return False

    def _mark_lost(self, how: str) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._released.clear()
        self.lost_message = f"the memory agent (process {self._agent}) {how}; the checkpoints that it held are lost"
        log.warning("memory://%s: %s", self.run, self.lost_message)

    def _exchange(
        self, connection: socket.socket, request: AgentRequest, fd: int | None
    ) -> tuple[AgentResponse, list[int]]:
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
            how = f"sent an invalid answer ({error})"
        except BaseException:  # the answer may still arrive, and would be taken for the answer to the next request
            connection.close()
            self._connection = None
            raise
        self._mark_lost(how)
        lost = self._lost_error()
        assert lost is not None, "the connection is lost"
        raise lost

    def forget_loss(self) -> None:
        """Called when the lock was taken again: later errors do not mention an agent that has ended before."""
        self.lost_message = ""

    def _lost_error(self) -> MemoryAgentError | None:
        """The error that checkpoints were lost with an agent. None if no agent has ended since the lock was taken last.
        """
        if not self.lost_message:
            return None
        return MemoryAgentError(
            self.lost_message, run=f"memory://{self.run}", next="save again: the next save starts a new agent"
        )

    # Connecting

    def _connect(self, *, start: bool) -> bool:
        """Connect to the agent. Returns whether an agent is running. Raises MemoryAgentError if the agent refuses to
        serve this process.
        """
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
                    f"no memory agent is running in {directory} after {AGENT_START_S:.0f} s",
                    next=f"read the agent's log, {directory}/{LOG_NAME}",
                )
            start_agent(directory)

    def _greet(self, connection: socket.socket, directory: Path) -> bool:
        """Exchange versions. Returns whether the agent answers; an agent that is ending does not. Before it raises an
        error (see `_connect`), closes the connection.
        """
        self._agent, uid = peer_credentials(connection)
        try:
            if uid != os.geteuid():
                raise MemoryAgentError(
                    f"the process that listens in {directory} belongs to another user",
                    expected=f"user {os.geteuid()}", found=f"user {uid}",
                    next="find out who started that process; then remove the directory",
                )
            try:
                send(connection, encode(AgentRequest("hello", self.run, number=PROTOCOL, text=__version__)))
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
                    process=f"flowstone {__version__}, protocol {PROTOCOL}",
                    next=f"use the release of flowstone that the agent has; or {_STOP}",
                )
        except (OSError, msgspec.DecodeError) as error:
            connection.close()
            raise MemoryAgentError(
                f"the process that listens in {directory} (process {self._agent}) does not answer like a memory agent",
                found=error, next=f"use the release of flowstone that is running there; or {_STOP}",
            ) from error
        except BaseException:
            connection.close()
            raise
        return True


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _connected(directory: Path, *, create: bool) -> socket.socket | None:
    """A connection to the agent that listens in that directory; None if there is none."""
    opened = open_directory(directory, create=create)
    if opened is None:
        return None
    connection = make_socket()
    try:
        # This option limits the time without making the socket non-blocking. A non-blocking connect fails at once if
        # many clients connect at the same time.
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
            next=f"read the agent's log, {directory}/{LOG_NAME}",
        ) from error
    finally:
        os.close(opened)
    return connection


def start_agent(directory: Path) -> None:
    """Start an agent, unless one is listening by now. Returns once an agent listens.

    The agent leaves this process' session and process group, and is not its child.
    """
    # Absolute paths, as the agent has another working directory, and starts children.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)}
    command = [sys.executable, "-P", "-m", extension("agent").__name__, str(directory)]
    started = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
        start_new_session=True,
    )
    try:
        _, message = started.communicate(timeout=AGENT_START_S)
    except subprocess.TimeoutExpired:
        started.kill()
        started.communicate()
        message = f"it did not listen within {AGENT_START_S:.0f} s".encode()
    if started.returncode:
        raise MemoryAgentError(
            "cannot start a memory agent", found=message.decode(errors="replace").strip()[-500:] or started.returncode,
            next=f"run `{sys.executable} -m flowstone.agent {directory}`, and read {directory}/{LOG_NAME}",
        )


def stop_agent(timeout_s: float) -> int | None:
    """End this user's agent on this node, whichever release of Flowstone has started it, and wait until it has ended.

    returns  its process id; None if none was running
    raises   MemoryAgentError if it has not ended after `timeout_s`
    """
    connection = _connected(agent_directory(), create=False)
    if connection is None:
        return None
    with connection:
        pid, uid = peer_credentials(connection)
        if uid != os.geteuid() or not pid:
            raise MemoryAgentError(
                "the memory agent cannot be stopped from here", found=f"process {pid} of user {uid}",
                next="stop the agent in the container in which it was started, as the same user",
            )
        try:
            process_fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return pid
    try:
        os.kill(pid, signal.SIGTERM)
        if _is_readable(process_fd, timeout_s):
            return pid
    finally:
        os.close(process_fd)
    raise MemoryAgentError(
        f"the memory agent (process {pid}) has not ended after {timeout_s:.0f} s",
        found="it is still flushing checkpoints",
        next=f"wait until it ends; or run `kill -9 {pid}`, which loses its checkpoints",
    )


def _is_readable(fd: int, timeout_s: float) -> bool:
    """Wait at most `timeout_s`. Returns whether data has arrived or the other side has closed."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
