"""Shared rings: memory that the ranks of a node share. Its owner fills it, the others copy out of it.

An anonymous file, so it is freed with the last process that has it open, however those end.

    counters  of the owner: batches FILLED, batches TAKEN out of all rings; FAILED: if it cannot go on, one more than
              the number of the rank that is the cause
    message   what the owner wants to be read, once
    ring      two halves, filled in turn
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from enum import IntEnum
from pathlib import Path

import msgspec
import numpy as np

from flowstone import _native
from flowstone.config import BLOCK_BYTES
from flowstone.errors import FlowstoneError, StorageError
from flowstone.store.jobs import JobReading

_MESSAGE_AT = BLOCK_BYTES


class Counter(IntEnum):
    """Positions among the counters."""

    FILLED = 0
    TAKEN = 1
    FAILED = 2


class Announcement(msgspec.Struct, frozen=True):
    """Where a process finds another one's ring.

    inode    that it is the one that was meant
    ring_at  where in it the ring begins
    """

    pid: int
    fd: int
    inode: int
    message_bytes: int
    ring_at: int
    ring_bytes: int


def node() -> str:
    """Equal for processes that may share rings: one boot of one machine, one space of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # hidden from us, and so are other processes
        return f"{socket.gethostname()}/{os.getpid()}"


class SharedRing:
    """One that this process owns. `address`: of its ring."""

    def __init__(self, message: bytes, *, ring_at: int, ring_bytes: int) -> None:
        """`ring_at`, a multiple of BLOCK_BYTES, lies behind the message. Touches no memory of the ring.

        raises  OSError
        """
        assert ring_at % BLOCK_BYTES == 0, "what is mapped begins on a page"
        assert ring_at >= _MESSAGE_AT + len(message), "the message has its room"
        self._fd = os.memfd_create("flowstone-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, ring_at + ring_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # who has mapped it may touch all of it
            os.pwrite(self._fd, message, _MESSAGE_AT)
            self._head = mmap.mmap(self._fd, BLOCK_BYTES)
            self._ring = mmap.mmap(self._fd, ring_bytes, offset=ring_at)
        except BaseException:
            os.close(self._fd)
            raise
        self._counters = np.frombuffer(self._head, np.int64, len(Counter))
        self.address = np.frombuffer(self._ring, np.uint8).ctypes.data
        inode = os.fstat(self._fd).st_ino
        self.announcement = Announcement(os.getpid(), self._fd, inode, len(message), ring_at, ring_bytes)

    def tell(self, counter: Counter, value: int) -> None:
        """Set a counter: what was put into the ring before is there for who sees it."""
        self._counters[counter] = value

    def close(self) -> None:
        del self._counters
        self._head.close()
        self._ring.close()
        os.close(self._fd)


class PeerRing:
    """Another process's, or our own: `file` is what the engine reads it by."""

    def __init__(self, announcement: Announcement) -> None:
        """Raises OSError where this process may not look into that one."""
        self._pid = announcement.pid
        self._fd = os.open(f"/proc/{announcement.pid}/fd/{announcement.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(self._fd).st_ino != announcement.inode:
                raise FileNotFoundError(f"process {announcement.pid} has another file there")
            self.message = os.pread(self._fd, announcement.message_bytes, _MESSAGE_AT)
            self._head = mmap.mmap(self._fd, BLOCK_BYTES, prot=mmap.PROT_READ)
            self._ring = mmap.mmap(self._fd, announcement.ring_bytes, prot=mmap.PROT_READ, offset=announcement.ring_at)
        except BaseException:
            os.close(self._fd)
            raise
        self._counters = np.frombuffer(self._head, np.int64, len(Counter))
        self.file = _native.File(
            fd=self._fd, path=f"the ring of process {announcement.pid}", alignment=1,
            mapped=np.frombuffer(self._ring, np.uint8).ctypes.data - announcement.ring_at,
        )

    def count(self, counter: Counter) -> int:
        return int(self._counters[counter])

    def is_alive(self) -> bool:
        """Whether the owner's process is; one that has ended, and that nobody has asked how, is not."""
        try:
            state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in ("Z", "X")

    def close(self) -> None:
        del self._counters
        self._head.close()
        self._ring.close()
        os.close(self._fd)


class RingReading(JobReading):
    """Extents on their way out of rings; a store's Reading."""

    def __init__(self, job: _native.ReadJob) -> None:
        super().__init__(Path(), job)

    def _error(self) -> FlowstoneError | None:
        fault = self._job.fault
        return None if fault is None else StorageError(
            f"cannot copy what another rank read: {fault.operation}", path=fault.path, errno=fault.errno,
            next="load again, with EngineOptions(share_reads=False)",
        )
