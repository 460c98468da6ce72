"""Stores in memory: in this process (MemoryStore), or in the node's memory agent, so that contents outlive the
processes that save (NodeMemory).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowstone.store.memory.store import MemoryStore

__all__ = ["MemoryStore"]


def __getattr__(name: str) -> object:
    """Import a public class at its first use. The memory agent imports this package, but needs neither these classes
    nor numpy.
    """
    if name != "MemoryStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flowstone.store.memory.store import MemoryStore

    return MemoryStore
