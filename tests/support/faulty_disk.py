"""A FUSE file system in memory that injects the faults that a test requests.

It is really mounted, by a process that speaks the kernel's FUSE protocol (linux/fuse.h, version 7.31). So a test sees a
refused, shortened or shrunken request as the result of a system call, with every engine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from own_process import PROCESSES

ROOT = 1
BLOCK_BYTES = 4096
_REQUEST_BYTES_MAX = 1 << 20
_MESSAGE_BYTES_MAX = _REQUEST_BYTES_MAX + 4 * BLOCK_BYTES
_MAX_PAGES, _BIG_WRITES = 1 << 22, 1 << 5  # flags of INIT
_SIZE_GIVEN = 1 << 3  # in SETATTR
# The reply to an open lets requests bypass the page cache, since with it the protocol allows no short counts
# (FOPEN_DIRECT_IO). The flags of a descriptor show whether it was opened with O_DIRECT.
_OPENED = struct.pack("<Q2I", 0, 1, 0)
_NO_REPLY = {2: "forget", 36: "interrupt", 42: "batch_forget"}
_OPERATIONS = {
    1: "lookup", 3: "getattr", 4: "setattr", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename", 14: "open",
    15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync", 25: "flush", 26: "init", 27: "opendir",
    28: "readdir", 29: "releasedir", 30: "fsyncdir", 35: "create", 43: "fallocate", 45: "rename2",
}


@dataclass(slots=True)
class Trouble:
    """A fault for requests of one kind: "write", "read", "fsync", "fallocate", "create", ...

    error      the errno that they return; 0 for none
    bytes_max  moves only that many bytes and returns a short count
    size       first truncates the file to this size
    direct     applies only to requests on descriptors with (without) O_DIRECT
    name       applies only to files whose name contains this
    spared     the number of requests that succeed first
    times      the number of requests that fail; None for no limit
    """

    operation: str
    error: int = 0
    bytes_max: int = _REQUEST_BYTES_MAX
    size: int | None = None
    direct: bool | None = None
    name: str = ""
    spared: int = 0
    times: int | None = None

    def befalls(self, operation: str, name: str, direct: bool) -> bool:
        if operation != self.operation or self.name not in name or self.direct not in (None, direct):
            return False
        if self.spared > 0:
            self.spared -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return self.times is None or self.times >= 0


@dataclass(slots=True)
class _Node:
    mode: int
    name: str
    content: bytearray = field(default_factory=bytearray)
    entries: dict[str, int] = field(default_factory=dict)


class _Server:
    def __init__(self, device: int) -> None:
        self.device = device
        self.nodes = {ROOT: _Node(stat.S_IFDIR | 0o755, "")}
        self.troubles: list[Trouble] = []
        self.met: dict[str, int] = {}  # the number of requests of each kind that a fault was injected into

    def serve(self, control: Connection) -> None:
        """Serve requests until the file system is unmounted or the test closes its end of `control`."""
        poll = select.poll()
        poll.register(self.device, select.POLLIN)
        poll.register(control.fileno(), select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self.device:
                    try:
                        message = os.read(self.device, _MESSAGE_BYTES_MAX)
                    except OSError as error:
                        if error.errno == errno.ENOENT:
                            continue  # the kernel has withdrawn the request
                        return
                    self._answer(message)
                else:
                    try:
                        self.troubles = control.recv()
                    except EOFError:
                        return
                    control.send(self.met)
                    self.met = {}

    def _answer(self, message: bytes) -> None:
        opcode, unique, node = struct.unpack_from("<IQQ", message, 4)
        if opcode in _NO_REPLY:
            return
        operation = _OPERATIONS.get(opcode, "")
        try:
            if not operation:
                raise OSError(errno.ENOSYS, "")
            body = getattr(self, operation)(node, message[40:])
            code = 0
        except OSError as error:
            body, code = b"", error.errno or errno.EIO
        os.write(self.device, struct.pack("<IiQ", 16 + len(body), -code, unique) + body)

    def _befallen(self, operation: str, node: int, direct: bool = False) -> Trouble:
        """The fault for a request; one without effect if there is none."""
        inode = self.nodes[node]
        for trouble in self.troubles:
            if trouble.befalls(operation, inode.name, direct):
                self.met[operation] = self.met.get(operation, 0) + 1
                if trouble.size is not None:
                    del inode.content[trouble.size :]
                if trouble.error:
                    raise OSError(trouble.error, "")
                return trouble
        return Trouble(operation)

    # Names

    def _find(self, parent: int, name: str) -> int:
        if name not in self.nodes[parent].entries:
            raise OSError(errno.ENOENT, "")
        return self.nodes[parent].entries[name]

    def _add(self, parent: int, name: str, mode: int) -> int:
        if name in self.nodes[parent].entries:
            raise OSError(errno.EEXIST, "")
        number = max(self.nodes) + 1
        self.nodes[number] = _Node(mode, name)
        self.nodes[parent].entries[name] = number
        return number

    def _attributes(self, node: int) -> bytes:
        inode, size = self.nodes[node], len(self.nodes[node].content)
        blocks = -(-size // 512)
        return struct.pack("<6Q10I", node, size, blocks, 0, 0, 0, 0, 0, 0, inode.mode, 1, 0, 0, 0, BLOCK_BYTES, 0)

    def _entry(self, node: int) -> bytes:
        # The kernel must not cache anything (the zeros), so that it sends every request.
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + self._attributes(node)

    def lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._find(node, _text(body)))

    def getattr(self, node: int, body: bytes) -> bytes:
        return struct.pack("<Q2I", 0, 0, 0) + self._attributes(node)

    def setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<2I2Q", body)
        if valid & _SIZE_GIVEN:
            self._resize(node, size)
        return self.getattr(node, body)

    def mkdir(self, node: int, body: bytes) -> bytes:
        self._befallen("mkdir", node)
        return self._entry(self._add(node, _text(body[8:]), stat.S_IFDIR | 0o755))

    def unlink(self, node: int, body: bytes) -> bytes:
        self._find(node, _text(body))
        del self.nodes[node].entries[_text(body)]  # the node stays, since it may be open
        return b""

    def rmdir(self, node: int, body: bytes) -> bytes:
        if self.nodes[self._find(node, _text(body))].entries:
            raise OSError(errno.ENOTEMPTY, "")
        return self.unlink(node, body)

    def rename(self, node: int, body: bytes, names_at: int = 8) -> bytes:
        (target_parent,) = struct.unpack_from("<Q", body)
        source, target = (part.decode() for part in body[names_at:].split(b"\0")[:2])
        moved = self._find(node, source)
        del self.nodes[node].entries[source]
        self.nodes[target_parent].entries[target] = moved
        self.nodes[moved].name = target
        return b""

    def rename2(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body, 8)
        if flags:  # like network file systems: names cannot be exchanged
            raise OSError(errno.EINVAL, "no flags")
        return self.rename(node, body, names_at=16)

    def opendir(self, node: int, body: bytes) -> bytes:
        return bytes(16)

    def readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<2QI", body)
        listed = b""
        for index, (name, number) in enumerate(self.nodes[node].entries.items()):
            text = name.encode()
            kind = stat.S_IFMT(self.nodes[number].mode) >> 12
            row = struct.pack("<2Q2I", number, index + 1, len(text), kind) + text + bytes(-len(text) % 8)
            if index >= offset and len(listed) + len(row) <= size:
                listed += row
        return listed

    # Files

    def create(self, node: int, body: bytes) -> bytes:
        self._befallen("create", node)
        return self._entry(self._add(node, _text(body[16:]), stat.S_IFREG | 0o644)) + _OPENED

    def open(self, node: int, body: bytes) -> bytes:
        return _OPENED

    def read(self, node: int, body: bytes) -> bytes:
        _, offset, size, _, _, flags, _ = struct.unpack_from("<2Q2IQ2I", body)
        trouble = self._befallen("read", node, bool(flags & os.O_DIRECT))
        return bytes(self.nodes[node].content[offset : offset + min(size, trouble.bytes_max)])

    def write(self, node: int, body: bytes) -> bytes:
        _, offset, size, _, _, flags, _ = struct.unpack_from("<2Q2IQ2I", body)
        moved = min(size, self._befallen("write", node, bool(flags & os.O_DIRECT)).bytes_max)
        content = self.nodes[node].content
        self._resize(node, max(len(content), offset + moved))
        content[offset : offset + moved] = body[40 : 40 + moved]
        return struct.pack("<2I", moved, 0)

    def fallocate(self, node: int, body: bytes) -> bytes:
        _, offset, length = struct.unpack_from("<3Q", body)
        self._befallen("fallocate", node)
        self._resize(node, max(len(self.nodes[node].content), offset + length))
        return b""

    def _resize(self, node: int, size: int) -> None:
        content = self.nodes[node].content
        del content[size:]
        content.extend(bytes(size - len(content)))

    def fsync(self, node: int, body: bytes) -> bytes:
        self._befallen("fsync", node)
        return b""

    def fsyncdir(self, node: int, body: bytes) -> bytes:
        self._befallen("fsyncdir", node)
        return b""

    def flush(self, node: int, body: bytes) -> bytes:
        return b""

    release = releasedir = flush

    # The complete file system

    def init(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<4I", body)[3] & (_MAX_PAGES | _BIG_WRITES)
        pages = _REQUEST_BYTES_MAX // BLOCK_BYTES
        return struct.pack("<4I2H2I2H8I", 7, 31, 0, flags, 8, 6, _REQUEST_BYTES_MAX, 1, pages, *[0] * 9)

    def statfs(self, node: int, body: bytes) -> bytes:
        blocks, files = (1 << 20, 1 << 19, 1 << 19), (1 << 20, 1 << 19)
        return struct.pack("<5Q10I", *blocks, *files, BLOCK_BYTES, 255, BLOCK_BYTES, *[0] * 7)


def _text(body: bytes) -> str:
    return body.split(b"\0", 1)[0].decode()


def _mount_and_serve(position: str, control: Connection) -> None:
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"faulty", position.encode(), b"fuse", 0, options):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    except OSError as error:
        control.send(f"a faulty disk needs a FUSE mount, which was refused: {error}")
        return
    control.send("")
    _Server(device).serve(control)


@dataclass(frozen=True, slots=True)
class FaultyDisk:
    """A mounted file system, and the faults that it injects from now on."""

    path: Path
    control: Connection

    def befall(self, *troubles: Trouble) -> dict[str, int]:
        """Remove all faults; returns the number of requests of each kind that they were injected into."""
        self.control.send(list(troubles))
        return self.control.recv()


@contextmanager
def faulty_disk(path: Path) -> Iterator[FaultyDisk]:
    """Mount it at `path` while this is open; skips the test if this process may not mount it."""
    control, other = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_mount_and_serve, args=(str(path), other), daemon=True)
    process.start()
    other.close()
    if refusal := control.recv():
        pytest.skip(refusal)
    try:
        yield FaultyDisk(path, control)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
        control.close()
        process.join(10)
        process.kill()
