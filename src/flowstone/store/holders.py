"""Who holds a lock: what is noted of a process, whether it still lives, and how long a next one waits for its lock."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from flowstone.config import LOCK_GRACE_S, POLL_S
from flowstone.log import log

Standing = Literal["alive", "dying", "dead", "unknown"]
_EXITING = 0x4  # PF_EXITING of linux/sched.h
_STATE, _FLAGS, _THREADS, _STARTED = 0, 6, 17, 19  # fields of /proc/PID/stat behind the name: proc_pid_stat(5)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""  # safe: its lock is then waited for


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""  # safe: nor is it told when a process began, and none is taken for one that has ended


def here() -> tuple[str, str]:
    """This machine since it was started, in this namespace of processes and of clocks; and this process on it."""
    boot = _read_text("/proc/sys/kernel/random/boot_id")
    stat = _stat(os.getpid())
    return f"{boot} {_namespace('pid')} {_namespace('time')}", f"{os.getpid()} {stat[_STARTED] if stat else ''}"


def _stat(pid: int) -> list[str]:
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields if len(fields) > _STARTED else []


def standing(machine: str, process: str) -> Standing:
    """What is known of a process, as `here` has told it. Only its own machine can tell.

    alive  it runs, or is stopped, and nothing has killed it
    dying  it was killed, or exits: until its memory is given back, it keeps its locks
    dead   it is gone, or only its status is left; a later process may have its number
    """
    pid, _, began = process.partition(" ")
    if here()[0] != machine or not pid.isdecimal() or not began:
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
    """Whether a process, as `here` has told it, is certainly gone."""
    return standing(machine, process) == "dead"


def _is_hidden(pid: int) -> bool:
    """Whether a process is there of which /proc says nothing: another user's, or all if /proc is not mounted."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _is_killed(pid: int) -> bool:
    """Whether a SIGKILL waits to be taken, as by a process that is inside of a system call."""
    for line in _read_text(f"/proc/{pid}/status").splitlines():
        name, _, mask = line.partition(":")
        if name in ("SigPnd", "ShdPnd") and int(mask, 16) >> (signal.SIGKILL - 1) & 1:
            return True
    return False


def noted(holder: str) -> str:
    """What a lock says of this process, which holds it under that name: a line each of name, machine, process."""
    return "\n".join((holder.replace("\n", " "), *here()))


def name_in(note: str) -> str:
    return note.partition("\n")[0].strip() or "unknown"


def standing_in(note: str) -> Standing:
    _, machine, process, *_ = [*note.split("\n"), "", "", ""]
    return standing(machine, process)


def take_in_time(take: Callable[[], str | None], location: str) -> str | None:
    """Call `take` until it returns None, for which it has the lock. Else the note of the one that has it.

    At once for a holder that is alive; after LOCK_GRACE_S for any other: the kernel gives back the memory of a process
    that was killed before its locks, and how a process of another machine is cannot be told from here.
    """
    deadline = None
    while (other := take()) is not None:
        if standing_in(other) == "alive":
            return other
        if deadline is None:
            deadline = time.monotonic() + LOCK_GRACE_S
            log.warning(
                "%s: %s holds the lock, and is not known to be alive; waiting up to %.0f s", location, name_in(other),
                LOCK_GRACE_S,
            )
        if time.monotonic() >= deadline:
            return other
        time.sleep(POLL_S)
    return None


def found_of(note: str) -> str:
    """What a refusal says of a holder."""
    return {
        "alive": "it is alive",
        "dying": f"it was killed or ends, and has not given its memory back after {LOCK_GRACE_S:.0f} s",
        "dead": f"it has ended, and a child of it still keeps the lock after {LOCK_GRACE_S:.0f} s",
        "unknown": f"it may be alive: it cannot be seen from here, and kept the lock for {LOCK_GRACE_S:.0f} s",
    }[standing_in(note)]
