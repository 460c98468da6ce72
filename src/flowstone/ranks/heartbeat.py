"""The heartbeat: every rank regularly reports that it is alive, and which call it is in.

By these reports the other ranks distinguish a dead rank from a slow one, and from a rank that will never make the call
for which they wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import msgspec

from flowstone.config import HEARTBEAT_S
from flowstone.log import log
from flowstone.ranks.failure import error_text
from flowstone.ranks.kv_store import KeyValueStore
from flowstone.runtime.interpreter import main_frame

_OURS = os.path.dirname(os.path.dirname(__file__))


class Activity(msgspec.Struct, frozen=True):
    """The calls of a Checkpointer so far.

    calls  number of calls of verbs (save, load, ...)
    last   verb of the last call
    is_inside  whether the last call is running
    step   the highest step of any save; -1: no save yet
    """

    calls: int = 0
    last: str = ""
    is_inside: bool = False
    step: int = -1


class RankStatus(msgspec.Struct, frozen=True):
    """A rank's report about one of its Checkpointers.

    beat       number of reports so far
    label      location of the Checkpointer's store
    group      name of its group; "" until the ranks have met
    waits      whether the Checkpointer waits to meet the other ranks, or has waited until a time limit
    is_closed  whether the Checkpointer will make no more calls
    line       line of the user's code that the main thread runs
    left       which call (its number) an exception has ended on this rank only; 0: none
    why        text of that exception
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
    """Reports regularly, on a thread, until it is stopped, or until the key-value store is gone. Its calls never wait
    in the store, so it may share a connection.

    serial  number of this Checkpointer among all that this rank has constructed in the job
    """

    def __init__(
        self, kv_store: KeyValueStore, rank: int, label: str = "", activity: Callable[[], Activity] = Activity, *,
        every_s: float = HEARTBEAT_S,
    ) -> None:
        self._kv_store, self._rank, self._label, self._every_s = kv_store, rank, label, every_s
        self.serial = kv_store.add(opened_key(rank), 1)
        self._group, self._waits = "", False  # see RankStatus
        self._left: tuple[int, str] = (0, "")
        self._beats, self._activity = 0, activity
        self._stopped = threading.Event()
        self._report()
        self._thread = threading.Thread(target=self._beat, name="flowstone-heartbeat", daemon=True)
        self._thread.start()

    def begin_meeting(self) -> None:
        """Report from now on that this Checkpointer waits to meet the other ranks."""
        self._waits = True

    def join(self, group: str) -> None:
        """Report from now on that this Checkpointer has met the others of the group with this name."""
        self._group, self._waits = group, False

    def stop(self, *, wait: bool = True) -> None:
        self._stopped.set()
        if wait:
            self._thread.join()

    def report_interrupted_call(self, error: BaseException) -> None:
        """Report immediately that `error` has ended the last call on this rank alone. Other ranks may still be in that
        call.
        """
        activity = self._activity()
        self._left = activity.calls, f"was interrupted in {activity.last}() by {error_text(error)}"
        self._report()

    def close(self) -> None:
        """Report that this rank has closed, so that no rank waits for it, and stop."""
        self.stop()
        self._report(is_closed=True)

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_s):
            if not self._report():
                return

    def _report(self, *, is_closed: bool = False) -> bool:
        """Post a report. Returns False if the key-value store is gone."""
        self._beats += 1
        status = RankStatus(
            self._beats, self._label, self._group, self._activity(), self._waits, is_closed, user_code_line(),
            *self._left,
        )
        try:
            self._kv_store.set(status_key(self._rank, self.serial), msgspec.msgpack.encode(status))
        except RuntimeError as error:  # torch raises it for any failure; this rank's calls meet it, and report it
            log.debug("no more heartbeats of rank %d: %s", self._rank, error)
            return False
        return True


def opened_key(rank: int) -> str:
    """The key of the counter of all Checkpointers that a rank has constructed."""
    return f"opened/{rank}"


def status_key(rank: int, serial: int) -> str:
    return f"at/{rank}/{serial}"


def user_code_line() -> str:
    """The line of code that the main thread runs, in the innermost frame that is neither in Flowstone, nor in Python's
    library, nor in an installed package.
    """
    import sysconfig  # imported here: most processes have no heartbeat

    frame = main_frame()
    innermost = frame
    others = (_OURS, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
    while frame is not None and frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    shown = frame or innermost
    if shown is None:
        return ""
    return f"{os.path.basename(shown.f_code.co_filename)}:{shown.f_lineno} in {shown.f_code.co_name}"
