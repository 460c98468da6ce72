"""Describe the machine of a measurement, without names that identify the machine or its user."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path


def describe(directory: Path) -> Mapping[str, str]:
    """Facts about the machine and the file system of `directory`, in the order in which they are shown."""
    source, kind, device = _mount(directory)
    return {
        "CPU": _cpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB",
        "kernel": kernel(),
        "file system": kind,
        "device": _device(source, device),
    }


def kernel() -> str:
    """The kernel, such as "Linux 6.18.44". The part after a dash is dropped, since it may contain a name."""
    return f"{platform.system()} {platform.release().split('-', 1)[0]}"


def file_system(directory: Path) -> str:
    """The type of the file system according to the mount table, such as ext4, xfs, tmpfs, lustre or nfs4."""
    return _mount(directory)[1]


def available_bytes() -> int:
    """How many bytes of memory are available without swapping (proc_meminfo(5))."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _cpu() -> str:
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    name = facts.get("model name", platform.machine())
    family = facts.get("cpu family")
    return f"{name}, family {family}, model {facts.get('model', '?')}" if family else name


def _mount(directory: Path) -> tuple[str, str, str]:
    """The mount that contains `directory`, as (source, type of the file system, major:minor of the device)."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        if fields.split()[2] == number:
            kind, source, *_ = tail.split()
            return source, kind, number
    return "", "unknown", number


def _device(source: str, device: str) -> str:
    block_link = Path("/sys/dev/block") / device
    if not block_link.exists():
        return "none of this machine's"  # a network, memory, or a file system on several devices
    block = block_link.resolve()
    queue = next((path / "queue" for path in (block, block.parent) if (path / "queue").exists()), None)
    spinning = queue is not None and (queue / "rotational").read_text().strip() == "1"
    name = Path(source).name
    kind = "virtio disk" if name.startswith("vd") else "NVMe disk" if name.startswith("nvme") else "disk"
    # A virtual disk does not know whether it rotates, so that is left out.
    return kind if kind == "virtio disk" else f"{kind}, {'rotating' if spinning else 'solid state'}"
