"""Sockets between processes of one user on one node: whole messages, in a directory that only this user may enter.

A socket of the kind SOCK_SEQPACKET keeps messages apart, so a message is never half there, and says nothing about its
length. A message has at most one descriptor. Both sides check the other's user: docs/decisions/025-memory-tier.md.
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
    """A socket's path, by a directory's descriptor: as short as a socket's has to be, and in no other directory."""
    return f"/proc/self/fd/{directory_fd}/{name}"


def bind(directory_fd: int, name: str) -> socket.socket:
    """A socket of that name, which only this user can connect to. Removes one that a dead process has left."""
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
    """The next message, and its descriptors, which are the caller's; no bytes at the end.

    raises  OSError, EMSGSIZE for a message that is too long
    """
    data, fds, flags, _ = socket.recv_fds(
        connection, AGENT_MESSAGE_BYTES_MAX, 4, socket.MSG_CMSG_CLOEXEC
    )
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMSGSIZE, "a message that is too long")
    return data, list(fds)


def send(connection: socket.socket, data: bytes, fd: int | None = None) -> None:
    """Raises OSError."""
    if len(data) > AGENT_MESSAGE_BYTES_MAX:
        raise OSError(errno.EMSGSIZE, "a message that is too long")
    if fd is None:
        connection.send(data, socket.MSG_NOSIGNAL)
    else:
        socket.send_fds(connection, [data], [fd], socket.MSG_NOSIGNAL)


def peer(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end, 0 where it cannot be seen from here, and its user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def agent_directory() -> Path:
    """Where this user's agent of this node listens."""
    given = os.environ.get(DIRECTORY_VARIABLE, "")
    # A directory of another user there, or a link, is refused: open_directory. Absolute: the agent has another working
    # directory.
    return Path(given).absolute() if given else Path(f"/tmp/flowstone-{os.geteuid()}")  # noqa: S108


def open_directory(path: Path, *, create: bool) -> int | None:
    """A descriptor of the agent's directory, which is this user's alone; None if there is none, and none is to be made.

    raises  StorageError if another user owns it, or may read it or put something there
    """
    if create:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass  # whose it is, is looked at below
        except OSError as error:
            raise StorageError(
                f"cannot make the memory agent's directory {path}", errno=error.errno or 0, reason=error.strerror,
                next=f"set {DIRECTORY_VARIABLE} to a directory that this user can make",
            ) from error
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _not_ours(path, error.strerror or "no directory") from error
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        raise _not_ours(path, f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}")
    return fd


def _not_ours(path: Path, found: str) -> StorageError:
    return StorageError(
        f"the memory agent's directory {path} is not safe", expected=f"a directory of user {os.geteuid()}, mode 0700",
        found=found, next=f"remove it, or set {DIRECTORY_VARIABLE} to another directory",
    )
