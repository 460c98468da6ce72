"""Sockets between processes of one user on one node, in a directory that only this user may enter.

SOCK_SEQPACKET preserves message boundaries, so a message arrives complete, and needs no length. A message has at most
one descriptor. Client and server check that the other process is this user's, see docs/decisions/025-memory-tier.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from pathlib import Path

from flowstone.config import AGENT_MESSAGE_BYTES_MAX
from flowstone.errors import StorageError

DIRECTORY_VARIABLE = "FLOWSTONE_AGENT_DIR"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def make_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def socket_path(directory_fd: int, name: str) -> str:
    """The path of a socket through the descriptor of its directory. It is short enough for a socket's address, and
    leads to exactly that directory.
    """
    return f"/proc/self/fd/{directory_fd}/{name}"


def bind(directory_fd: int, name: str) -> socket.socket:
    """Create a listening socket with that name, to which only this user can connect. Removes the socket of a dead
    process.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory_fd)
    listener = make_socket()
    before = os.umask(0o177)
    try:
        listener.bind(socket_path(directory_fd, name))
    finally:
        os.umask(before)
    return listener


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive the next message. Returns its bytes, and its descriptors, which the caller must close. Returns no bytes
    once the other side has closed the connection.

    raises  OSError  with EMSGSIZE for a message that is too long
    """
    data, fds, flags, _ = socket.recv_fds(
        connection, AGENT_MESSAGE_BYTES_MAX, 4, socket.MSG_CMSG_CLOEXEC
    )
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMSGSIZE, "the message is too long")
    return data, list(fds)


def send(connection: socket.socket, data: bytes, fd: int | None = None) -> None:
    """Send one message, with at most one descriptor. Raises OSError."""
    if len(data) > AGENT_MESSAGE_BYTES_MAX:
        raise OSError(errno.EMSGSIZE, "the message is too long")
    if fd is None:
        connection.send(data, socket.MSG_NOSIGNAL)
    else:
        socket.send_fds(connection, [data], [fd], socket.MSG_NOSIGNAL)


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """The process id and the user id of the process at the other end. The process id is 0 if that process is in another
    PID namespace.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def agent_directory() -> Path:
    """The directory where this user's agent on this node listens."""
    given = os.environ.get(DIRECTORY_VARIABLE, "")
    # `open_directory` refuses a link, or another user's directory. The path is absolute, as the agent has another
    # working directory.
    return Path(given).absolute() if given else Path(f"/tmp/flowstone-{os.geteuid()}")  # noqa: S108


def open_directory(path: Path, *, create: bool) -> int | None:
    """Open the agent's directory, which only this user may enter. Returns its descriptor; None if it does not exist.

    create  make the directory if it does not exist
    raises  StorageError if another user owns it, or may read or write it
    """
    if create:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass  # whose directory it is, is checked below
        except OSError as error:
            raise StorageError(
                f"cannot create the memory agent's directory {path}", errno=error.errno or 0, reason=error.strerror,
                next=f"set {DIRECTORY_VARIABLE} to a directory that this user can create",
            ) from error
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _not_ours(path, error.strerror or "not a directory") from error
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise _not_ours(path, f"user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}")
    return fd


def _not_ours(path: Path, problem: str) -> StorageError:
    return StorageError(
        f"the memory agent's directory {path} is not a private directory of this user",
        expected=f"a directory of user {os.geteuid()}, mode 0700", found=problem,
        next=f"remove that directory, or set {DIRECTORY_VARIABLE} to another one",
    )
