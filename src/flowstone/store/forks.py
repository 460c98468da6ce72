"""What a forked child must not keep: descriptors hold locks, and the space of files that are removed."""

from __future__ import annotations

import os
from functools import cache
from typing import Protocol
from weakref import WeakSet


class Forgetful(Protocol):
    def forget(self) -> None:
        """In a forked child: close the copies of descriptors. Threads are gone, and whoever held a lock with them."""


def forget_in_children(owner: Forgetful) -> None:
    """Have `owner.forget()` called in each child that is forked while it lives."""
    _owners().add(owner)


@cache
def _owners() -> WeakSet[Forgetful]:
    owners: WeakSet[Forgetful] = WeakSet()

    def forget() -> None:
        for owner in list(owners):
            owner.forget()

    os.register_at_fork(after_in_child=forget)
    return owners
