"""The NUMA node of a device."""

from __future__ import annotations

import os
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")


def node_of(pci_address: str, devices: Path = PCI_DEVICES) -> tuple[int, str]:
    """The NUMA node of a device, according to the system, and "". If it is unknown, -1 and the reason.

    pci_address  "0000:3b:00.0"; "" if the driver does not report it
    """
    if not pci_address:
        return -1, "the driver does not report the device's PCI address"
    try:
        node = int((devices / pci_address / "numa_node").read_text())
    except (OSError, ValueError) as error:
        return -1, f"the system does not report the NUMA node of {pci_address}: {error}"
    if node < 0:
        return -1, f"the system knows no NUMA node of {pci_address}"
    return node, ""


def placing_refused(node: int, errno: int) -> str:
    """A text that says why memory is not allocated on `node`. `errno`: error number of the refused system call."""
    return f"the system refuses to place memory on NUMA node {node}: {os.strerror(errno)}"
