"""Functions that Python offers only under private names, or not at all, and what to do on a system without these."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import sys
import threading
from collections.abc import Callable
from types import FrameType

SLICE_NS = 100_000  # nanoseconds; the shortest slice that Linux allows
# the number of the system call sched_setattr(2), which not every C library offers
_NUMBERS = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_RESET_ON_FORK = 1


def call_before_threads_end(act: Callable[[], None]) -> None:
    """Let Python call `act` when it begins to wait for threads at exit. On a Python without
    `threading._register_atexit`, `act` is never called.

    `atexit` is no substitute: its functions run only after the threads of executors have ended, and never in a process
    that `multiprocessing` forked.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(act)


def main_frame() -> FrameType | None:
    """The stack frame that the main thread executes; None on a Python without `sys._current_frames`. Can be called on
    any thread.

    No garbage collection runs during the call. In Python 3.11, `sys._current_frames` holds a lock, and a collection
    that begins meanwhile and frees a `threading.local` would wait for that lock forever.
    """
    current_frames = getattr(sys, "_current_frames", None)
    if current_frames is None:
        return None
    collects = gc.isenabled()
    gc.disable()
    try:
        frame: FrameType | None = current_frames().get(threading.main_thread().ident)
        return frame
    finally:
        if collects:
            gc.enable()


def request_short_slice() -> bool:
    """Request short time slices for the calling thread only, not for threads that it starts. Returns whether the system
    accepted the call. An older kernel accepts the call, but ignores the slice.

    For a thread that others wait for. If all processors are busy, a woken thread waits some milliseconds for the end of
    another thread's time slice. On Linux 6.12 and later, a thread that has requested shorter slices preempts the other
    thread instead. It does not get more processor time in all.
    """
    number = _NUMBERS.get(os.uname().machine)
    try:
        if number is None or os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
            return False  # the thread has another scheduling class, which must stay
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    except OSError:  # a sandbox forbids the query
        return False
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, SLICE_NS, 0, 0)
    refused: int = ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, attributes, 0)
    return not refused
