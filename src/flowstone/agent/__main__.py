"""`python -m flowstone.agent [DIRECTORY]`: start an agent in the background that listens in DIRECTORY.

The command returns once this or another agent listens in DIRECTORY. The agent ends by itself when it is no longer
needed.
"""

from __future__ import annotations

import fcntl
import os
import resource
import sys
import time
import traceback
from pathlib import Path

from flowstone.agent.server import Server
from flowstone.config import AGENT_START_S
from flowstone.errors import FlowstoneError
from flowstone.store.memory.agent_wire import LOCK_NAME, LOG_NAME, SOCKET_NAME
from flowstone.store.memory.local_sockets import agent_directory, bind, make_socket, open_directory, socket_path

_LOG_BYTES_MAX = 1 << 20
_BACKLOG = 128


def main() -> int:
    """Start the agent, unless one listens. Returns the exit status."""
    directory_path = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else agent_directory()
    try:
        directory = open_directory(directory_path, create=True)
        assert directory is not None, "it was created"
        lock = _lock(directory)
        if lock is None:
            return 0 if _await_other(directory) else 1
        # this process has the lock, so an existing socket is that of a dead agent
        listener = bind(directory, SOCKET_NAME)
    except (FlowstoneError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    ready_reader, ready_writer = os.pipe()
    if os.fork():
        os.close(ready_writer)
        return 0 if os.read(ready_reader, 1) else 1
    os.close(ready_reader)
    os.setsid()
    _detach(directory)
    # called only after the fork: clients see the process that called `listen` as the other end
    listener.listen(_BACKLOG)
    os.write(ready_writer, b"1")
    os.close(ready_writer)
    try:
        Server(listener, directory_path).serve()
    except BaseException:
        traceback.print_exc()  # printed before `_leave`, which removes an empty log
        return 1
    finally:
        _leave(directory, directory_path)
    return 0


def _lock(directory: int) -> int | None:
    """Lock the directory as long as this process lives. Returns a descriptor; None if another agent has the lock."""
    while True:
        lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        try:  # an agent that is ending may have removed the file
            if os.path.samestat(os.stat(LOCK_NAME, dir_fd=directory, follow_symlinks=False), os.fstat(lock)):
                return lock
        except FileNotFoundError:
            pass  # an agent that is ending has removed the file; the next attempt creates another one
        os.close(lock)


def _await_other(directory: int) -> bool:
    """Wait until the agent that has the lock listens. Returns False after a timeout."""
    deadline = time.monotonic() + AGENT_START_S / 4
    while time.monotonic() < deadline:
        with make_socket() as connection:
            try:
                connection.connect(socket_path(directory, SOCKET_NAME))
                return True
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.02)
    print("another agent has the lock, but does not listen", file=sys.stderr)
    return False


def _detach(directory: int) -> None:
    """Detach this process from the one that started it: change the working directory and the standard streams."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(LOG_NAME, flags, 0o600, dir_fd=directory)
    if os.fstat(log).st_size > _LOG_BYTES_MAX:
        os.ftruncate(log, 0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    os.chdir("/")
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)  # each file needs one descriptor, and each connection two
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))


def _leave(directory: int, path: Path) -> None:
    """Remove the agent's files while the lock is held. The next agent creates its own files."""
    try:
        if not os.stat(LOG_NAME, dir_fd=directory, follow_symlinks=False).st_size:
            os.unlink(LOG_NAME, dir_fd=directory)
        os.unlink(SOCKET_NAME, dir_fd=directory)
        os.unlink(LOCK_NAME, dir_fd=directory)
        os.rmdir(path)
    except OSError:
        return  # a log with content stays, and the next agent uses the remaining files


if __name__ == "__main__":
    sys.exit(main())
