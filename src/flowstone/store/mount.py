"""The mount of a directory, with machine and kernel; and the memory that the machine has left."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import msgspec

from flowstone.errors import StorageError
from flowstone.format.digest import digest

_MACHINE_ID = Path("/etc/machine-id")
_MOUNTS = Path("/proc/self/mountinfo")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class Mount(msgspec.Struct, frozen=True):
    """A mount on a machine. Measurements are valid only on the same one.

    machine  a digest of machine-id(5), which is private, or else the host's name; and of the number of processors
    kernel   its release
    device   the mounted device: "/dev/nvme0n1p1", "server:/export", "tmpfs"
    """

    machine: str
    kernel: str
    device: str
    mount_point: str
    file_system: str

    def __str__(self) -> str:
        return f"{self.file_system} on {self.device}, mounted at {self.mount_point}"

    def differences(self, other: Mount) -> list[str]:
        """The fields in which `other` differs, for people."""
        if self.machine != other.machine:
            return ["another machine"]
        pairs = {
            "kernel": (self.kernel, other.kernel), "device": (self.device, other.device),
            "mount point": (self.mount_point, other.mount_point),
            "file system": (self.file_system, other.file_system),
        }
        return [f"another {what} ({theirs}, not {ours})" for what, (ours, theirs) in pairs.items() if ours != theirs]


def mount_of(path: Path) -> Mount:
    """The mount of `path`, or of its nearest existing parent. Raises StorageError if it cannot be determined."""
    device, mount_point, file_system = _mount(_existing(path))
    return Mount(
        machine=_machine(), kernel=platform.release(), device=device, mount_point=mount_point, file_system=file_system
    )


def _existing(path: Path) -> Path:
    # os.path, not Path: a parent that may not be examined counts as missing, rather than raising.
    return Path(os.path.realpath(next(at for at in (path.absolute(), *path.absolute().parents) if os.path.exists(at))))


def _machine() -> str:
    try:
        identity = _MACHINE_ID.read_text().strip()
    except OSError:
        identity = ""  # safe: containers often have none; then the host's name is used
    return digest(f"{identity or platform.node()} {platform.machine()} {os.cpu_count()}".encode())


def _mount(path: Path) -> tuple[str, str, str]:
    """(device, mount point, file system) of the mount that holds `path`: the last line with the longest mount point.

    Not by st_dev, which matches no line of the table on btrfs and other file systems of several volumes.
    """
    best: tuple[str, str, str] | None = None
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError as error:
        raise StorageError(
            f"cannot find the mount of {path}: {_MOUNTS} is not readable", errno=error.errno or 0,
            next="mount /proc",
        ) from error
    for line in lines:
        before, _, after = line.partition(" - ")
        mount_point = Path(_plain(before.split(" ")[4]))
        if path.is_relative_to(mount_point) and (best is None or len(str(mount_point)) >= len(best[1])):
            file_system, device, *_ = after.split(" ")
            best = _plain(device), str(mount_point), file_system
    if best is None:
        raise StorageError(f"cannot find the mount of {path}", found=f"no line for it in {_MOUNTS}")
    shown = [name.encode(errors="replace").decode() for name in best]  # JSON cannot hold names that are not text
    return shown[0], shown[1], shown[2]


def _plain(field: str) -> str:
    """Undo the octal escapes that mountinfo writes for blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def available_bytes() -> int:
    """Memory that this process could still allocate: the machine's, or its control group's if less."""
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        raise OSError(f"{_MEMINFO} has no MemAvailable")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _number(path: Path) -> int | None:
    """The number in a control file; None if there is no such file or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # safe: no control group limit is visible
    return int(text) if text.isdigit() else None
