"""Memory by its address, as a memoryview."""

from __future__ import annotations

import ctypes


def view_of(address: int, length: int) -> memoryview:
    """A writable view of the bytes at an address. The memory must stay allocated while the view is used."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")
