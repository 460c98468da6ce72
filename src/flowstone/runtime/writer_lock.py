"""Takes the store's lock for a Checkpointer that begins to write. Another Checkpointer of this process may still hold
that lock.
"""

from __future__ import annotations

import gc
import inspect
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from flowstone.errors import LockedError
from flowstone.runtime.signal_shield import Latch

T = TypeVar("T")
_RELEASE_S = 10.0  # longest wait for the end of a release
_PACKAGE = str(Path(__file__).parent.parent) + os.sep


class Owner(Protocol):
    """A Checkpointer, as other Checkpointers of the same process see it. `made_at`: the line of code that made it."""

    made_at: str

    def finish_saves(self, location: str) -> None:
        """Wait until this owner's saves into the store at `location`, and the work that follows them, have ended. Can
        be called on any thread; on a thread of the owner it does nothing.
        """


@cache
def _owners() -> WeakValueDictionary[int, Owner]:
    """The owners (Checkpointers) of this process by `id`. A WeakSet would not allow other threads to add an owner
    during an iteration.
    """
    return WeakValueDictionary()


@cache
def _releases() -> dict[Latch, tuple[int, Sequence[str]]]:
    """The releases of locks that are in progress: a latch, which opens when the release has ended -> the id of the
    process that releases, and the locations of the stores. A forked child ignores its parent's releases, because their
    latches never open in the child.
    """
    return {}


@contextmanager
def release_of_owner(locations: Sequence[str]) -> Iterator[None]:
    """Context in which an owner (a Checkpointer) releases its stores, which are at `locations`, and their locks, on any
    thread. `lock_as_writer` waits for the end of this context.
    """
    ended = Latch()
    _releases()[ended] = os.getpid(), locations
    try:
        yield
    finally:
        del _releases()[ended]
        ended.open()


class _Located(Protocol):
    @property
    def location(self) -> str: ...


def register_owner(owner: Owner, stores: Sequence[_Located]) -> tuple[str, ...]:
    """Make a Checkpointer known to the others of this process, as long as it exists. Returns the locations of its
    stores.
    """
    _owners()[id(owner)] = owner
    return tuple({store.location for store in stores})


def finish_saves_of_others(owner: Owner, locations: Sequence[str]) -> None:
    """Wait until no other Checkpointer of this process has a save in flight into one of these stores. Such a
    Checkpointer exists if a notebook cell is interrupted and run again while its first Checkpointer is still saving.
    """
    owners = [reference() for reference in _owners().valuerefs()]
    for other in [other for other in owners if other is not None and other is not owner]:
        for location in locations:
            other.finish_saves(location)


def caller_location() -> str:
    """File and line of the code that called into this package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def lock_as_writer(owner: Owner, location: str, take: Callable[[str], T]) -> T:
    """Call `take` with the name under which `owner` locks the store at `location`, and return its result.

    If a Checkpointer that is no longer referenced holds the lock (for example, after a notebook cell was run twice),
    this function waits until that Checkpointer has ended its saves and released the lock.

    raises  LockedError  another job, or another Checkpointer of this process, holds the lock; the error names the
                         holder
    """
    process = f"process {os.getpid()} on {socket.gethostname()}"
    holder = f"{process}, the Checkpointer made at {owner.made_at}"
    try:
        return take(holder)
    except LockedError as error:
        if not str(error.facts.get("holder")).startswith(f"{process},") or location not in error.message:
            raise  # the holder is another job, or the lock is that of another tier than the nearest
    gc.collect()  # a Checkpointer that is no longer referenced may be part of a reference cycle
    finish_saves_of_others(owner, (location,))
    gc.collect()
    # `__del__` runs on the thread that dropped the last reference. The limit is for a signal handler that saves while
    # this thread is inside `__del__`.
    for ended, (pid, locations) in list(_releases().items()):
        if pid == os.getpid() and location in locations:
            ended.wait(_RELEASE_S)
    try:
        return take(holder)
    except LockedError as error:
        raise LockedError(
            f"cannot save into {location}: another Checkpointer of this process holds the lock",
            holder=error.facts.get("holder"),
            next="close() the other one, or delete every reference to it; or save into another directory",
        ) from None
