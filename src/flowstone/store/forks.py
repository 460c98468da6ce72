"""What a forked child must close: descriptors keep locks, and the space of removed files."""

from __future__ import annotations

import os
from functools import cache
from typing import Protocol
from weakref import WeakSet


class Forgetful(Protocol):
    def forget(self) -> None:
        """In a forked child: close the copies of descriptors. The threads are gone; locks that they held stay locked.
        """


def forget_in_children(owner: Forgetful) -> None:
    """Call `owner.forget()` in each child that is forked while `owner` lives."""
    _owners().add(owner)


@cache
def _owners() -> WeakSet[Forgetful]:
    owners: WeakSet[Forgetful] = WeakSet()

    def forget() -> None:
        for owner in list(owners):
            owner.forget()

    os.register_at_fork(after_in_child=forget)
    return owners
