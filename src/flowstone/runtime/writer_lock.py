"""How a Checkpointer takes the store's writer lock, which another Checkpointer of this process may still hold."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from flowstone.errors import LockedError

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parent.parent) + os.sep


class Owner(Protocol):
    """A Checkpointer, as others of this process see it."""

    made_at: str

    def finish_saves(self, location: str) -> None:
        """Wait until its saves into the store at `location`, however that is written, have ended, with their follow-up
        work. Any thread; on a thread of the owner's it does nothing.
        """


@cache
def _owners() -> WeakValueDictionary[int, Owner]:
    """By identity: another thread may add one while these are looked at, which a WeakSet does not survive."""
    return WeakValueDictionary()


class _Place(Protocol):
    @property
    def location(self) -> str: ...


def register(owner: Owner, stores: Sequence[_Place]) -> tuple[str, ...]:
    """Register a Checkpointer for the others of this process, while it lives. Returns the locations of its stores."""
    _owners()[id(owner)] = owner
    return tuple({store.location for store in stores})


def finish_saves_of_others(owner: Owner, locations: Sequence[str]) -> None:
    """Wait until no other Checkpointer of this process has a save in flight into one of these stores: a notebook's cell
    that is run again after an interrupt makes a new Checkpointer while the old one still saves.
    """
    found = [reference() for reference in _owners().valuerefs()]
    for other in [one for one in found if one is not None and one is not owner]:
        for location in locations:
            other.finish_saves(location)


def caller() -> str:
    """File and line of the code that called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def as_writer(owner: Owner, location: str, take: Callable[[str], T]) -> T:
    """The result of `take`, called with the name under which `owner` locks the store at `location`.

    A Checkpointer that is no longer referenced releases its lock after its saves. If such a one holds the lock, as
    in a notebook whose cell is run twice, wait for it.

    raises  LockedError, naming the holder: another job, or another Checkpointer of this process
    """
    process = f"process {os.getpid()} on {socket.gethostname()}"
    holder = f"{process}, the Checkpointer made at {owner.made_at}"
    try:
        return take(holder)
    except LockedError as error:
        if not str(error.facts.get("holder")).startswith(f"{process},") or location not in error.message:
            raise  # another job, or a farther tier, which the error names
    gc.collect()  # an unreferenced one may be part of a cycle
    finish_saves_of_others(owner, (location,))
    gc.collect()
    try:
        return take(holder)
    except LockedError as error:
        raise LockedError(
            f"cannot save into {location}: another Checkpointer of this process holds the lock",
            holder=error.facts.get("holder"),
            next="close() that one, or delete every reference to it; or save into another directory",
        ) from None
