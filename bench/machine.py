"""What the numbers were measured on, without names or paths of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.environments import pinned


def describe(directory: Path, environments: Iterable[str]) -> dict[str, str]:
    """Facts for the machine line, in its order; `environments` are those that rivals run in."""
    source, kind, device = _mount(directory)
    return {
        "CPU": _cpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB",
        "kernel": f"{platform.system()} {_numbers(platform.release())}",
        "file system": kind,
        "device": _device(source, device),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "safetensors": _version("safetensors"),
        "fio": _fio(),
        "flowstone": _flowstone(),
    } | dict(pinned(name).split(" ", 1) for name in dict.fromkeys(environments))


def _cpu() -> str:
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    name = facts.get("model name", platform.machine())
    family = facts.get("cpu family")
    return f"{name}, family {family}, model {facts.get('model', '?')}" if family else name


def _numbers(release: str) -> str:
    """6.18.44 of "6.18.44-whatever"; the rest may name a place."""
    return release.split("-", 1)[0]


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
        return "unknown"
    block = at.resolve()
    queue = next((path / "queue" for path in (block, block.parent) if (path / "queue").exists()), None)
    spinning = queue is not None and (queue / "rotational").read_text().strip() == "1"
    name = Path(source).name
    kind = "virtio disk" if name.startswith("vd") else "NVMe disk" if name.startswith("nvme") else "disk"
    # A virtual disk says nothing true about what turns behind it.
    return kind if kind == "virtio disk" else f"{kind}, {'rotating' if spinning else 'solid state'}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _flowstone() -> str:
    from flowstone import __version__

    return __version__


def _fio() -> str:
    try:
        return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()[4:]
    except (OSError, subprocess.CalledProcessError):
        return "absent"
