"""The machine of a measurement, without names of the machine or its user."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path


def describe(directory: Path) -> Mapping[str, str]:
    """Facts for one line of text, in order. `directory` exists."""
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
    """"Linux 6.18.44"; the part after a dash is dropped, since it may name a place."""
    return f"{platform.system()} {platform.release().split('-', 1)[0]}"


def file_system(directory: Path) -> str:
    """Its type in the mount table: ext4, xfs, tmpfs, lustre, nfs4, ..."""
    return _mount(directory)[1]


def available_bytes() -> int:
    """Memory available without swapping (proc_meminfo(5))."""
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
    """(source, file system, major:minor) of the mount that holds `directory`."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        if fields.split()[2] == wanted:
            kind, source, *_ = tail.split()
            return source, kind, wanted
    return "", "unknown", wanted


def _device(source: str, device: str) -> str:
    at = Path("/sys/dev/block") / device
    if not at.exists():
        return "none of this machine's"  # a network, memory, or a file system over several devices
    block = at.resolve()
    queue = next((path / "queue" for path in (block, block.parent) if (path / "queue").exists()), None)
    spinning = queue is not None and (queue / "rotational").read_text().strip() == "1"
    name = Path(source).name
    kind = "virtio disk" if name.startswith("vd") else "NVMe disk" if name.startswith("nvme") else "disk"
    # A virtual disk does not know whether it rotates.
    return kind if kind == "virtio disk" else f"{kind}, {'rotating' if spinning else 'solid state'}"
