"""Finds which mounted file system a directory is on, and identifies the machine and its kernel; and finds how much
memory this process can still allocate.
"""

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
    """A mounted file system on a machine. Measurements of a mount are valid only on the same machine and mount.

    machine  a digest of machine-id(5), which is private, and of the number of processors. Without a machine-id, the
             host's name is used
    kernel   the kernel's release
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
        """The fields in which `other` differs, in words."""
        if self.machine != other.machine:
            return ["another machine"]
        pairs = {
            "kernel": (self.kernel, other.kernel), "device": (self.device, other.device),
            "mount point": (self.mount_point, other.mount_point),
            "file system": (self.file_system, other.file_system),
        }
        return [f"another {field} ({theirs}, not {ours})" for field, (ours, theirs) in pairs.items() if ours != theirs]


def mount_of(path: Path) -> Mount:
    """The mount of `path`, or of its nearest existing parent. Raises StorageError if it cannot be determined."""
    device, mount_point, file_system = _mount(_existing(path))
    return Mount(
        machine=_machine(), kernel=platform.release(), device=device, mount_point=mount_point, file_system=file_system
    )


def _existing(path: Path) -> Path:
    # os.path is used, not Path, so that a parent directory that may not be examined counts as missing, and raises no
    # error.
    absolute = path.absolute()
    return Path(os.path.realpath(next(path for path in (absolute, *absolute.parents) if os.path.exists(path))))


def _machine() -> str:
    try:
        identity = _MACHINE_ID.read_text().strip()
    except OSError:
        identity = ""  # containers often have no machine-id; then the host's name is used
    return digest(f"{identity or platform.node()} {platform.machine()} {os.cpu_count()}".encode())


def _mount(path: Path) -> tuple[str, str, str]:
    """The mount of `path`, as (device, mount point, file system). In the table of mounts, it is the last line whose
    mount point is the longest prefix of `path`.

    st_dev cannot be used: on btrfs and other file systems with several volumes it matches no line of the table.
    """
    best: tuple[str, str, str] | None = None
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError as error:
        raise StorageError(
            f"cannot find the mount of {path}: {_MOUNTS} is not readable",
            errno=error.errno or 0, next="mount /proc, for example: mount -t proc proc /proc",
        ) from error
    for line in lines:
        before, _, after = line.partition(" - ")
        mount_point = Path(_plain(before.split(" ")[4]))
        if path.is_relative_to(mount_point) and (best is None or len(str(mount_point)) >= len(best[1])):
            file_system, device, *_ = after.split(" ")
            best = _plain(device), str(mount_point), file_system
    if best is None:
        raise StorageError(
            f"cannot find the mount of {path}", found=f"no line for this path in {_MOUNTS}",
            next="check that /proc is mounted",
        )
    # JSON cannot contain names that are not valid text
    shown = [name.encode(errors="replace").decode() for name in best]
    return shown[0], shown[1], shown[2]


def _plain(field: str) -> str:
    """A field of mountinfo, in which octal escapes are replaced by the blanks and backslashes that they stand for."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def available_bytes() -> int:
    """How many bytes of memory this process can still allocate: as much as the machine has available, or its control
    group, if that has less.
    """
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
    """The number in a control file. None if there is no such file, or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # no limit of a control group is visible
    return int(text) if text.isdigit() else None
