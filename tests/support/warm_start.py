"""Fork processes of `python -m MODULE`, `python SCRIPT` or `python -c TEXT` from one that has imported torch.

The import takes seconds, which matters in tests with many processes. The first process of each program is started in
the usual way, so that a run of the tests still shows that it starts and ends by itself; later ones are forked. A forked
process ends after Python's exit steps (threads, exit handlers, streams). It does not clear torch's modules, which takes
longer than most tests.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

PR_SET_CHILD_SUBREAPER = 36
TORCH_ALONE = "--torch-alone"
REQUEST_MAX_BYTES = 1 << 20
ORDINARY = {  # the usual arguments of subprocess; a forked process supports no others
    "executable": None, "preexec_fn": None, "close_fds": True, "pass_fds": (), "shell": False, "restore_signals": True,
    "gid": None, "gids": None, "uid": None, "umask": -1, "process_group": -1,
}
STREAMS = ("p2cread", "c2pwrite", "errwrite")  # subprocess's names for a child's standard streams; -1 means inherited


@contextlib.contextmanager
def warm_start(
    *programs: str, torch_alone: bool = False, whole_end: bool = False, name: str = ""
) -> Iterator[None]:
    """Make `subprocess.Popen` fork processes of these programs. All are its children.

    The first process of each, and those with special settings (`preexec_fn`, `pass_fds`, ...), are started as usual.

    programs     modules, scripts, or "-c" for all texts
    name         programs with this in their name count as one
    torch_alone  no module of Flowstone is loaded, for programs that test their imports
    whole_end    Python clears all modules at the end, for programs that test how they end
    """
    server = _server(torch_alone)

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def _execute_child(self, *arguments: Any) -> None:
            asked = inspect.signature(super()._execute_child).bind(*arguments).arguments
            python, *command = map(str, asked["args"])
            argv = command[1:] if command[:1] == ["-m"] else command
            program = argv[0] if argv and python == sys.executable else ""
            is_ordinary = all(asked[name] == value for name, value in ORDINARY.items())
            if program not in programs or not is_ordinary or server.is_first(name or program):
                super()._execute_child(*arguments)
                return
            streams = [asked[name] for name in STREAMS]
            environment = dict(os.environ if asked["env"] is None else asked["env"])
            folder = Path(asked["cwd"] or "").absolute()
            found_first = folder if argv != command else "" if program == "-c" else folder.joinpath(program).parent
            words = {
                "argv": argv, "path": str(found_first), "environment": environment, "folder": str(folder),
                "leads": bool(asked["start_new_session"]), "whole_end": whole_end,
            }
            self.pid = server.start(words, [own if fd == -1 else fd for own, fd in enumerate(streams)])
            self._child_created = True
            self._close_pipe_fds(*(asked[name] for name in (
                "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite",
            )))

    _be_subreaper(True)
    try:
        with mock.patch.object(subprocess, "Popen", Popen):
            yield
    finally:
        _be_subreaper(False)


def _be_subreaper(on: bool) -> None:
    """Let orphans below this process become its children; returns whether the system allows it."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0, os.strerror(ctypes.get_errno())


class _Server:
    """Forks processes. It ends with this process, because the other end of its socket is then closed."""

    def __init__(self, torch_alone: bool) -> None:
        self._programs: set[str] = set()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, *[TORCH_ALONE] * torch_alone]
            self._process = subprocess.Popen(command, stdin=theirs, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def is_first(self, program: str) -> bool:
        """Whether no process was requested from it yet."""
        known = program in self._programs
        self._programs.add(program)
        return not known

    def start(self, words: dict[str, Any], streams: list[int]) -> int:
        socket.send_fds(self._socket, [json.dumps(words).encode()], streams)
        answer = self._socket.recv(64)
        assert answer, "the process that others are forked from has died"
        return int(answer)


@functools.cache
def _server(torch_alone: bool) -> _Server:
    return _Server(torch_alone)


# In the process from which others are forked


class End:
    """Ends a forked process after Python's exit steps, unless `whole`. Create it before torch is imported."""

    def __init__(self) -> None:
        self.whole = False
        self._status: int | None = None  # unknown: after an interrupt, Python ends in another way
        atexit.register(self._now)  # the first that is registered runs last

    def of(self, program: Callable[[], None]) -> None:
        """Run the program, and record the status with which Python will end."""
        try:
            program()
        except SystemExit as error:
            self._status = error.code if isinstance(error.code, int) else int(error.code is not None)
            raise
        except KeyboardInterrupt:
            raise
        except BaseException:
            self._status = 1
            raise
        self._status = 0

    def _now(self) -> None:
        if self.whole or self._status is None:
            return
        try:
            sys.stdout.flush()
        except Exception:  # Python prints its own message for it
            return
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(self._status & 0xFF)


def serve(ours: socket.socket, end: End) -> None:
    """Answer each request with a process id; returns in each such process, with sys.argv set to the program to run."""
    while True:
        words, streams, _, _ = socket.recv_fds(ours, REQUEST_MAX_BYTES, len(STREAMS))
        if not words:
            os._exit(0)
        pid = _fork_orphan()
        if pid == 0:
            ours.close()
            _become(json.loads(words), streams, end)
            return
        for fd in streams:
            os.close(fd)
        ours.send(str(pid).encode())


def _fork_orphan() -> int:
    """Like fork, but the child's parent is the subreaper above when this returns."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.close(writer)
            return 0
        os.write(writer, array.array("q", [pid]).tobytes())
        os._exit(0)
    os.close(writer)
    pid = array.array("q", os.read(reader, 8))[0]
    os.close(reader)
    os.waitpid(between, 0)
    return pid


def _become(words: dict[str, Any], streams: list[int], end: End) -> None:
    end.whole = words["whole_end"]
    for own, fd in enumerate(streams):
        os.dup2(fd, own)
        os.close(fd)
    for name, own in (("stdin", 0), ("stdout", 1), ("stderr", 2)):  # they belonged to other files before
        stream = getattr(sys, name)
        setattr(sys, name, os.fdopen(own, stream.mode, encoding=stream.encoding, errors=stream.errors, closefd=False))
    if words["leads"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(words["environment"])
    os.chdir(words["folder"])
    sys.argv = words["argv"]
    sys.path[0:1] = [words["path"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def run() -> None:
    """Run the program in sys.argv like the interpreter."""
    program = sys.argv[0]
    if program == "-c":
        text = sys.argv.pop(1)
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(text, "<string>", "exec"), vars(main))
    elif program.endswith(".py"):  # its names stay until Python ends, like those of the interpreter's __main__
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        main.__file__ = program
        exec(compile(Path(program).read_bytes(), program, "exec"), vars(main))
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _import_all() -> None:
    """Import slow modules without starting a thread."""
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    import flowstone.checkpointer  # noqa: F401

    _import_torch()


def _import_torch() -> None:
    """Import torch, and by an optimizer's first step the half of it that `import torch` leaves out."""
    import torch

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    torch.optim.AdamW([parameter]).step()


def _leave_finalizers() -> None:
    """Torch's finalizers do not run in forked processes, since running them copies the pages of their objects."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


if __name__ == "__main__":
    end = End()
    if sys.argv[1:] == [TORCH_ALONE]:
        _import_torch()
    else:
        _import_all()
    _leave_finalizers()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as requests:
        serve(requests, end)
    end.of(run)
