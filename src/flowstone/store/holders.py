"""The holders of locks: the note by which a process is identified, whether it is alive, and how long to wait for its
lock.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from flowstone.config import LOCK_GRACE_S, POLL_S
from flowstone.log import log

ProcessState = Literal["alive", "dying", "dead", "unknown"]
_EXITING = 0x4  # PF_EXITING of linux/sched.h
# numbers of fields of /proc/PID/stat, counted after the name: see proc_pid_stat(5)
_STATE, _FLAGS, _THREADS, _STARTED = 0, 6, 17, 19


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""  # without it, another process waits for the lock


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""  # without it no start time can be read either, and no process counts as dead


def machine_and_process() -> tuple[str, str]:
    """Two identities: that of this machine (since its last start, with its PID and time namespaces), and that of this
    process on it.
    """
    boot = _read_text("/proc/sys/kernel/random/boot_id")
    stat = _stat(os.getpid())
    return f"{boot} {_namespace('pid')} {_namespace('time')}", f"{os.getpid()} {stat[_STARTED] if stat else ''}"


def _stat(pid: int) -> list[str]:
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields if len(fields) > _STARTED else []


def process_state(machine: str, process: str) -> ProcessState:
    """The state of the process for which `machine_and_process` returns these identities. "unknown" if it is on another
    machine.

    alive  it runs, or is stopped, and was not killed
    dying  it was killed, or is exiting: it keeps its locks until its memory is freed
    dead   it is gone, or is a zombie; a later process may have its PID
    """
    pid, _, began = process.partition(" ")
    if machine_and_process()[0] != machine or not pid.isdecimal() or not began:
        return "unknown"
    stat = _stat(int(pid))
    if not stat:
        return "unknown" if _is_hidden(int(pid)) else "dead"
    if stat[_STARTED] != began:
        return "dead"
    if stat[_STATE] in "ZX":
        return "dying" if int(stat[_THREADS]) > 1 else "dead"
    return "dying" if int(stat[_FLAGS]) & _EXITING or _is_killed(int(pid)) else "alive"


def has_ended(machine: str, process: str) -> bool:
    """Whether a process has certainly ended. Arguments as in `process_state`."""
    return process_state(machine, process) == "dead"


def _is_hidden(pid: int) -> bool:
    """Whether a process exists that /proc does not show: another user's, or any if /proc is not mounted."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _is_killed(pid: int) -> bool:
    """Whether a SIGKILL is pending: the process was killed, but still executes a system call."""
    for line in _read_text(f"/proc/{pid}/status").splitlines():
        name, _, mask = line.partition(":")
        if name in ("SigPnd", "ShdPnd") and int(mask, 16) >> (signal.SIGKILL - 1) & 1:
            return True
    return False


def holder_note(holder: str) -> str:
    """The note that this process writes into a lock: three lines, with the name `holder`, its machine, and its process.
    """
    return "\n".join((holder.replace("\n", " "), *machine_and_process()))


def holder_name(note: str) -> str:
    return note.partition("\n")[0].strip() or "unknown"


def holder_state(note: str) -> ProcessState:
    _, machine, process, *_ = [*note.split("\n"), "", "", ""]
    return process_state(machine, process)


def acquire_with_grace(take: Callable[[], str | None], location: str) -> str | None:
    """Call `take` until it returns None, which means that this process has the lock. Returns None, or the note of
    another holder.

    Returns immediately if the holder is alive, and otherwise after LOCK_GRACE_S. It waits because the kernel frees the
    memory of a killed process before its locks, and because a process on another machine cannot be seen from here.
    """
    deadline = None
    while (other := take()) is not None:
        if holder_state(other) == "alive":
            return other
        if deadline is None:
            deadline = time.monotonic() + LOCK_GRACE_S
            log.warning(
                "%s: %s holds the lock, and may have ended; waiting up to %.0f s", location, holder_name(other),
                LOCK_GRACE_S,
            )
        if time.monotonic() >= deadline:
            return other
        time.sleep(POLL_S)
    return None


def describe_holder(note: str) -> str:
    """A text on the state of a lock's holder, for an error. `note`: the holder's note."""
    return {
        "alive": "the holder is alive",
        "dying": f"the holder was killed or is exiting, but its memory is not freed after {LOCK_GRACE_S:.0f} s",
        "dead": f"the holder has ended, but one of its children still holds the lock after {LOCK_GRACE_S:.0f} s",
        "unknown": f"the holder may be alive: it cannot be seen from here, and kept the lock for {LOCK_GRACE_S:.0f} s",
    }[holder_state(note)]
