"""`python -m flowstone.agent [DIRECTORY]`: an agent that listens there, in the background; it ends by itself.

Returns once it listens, or another one does.
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
from flowstone.store.agent_wire import LOCK_NAME, LOG_NAME, SOCKET_NAME
from flowstone.store.local_sockets import agent_directory, bind, make_socket, open_directory, socket_path

_LOG_BYTES_MAX = 1 << 20
_BACKLOG = 128


def main() -> int:
    """The exit status."""
    place = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else agent_directory()
    try:
        directory = open_directory(place, create=True)
        assert directory is not None, "it was made"
        lock = _lock(directory)
        if lock is None:
            return 0 if _await_other(directory) else 1
        listener = bind(directory, SOCKET_NAME)  # needs the lock: a socket that is there was a dead agent's
    except (FlowstoneError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        return 0 if os.read(ready, 1) else 1
    os.close(ready)
    os.setsid()
    _detach(directory)
    listener.listen(_BACKLOG)  # here: clients are told the process that has called this
    os.write(tell, b"1")
    os.close(tell)
    try:
        Server(listener, place).serve()
    except BaseException:
        traceback.print_exc()  # before it is asked whether the log says something
        return 1
    finally:
        _leave(directory, place)
    return 0


def _lock(directory: int) -> int | None:
    """The descriptor of the lock, held while this process lives; None if another agent has it."""
    while True:
        lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        try:  # the agent before may have removed it, as it ended
            if os.path.samestat(os.stat(LOCK_NAME, dir_fd=directory, follow_symlinks=False), os.fstat(lock)):
                return lock
        except FileNotFoundError:
            pass  # it has: the next round makes another
        os.close(lock)


def _await_other(directory: int) -> bool:
    """Whether the agent that has the lock comes to listen."""
    deadline = time.monotonic() + AGENT_START_S / 4
    while time.monotonic() < deadline:
        with make_socket() as trial:
            try:
                trial.connect(socket_path(directory, SOCKET_NAME))
                return True
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.02)
    print("another agent has the lock, and does not listen", file=sys.stderr)
    return False


def _detach(directory: int) -> None:
    """Keep nothing of the process that has started this one: its terminal, its directory, its standard streams."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(LOG_NAME, flags, 0o600, dir_fd=directory)
    if os.fstat(log).st_size > _LOG_BYTES_MAX:
        os.ftruncate(log, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(nothing)
    os.chdir("/")
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)  # a file in memory is one, and a connection two
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))


def _leave(directory: int, place: Path) -> None:
    """Remove what was made, while the lock is held: the next agent makes its own."""
    try:
        if not os.stat(LOG_NAME, dir_fd=directory, follow_symlinks=False).st_size:
            os.unlink(LOG_NAME, dir_fd=directory)
        os.unlink(SOCKET_NAME, dir_fd=directory)
        os.unlink(LOCK_NAME, dir_fd=directory)
        os.rmdir(place)
    except OSError:
        return  # safe: a log that says something stays, and the next agent uses what is left


if __name__ == "__main__":
    sys.exit(main())
