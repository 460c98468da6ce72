"""What processes of tests do that take too long, so that one that hangs explains itself.

Each Python process that `multiprocessing` starts writes its own stacks, by `faulthandler`: also when a thread of C++
keeps Python's lock. From outside come its threads as the kernel sees them, which tells what it waits for when Python
has ended in it already; and the stacks of C++ where there is a gdb.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_AT_START = """import faulthandler, os, sys
if any("multiprocessing.spawn" in word for word in sys.orig_argv):
    late_ranks = open(os.path.join({folder!r}, "%d-python.txt" % os.getpid()), "w")
    faulthandler.dump_traceback_later({after_s}, repeat=True, file=late_ranks)
"""
_POLL_S = 1.0
_LOOKS_MAX = 3  # at one process: does anything move?
_GDB_S = 60


def environment(folder: Path, after_s: float) -> Mapping[str, str]:
    """What Python processes need in order to write their stacks into `folder`, again each time after so long.

    What an earlier run has left there goes.
    """
    for path in told(folder):
        path.unlink()
    start = folder / "start"
    start.mkdir(parents=True, exist_ok=True)
    (start / "sitecustomize.py").write_text(_AT_START.format(folder=str(folder), after_s=after_s))
    path = [str(start), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def watched(folder: Path, after_s: float) -> Iterator[None]:
    """Meanwhile write into `folder`, too, what the kernel says of processes below this one that are older."""
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(folder, after_s, ended), name="late-ranks", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()
        for path in folder.glob("*-python.txt"):
            if not path.stat().st_size:  # of one that was in time
                path.unlink()


def told(folder: Path) -> list[Path]:
    """The files about processes that were late."""
    return sorted(folder.glob("*.txt"))


def _watch(folder: Path, after_s: float, ended: threading.Event) -> None:
    seen: dict[int, float] = {}
    looks: dict[int, int] = {}
    while not ended.wait(_POLL_S):
        now = time.monotonic()
        for pid in _ranks():
            late_s = now - seen.setdefault(pid, now) - after_s
            done = looks.get(pid, 0)
            if done < _LOOKS_MAX and late_s >= done * after_s / 4:
                looks[pid] = done + 1
                with suppress(OSError), (folder / f"{pid}-threads.txt").open("a") as file:  # it may end meanwhile
                    file.write(f"after {late_s + after_s:.0f} s\n{_threads(pid)}{_native(pid)}\n")


def _ranks() -> Iterator[int]:
    """The processes below this one that `multiprocessing` has started."""
    left = [os.getpid()]
    while left:
        pid = left.pop()
        with suppress(OSError):  # it has ended
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                left += map(int, children.read_text().split())
            if b"multiprocessing.spawn" in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield pid


def _threads(pid: int) -> str:
    """Each thread: its name, state, what it waits for in the kernel, and in which library."""
    begins = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        extent, *_, path = line.split(maxsplit=5)
        begins.append((*(int(one, 16) for one in extent.split("-")), path))
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda one: int(one.name)):
        name, waits, call = ((task / one).read_text().strip() for one in ("comm", "wchan", "syscall"))
        state = next(one for one in (task / "status").read_text().splitlines() if one.startswith("State"))
        counter = int(call.split()[-1], 16) if call[:1].isdigit() or call.startswith("-") else 0
        where = next((path for begin, end, path in begins if begin <= counter < end), "?")
        lines.append(f"thread {task.name} {name}: {state.partition(':')[2].strip()}, {waits}, call {call}, in {where}")
    return "\n".join(lines) + "\n"


def _native(pid: int) -> str:
    gdb = shutil.which("gdb")
    if gdb is None:
        return ""
    command = [gdb, "-p", str(pid), "-batch", "-ex", "thread apply all bt"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_GDB_S).stdout
    except subprocess.TimeoutExpired:
        return f"gdb said nothing within {_GDB_S} s\n"
