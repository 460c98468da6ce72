"""Shared rings: memory that the ranks of a node share. The owner of a ring fills it; other ranks copy from it.

A ring is an anonymous file, so it is freed once the last process that has it open ends, even by a crash.

    counters  written by the owner. FILLED: how many batches it has put into its ring. TAKEN: how many batches it has
              copied out of all rings. FAILED: 0, or one more than the number of the rank that caused a failure
    message   the list of chunks that the owner needs, written once
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

from flowstone._native import File, ReadJob
from flowstone.config import BLOCK_BYTES
from flowstone.errors import FlowstoneError, StorageError
from flowstone.store.jobs import JobReadHandle

_MESSAGE_AT = BLOCK_BYTES


class RingCounter(IntEnum):
    """The index of each counter of a ring; the module's docstring says what they count."""

    FILLED = 0
    TAKEN = 1
    FAILED = 2


class RingAnnouncement(msgspec.Struct, frozen=True):
    """Where other processes find a process's ring.

    inode    inode of the ring's file, to check that the right file was opened
    ring_at  offset of the ring in the file, in bytes
    """

    pid: int
    fd: int
    inode: int
    message_bytes: int
    ring_at: int
    ring_bytes: int


def node_identity() -> str:
    """A text that is equal for processes that can share rings: those on the same machine, since the same boot, and in
    the same PID namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # if /proc is hidden, other processes are hidden, too
        return f"{socket.gethostname()}/{os.getpid()}"


class SharedRing:
    """A ring that this process owns. `address`: the address of the ring's memory."""

    def __init__(self, message: bytes, *, ring_at: int, ring_bytes: int) -> None:
        """`ring_at`, a multiple of BLOCK_BYTES, is the ring's offset, after the message. Touches no memory of the ring.

        raises  OSError
        """
        assert ring_at % BLOCK_BYTES == 0, "a mapping begins at a page"
        assert ring_at >= _MESSAGE_AT + len(message), "the message fits before the ring"
        self._fd = os.memfd_create("flowstone-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, ring_at + ring_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # so that mapped pages stay accessible
            os.pwrite(self._fd, message, _MESSAGE_AT)
            self._head = mmap.mmap(self._fd, BLOCK_BYTES)
            self._ring = mmap.mmap(self._fd, ring_bytes, offset=ring_at)
        except BaseException:
            os.close(self._fd)
            raise
        self._counters = np.frombuffer(self._head, np.int64, len(RingCounter))
        self.address = np.frombuffer(self._ring, np.uint8).ctypes.data
        inode = os.fstat(self._fd).st_ino
        self.announcement = RingAnnouncement(os.getpid(), self._fd, inode, len(message), ring_at, ring_bytes)

    def set_counter(self, counter: RingCounter, value: int) -> None:
        """Set a counter. A process that sees the new value also sees all earlier writes to the ring."""
        self._counters[counter] = value

    def close(self) -> None:
        del self._counters
        self._head.close()
        self._ring.close()
        os.close(self._fd)


class PeerRing:
    """The ring of another process, or of this one. The engine reads it through `file`."""

    def __init__(self, announcement: RingAnnouncement) -> None:
        """Open the ring. Raises OSError if this process may not open the file of the other process."""
        self._pid = announcement.pid
        self._fd = os.open(f"/proc/{announcement.pid}/fd/{announcement.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(self._fd).st_ino != announcement.inode:
                raise FileNotFoundError(f"the file of process {announcement.pid} was replaced by another one")
            self.message = os.pread(self._fd, announcement.message_bytes, _MESSAGE_AT)
            self._head = mmap.mmap(self._fd, BLOCK_BYTES, prot=mmap.PROT_READ)
            self._ring = mmap.mmap(self._fd, announcement.ring_bytes, prot=mmap.PROT_READ, offset=announcement.ring_at)
        except BaseException:
            os.close(self._fd)
            raise
        self._counters = np.frombuffer(self._head, np.int64, len(RingCounter))
        self.file = File(
            fd=self._fd, path=f"the ring of process {announcement.pid}", alignment=1,
            mapped=np.frombuffer(self._ring, np.uint8).ctypes.data - announcement.ring_at,
        )

    def count(self, counter: RingCounter) -> int:
        return int(self._counters[counter])

    def is_alive(self) -> bool:
        """Whether the owner's process is alive; False for a zombie."""
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


class RingReadHandle(JobReadHandle):
    """A running copy of byte ranges out of rings. It has the interface of a store's ReadHandle."""

    def __init__(self, job: ReadJob) -> None:
        super().__init__(Path(), job)

    def _error(self) -> FlowstoneError | None:
        fault = self._job.fault
        return None if fault is None else StorageError(
            f"cannot copy the bytes that another rank read: {fault.operation}", path=fault.path, errno=fault.errno,
            next="load again, with EngineOptions(share_reads=False)",
        )
