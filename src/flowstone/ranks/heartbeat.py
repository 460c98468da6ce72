"""The heartbeat: every rank reports from time to time that it is alive, and what it is doing.

So the other ranks can tell a dead rank from a slow one, and from one that will never come.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType

import msgspec

from flowstone.config import HEARTBEAT_S
from flowstone.log import log
from flowstone.ranks.failure import name_of
from flowstone.ranks.kv_store import KeyValueStore

_OURS = os.path.dirname(os.path.dirname(__file__))


class Activity(msgspec.Struct, frozen=True):
    """What a Checkpointer is used for.

    calls      how many were begun; `last` is the last of them, `is_inside` while it is running
    step       the highest step that was to be saved
    """

    calls: int = 0
    last: str = ""
    is_inside: bool = False
    step: int = -1


class Status(msgspec.Struct, frozen=True):
    """What a rank reports about one of its Checkpointers.

    beat       number of reports so far
    label      location that it saves into
    group      group that it is in; "" until the ranks have met
    waits      it waits for the others to meet, or did so in vain
    is_closed  it will make no more calls
    line       where the main thread is, in the user's code
    left       number of the call that an exception has ended on this rank alone; `why`: the exception, in words
    """

    beat: int
    label: str
    group: str = ""
    activity: Activity = Activity()
    waits: bool = False
    is_closed: bool = False
    line: str = ""
    left: int = 0
    why: str = ""


class Heartbeat:
    """Reports until stopped, or until the key-value store is gone. Never waits in the store, so it may share a
    connection.

    serial  number of this Checkpointer, among those that this rank has opened in the job
    group   that it is in, once the ranks have met
    waits   for the others to meet, or did so in vain
    """

    def __init__(
        self, kv_store: KeyValueStore, rank: int, label: str = "", activity: Callable[[], Activity] = Activity, *,
        every_s: float = HEARTBEAT_S,
    ) -> None:
        self._kv_store, self._rank, self._label, self._every_s = kv_store, rank, label, every_s
        self.serial = kv_store.add(opened(rank), 1)
        self.group, self.waits = "", False
        self._left: tuple[int, str] = (0, "")
        self._beats, self._activity = 0, activity
        self._stopped = threading.Event()
        self._say()
        self._thread = threading.Thread(target=self._beat, name="flowstone-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        self._stopped.set()
        if wait:
            self._thread.join()

    def leave(self, error: BaseException) -> None:
        """Report at once that `error` has ended the last call on this rank alone: the others may still be in it."""
        activity = self._activity()
        self._left = activity.calls, f"was interrupted in {activity.last}() by {name_of(error)}"
        self._say()

    def close(self) -> None:
        """Stop, and report it: no rank needs to wait for this one."""
        self.stop()
        self._say(is_closed=True)

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            if not self._say():
                return

    def _say(self, *, is_closed: bool = False) -> bool:
        """Post a report. Returns whether the key-value store still takes it."""
        self._beats += 1
        status = Status(
            self._beats, self._label, self.group, self._activity(), self.waits, is_closed, users_line(), *self._left
        )
        try:
            self._kv_store.set(key(self._rank, self.serial), msgspec.msgpack.encode(status))
        except RuntimeError as error:  # torch raises it for any failure; a call that waits for a rank gets it too
            log.debug("no more heartbeats of rank %d: %s", self._rank, error)
            return False
        return True


def opened(rank: int) -> str:
    """The key of the counter of Checkpointers that a rank has opened."""
    return f"opened/{rank}"


def key(rank: int, serial: int) -> str:
    return f"at/{rank}/{serial}"


def _main_frame() -> FrameType | None:
    """The main thread's frame. Python holds a lock of its own while it looks at other threads, and a collection that
    began there would wait for that lock for ever, with the interpreter's, if it freed a `threading.local` (3.11).
    """
    if threading.current_thread() is threading.main_thread():
        return sys._getframe()
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(threading.main_thread().ident or 0)
    finally:
        if collects:
            gc.enable()


def users_line() -> str:
    """Where the main thread is: the innermost line outside of Python, installed packages and this package."""
    import sysconfig  # not a part of each start: most processes never beat

    frame = _main_frame()
    innermost = frame
    others = (_OURS, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
    while frame is not None and frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    shown = frame or innermost
    if shown is None:
        return ""
    return f"{os.path.basename(shown.f_code.co_filename)}:{shown.f_lineno} in {shown.f_code.co_name}"
