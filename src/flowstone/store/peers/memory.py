"""Memory by its address, as a buffer."""

from __future__ import annotations

import ctypes


def view_of(address: int, length: int) -> memoryview:
    """The bytes at an address, writable. Its owner has to keep them as long as this is used."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")
