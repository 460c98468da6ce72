"""Nodes with separate networks: network namespaces, joined by a bridge over links of a given rate."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

INTERFACE = "eth0"  # in each namespace
_BURST_KB, _LATENCY_MS = 256, 50


@dataclass(frozen=True)
class Networks:
    """names: of the namespaces, one for each node; host: the address of this process for all of them."""

    names: tuple[str, ...]
    host: str


def refusal() -> str:
    """Why networks are not possible here; "" if they are."""
    if os.geteuid():
        return "network namespaces need root"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking:
        return f"{' and '.join(lacking)} of iproute2 not found"
    name = f"fs-try-{os.getpid()}"
    with ExitStack() as stack:
        try:
            _run("ip", "netns", "add", name)
            stack.callback(_end, "ip", "netns", "del", name)
            _run("ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
            _run("tc", "-n", name, "qdisc", "add", "dev", "v0", "root", *_shape(1.0))
        except subprocess.CalledProcessError as error:
            return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


@contextmanager
def several_networks(count: int, mbit_per_s: float) -> Iterator[Networks]:
    """Limit each node's link to this rate in each direction."""
    tag = f"{os.getpid() % 100_000:05d}"
    prefix, bridge = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}", f"fsb{tag}"
    names = []
    with ExitStack() as stack:
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_end, "ip", "link", "del", bridge)
        _run("ip", "address", "add", f"{prefix}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for node in range(count):
            name, outer = f"fs-{tag}-{node}", f"fs{tag}v{node}"
            _run("ip", "netns", "add", name)
            stack.callback(_end, "ip", "netns", "del", name)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            stack.callback(_end, "ip", "link", "del", outer)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            _run("ip", "-n", name, "address", "add", f"{prefix}.{node + 1}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("tc", "qdisc", "add", "dev", outer, "root", *_shape(mbit_per_s))
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *_shape(mbit_per_s))
            names.append(name)
        yield Networks(tuple(names), f"{prefix}.254")


def _shape(mbit_per_s: float) -> tuple[str, ...]:
    return ("tbf", "rate", f"{mbit_per_s:g}mbit", "burst", f"{_BURST_KB}kb", "latency", f"{_LATENCY_MS}ms")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _end(*command: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        _run(*command)  # removed already with another one
