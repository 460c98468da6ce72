"""Diagnose hanging processes of tests.

Each Python process that `multiprocessing` starts writes its own stacks by `faulthandler`, even while a C++ thread holds
Python's lock. This process adds the kernel's list of the threads, which shows what they wait for even after Python has
ended in them, and the C++ stacks if gdb is installed.
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
_LOOKS_MAX = 3  # samples of one process, to see whether anything moves
_GDB_S = 60


def environment(folder: Path, after_s: float) -> Mapping[str, str]:
    """The environment that makes Python processes write their stacks into `folder`, repeatedly at this interval.

    Files of an earlier run are removed.
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
    """While this is open, also write the kernel's view of processes below this one that are older than this."""
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(folder, after_s, ended), name="late-ranks", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()
        for path in folder.glob("*-python.txt"):
            if not path.stat().st_size:  # of a process that was in time
                path.unlink()


def told(folder: Path) -> list[Path]:
    """The files about late processes."""
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
                with suppress(OSError), (folder / f"{pid}-threads.txt").open("a") as file:  # the process may end
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
    """The name, state and kernel wait of each thread, and the library in which it is."""
    begins = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        extent, *_, path = line.split(maxsplit=5)
        begins.append((*(int(word, 16) for word in extent.split("-")), path))
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
        name, waits, call = ((task / name).read_text().strip() for name in ("comm", "wchan", "syscall"))
        state = next(line for line in (task / "status").read_text().splitlines() if line.startswith("State"))
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
