"""The store's writer lock, as a Checkpointer takes it: another one of this process may still have it."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from flowstone.errors import LockedError

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parent.parent) + os.sep


class Owner(Protocol):
    """A Checkpointer, to others of its kind."""

    made_at: str

    def finish_saves(self, location: str) -> None:
        """Wait until its saves into the store at `location` have ended, and what follows them. Any thread."""


def caller() -> str:
    """Where the code that called into this package stands: file and line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def as_writer(owner: Owner, location: str, take: Callable[[str], T]) -> T:
    """What `take` gives, called with the name under which `owner` locks the store at `location`.

    A Checkpointer that nobody holds any more gives its lock back, after its saves: where it is such a one that has it,
    as in a notebook whose cell is run twice, it is waited for.

    raises  LockedError, which names the holder: another job, or another Checkpointer of this process
    """
    process = f"process {os.getpid()} on {socket.gethostname()}"
    holder = f"{process}, the Checkpointer made at {owner.made_at}"
    try:
        return take(holder)
    except LockedError as error:
        if not str(error.facts.get("holder")).startswith(f"{process},"):
            raise
    gc.collect()  # it may be in a cycle
    for other in [one for one in gc.get_objects() if type(one) is type(owner) and one is not owner]:
        other.finish_saves(location)
        del other  # our own hold on it
    gc.collect()
    try:
        return take(holder)
    except LockedError as error:
        raise LockedError(
            f"cannot save into {location}: another Checkpointer of this process holds the lock",
            holder=error.facts.get("holder"),
            next="close() that one, or delete every reference to it; or save into another directory",
        ) from None
