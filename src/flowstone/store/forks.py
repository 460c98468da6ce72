"""Closes file descriptors in forked children. Copies that stay open would keep locks, and the space of removed files.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Protocol
from weakref import WeakSet


class ForkAware(Protocol):
    def forget(self) -> None:
        """Called in a forked child: close the copies of descriptors. The child has none of the parent's threads, and
        locks that these held stay locked.
        """


def forget_in_children(owner: ForkAware) -> None:
    """Call `owner.forget()` in each child that is forked as long as `owner` exists."""
    _owners().add(owner)


@cache
def _owners() -> WeakSet[ForkAware]:
    owners: WeakSet[ForkAware] = WeakSet()

    def forget() -> None:
        for owner in list(owners):
            owner.forget()

    os.register_at_fork(after_in_child=forget)
    return owners
