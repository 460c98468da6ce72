"""Short turns on the processor, for a thread that others wait for: it then runs as soon as it is woken.

Where all processors are busy, a thread that wakes up waits until another one's turn is over, for milliseconds. One that
has asked for shorter turns interrupts that (Linux 6.12 on). Its share of the processor stays the same.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading

SLICE_NS = 100_000  # the shortest that Linux gives
_NUMBERS = {"x86_64": 314, "aarch64": 274}  # of sched_setattr(2), which not every C library has
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_RESET_ON_FORK = 1


def shorten() -> bool:
    """For the calling thread, and not for what it starts. Whether the system takes it; an older one ignores it."""
    number = _NUMBERS.get(os.uname().machine)
    try:
        if number is None or os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
            return False  # somebody has put it into another class: it stays there
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    except OSError:  # a sandbox that does not let it ask
        return False
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, SLICE_NS, 0, 0)
    refused: int = ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, attributes, 0)
    return not refused
