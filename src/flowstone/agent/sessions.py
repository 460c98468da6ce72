"""One client's connection, and what its requests do. Each is done at once, or refused, and leaves no half of it."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from flowstone._version import __version__
from flowstone.agent.runs import NoRoomError, Run, Runs
from flowstone.commit.entries import REWOUND, SAVING
from flowstone.config import AGENT_POOLED_FROM_BYTES, GENERATIONS
from flowstone.errors import ArgumentError
from flowstone.store.agent_wire import PROTOCOL, Answer, Request, RunStatus, run_name
from flowstone.store.contents import MemoryFile


class Duties(Protocol):
    """What a session asks of the agent."""

    def flush(self, run: Run) -> bool:
        """Begin to make the newest checkpoint durable, unless it is; whether that is under way."""

    def statuses(self) -> tuple[RunStatus, ...]: ...
    def serve_run(self, run: Run, request: Request) -> str:
        """Serve the run to other nodes. At which port; "" until that is known."""


class RefusedError(Exception):
    """The connection is to end, after this answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.error)
        self.answer = answer


class Session:
    """One client.

    writes   whether it has changed something: its drafts end with it
    run      None before its first request, and for one that only asks what the agent holds
    """

    def __init__(self, connection: socket.socket, pid: int, runs: Runs, duties: Duties) -> None:
        self.connection, self.pid, self._runs, self._duties = connection, pid, runs, duties
        self.run: Run | None = None
        self.writes = False
        self._greeted = False
        self._created: set[int] = set()
        self._holds: Counter[int] = Counter()

    def answer(self, request: Request, fds: list[int]) -> tuple[Answer, int | None]:
        """The answer, and the descriptor that goes with it: the caller closes that. `fds` are this one's.

        raises  RefusedError
        """
        passed: int | None = fds.pop() if request.verb == "put" and len(fds) == 1 else None
        for fd in fds:
            os.close(fd)
        try:
            if not self._greeted:
                return self._hello(request), None
            if request.verb == "runs":
                return Answer(runs=self._duties.statuses()), None
            if self.run is None:
                raise OSError(errno.EINVAL, "this connection is for no run")
            if request.verb == "put":
                owned, passed = passed, None
                return self._put(self.run, request, owned), None
            if request.verb in ("open", "create", "spare"):
                return self._files(self.run, request)
            return self._names(self.run, request), None
        except NoRoomError as error:
            return Answer(
                errno=errno.ENOSPC, error=str(error), full=True, needed_bytes=error.needed_bytes,
                size_bytes=error.available_bytes,
            ), None
        except OSError as error:
            return Answer(errno=error.errno or errno.EIO, error=error.strerror or str(error)), None
        finally:
            if passed is not None:
                os.close(passed)

    def end(self) -> None:
        """The client is gone: what it held, and its lock, are free."""
        if self.run is None:
            return
        self._unlock(self.run)
        for number, holds in self._holds.items():
            self._release(self.run, number, holds)
        for file in self.run.files.values():
            if file.writer is self:
                file.writer = None
        self._holds.clear()

    def _hello(self, request: Request) -> Answer:
        if request.verb != "hello" or request.number != PROTOCOL:
            raise RefusedError(Answer(
                errno=errno.EPROTO, error="they are of different releases", number=PROTOCOL, text=__version__
            ))
        if request.path:
            try:
                self.run = self._runs.of(run_name(request.path))
            except ArgumentError as error:
                raise RefusedError(Answer(errno=errno.EINVAL, error=str(error), number=PROTOCOL)) from error
        self._greeted = True
        return Answer(number=PROTOCOL, text=__version__)

    # Files

    def _files(self, run: Run, request: Request) -> tuple[Answer, int | None]:
        if request.verb == "open":
            file = run.contents.file(request.path)
            fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC)
            self._holds[file.number] += 1
            run.holds[file.number] += 1
            return Answer(number=file.number, size_bytes=file.size_bytes), fd
        if not 0 <= request.size_bytes < 1 << 62:
            raise OSError(errno.EINVAL, "no size of a file")
        if request.verb == "spare":
            return self._spare(run, request)
        run.contents.check_free(request.path)
        self._runs.make_room(run, request.path, request.size_bytes, self)
        file = run.take(request.size_bytes, self)
        run.contents.add(request.path, file)
        return self._written(run, file)

    def _written(self, run: Run, file: MemoryFile) -> tuple[Answer, int]:
        """The answer to what makes a file that this client writes."""
        self.writes = True
        self._created = {*self._created, file.number} & run.files.keys()
        return Answer(
            number=file.number, size_bytes=file.size_bytes, touched_bytes=file.touched_bytes,
            kept=tuple(self._created)[:1000],
        ), os.dup(file.fd)

    def _spare(self, run: Run, request: Request) -> tuple[Answer, int | None]:
        """Memory for the generations to come; room was made for it when the first one was begun."""
        size_bytes = request.size_bytes
        known = [run.files[number] for number in self._created & run.files.keys()]
        alike = sum(1 for file in known if size_bytes // 2 <= file.size_bytes <= 2 * size_bytes)
        if size_bytes < AGENT_POOLED_FROM_BYTES or alike >= run.generations * request.number:
            return Answer(), None
        self._runs.make_room(run, "", size_bytes, self)
        file = run.take(size_bytes, self)
        run.settle(file)
        return self._written(run, file)

    def _put(self, run: Run, request: Request, fd: int | None) -> Answer:
        if fd is None:
            raise OSError(errno.EBADF, "one descriptor is needed")
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != request.size_bytes:
            os.close(fd)
            raise OSError(errno.EINVAL, "no file of that size")
        file = run.adopt(fd, request.size_bytes)
        try:
            run.contents.add(request.path, file)
        except OSError:
            run.settle(file)
            raise
        self.writes = True
        run.rewinds += request.path.startswith(REWOUND)
        return Answer(number=file.number)

    def _release(self, run: Run, number: int, holds: int) -> None:
        run.holds[number] -= holds
        file = run.files.get(number)
        if file is not None:
            run.settle(file)

    # Names

    def _names(self, run: Run, request: Request) -> Answer:
        acts: dict[str, Callable[[Run, Request], Answer | None]] = {
            "exists": lambda run, asked: Answer(yes=run.contents.exists(asked.path)),
            "names": lambda run, asked: Answer(names=run.contents.names(asked.path)),
            "look": self._look, "release": self._let_go, "resize": self._resize, "lock": self._lock,
            "make_directory": self._make_directory,
            "remove": lambda run, asked: run.settle(run.contents.remove(asked.path)),
            "rename": lambda run, asked: run.rename(asked.path, asked.target),
            "link": lambda run, asked: run.contents.link(asked.path, asked.target),
            "keep": self._keep, "agree": self._agree,
        }
        if request.verb in acts:
            self.writes = self.writes or request.verb in ("make_directory", "remove", "rename", "link", "lock")
            return acts[request.verb](run, request) or Answer()
        if request.verb == "lost_lock":
            return Answer(yes=run.contents.writer is self, text=run.contents.holder)
        if request.verb == "unlock":
            self._unlock(run)
            return Answer()
        if request.verb == "free":
            return Answer(size_bytes=self._runs.available_bytes())
        if request.verb == "serve":
            return Answer(text=self._duties.serve_run(run, request))
        if request.verb == "settle":
            return Answer(yes=self._duties.flush(run))
        raise OSError(errno.EINVAL, "this was said before")

    def _look(self, run: Run, request: Request) -> Answer:
        file = run.contents.file(request.path)
        return Answer(number=file.number, size_bytes=file.size_bytes)

    def _let_go(self, run: Run, request: Request) -> None:
        if self._holds[request.number] <= 0:
            raise OSError(errno.EBADF, "a file that this client does not hold")
        self._holds[request.number] -= 1
        self._release(run, request.number, 1)

    def _resize(self, run: Run, request: Request) -> None:
        file = run.files.get(request.number)
        if file is None or file.writer is not self:
            raise OSError(errno.EPERM, "no file that this client has created, and that is in no checkpoint yet")
        if not 0 <= request.size_bytes < 1 << 62:
            raise OSError(errno.EINVAL, "no size of a file")
        if request.size_bytes > file.size_bytes:
            path = next((name for name, one in run.contents.files.items() if one is file), "")
            self._runs.make_room(run, path, request.size_bytes - file.size_bytes, self, is_new=True)
        file.resize(request.size_bytes)

    def _make_directory(self, run: Run, request: Request) -> None:
        run.contents.make_directory(request.path)
        if request.path.startswith(SAVING):
            run.begin_draft()

    def _agree(self, run: Run, request: Request) -> Answer:
        run.whole, run.epoch = request.path or run.whole, max(run.epoch, request.number)
        return Answer(text=run.whole, number=run.epoch)

    def _lock(self, run: Run, request: Request) -> Answer:
        if run.contents.writer not in (None, self):
            return Answer(text=run.contents.holder)
        run.contents.writer, run.contents.holder = self, request.text
        return Answer(yes=True)

    def _unlock(self, run: Run) -> None:
        if run.contents.writer is self:
            run.contents.writer, run.contents.holder = None, ""

    def _keep(self, run: Run, request: Request) -> None:
        if request.number < GENERATIONS or not 0 <= request.seconds < 1e9:
            raise OSError(errno.EINVAL, "no way to keep a run")
        if request.target and not request.target.startswith("/"):
            raise OSError(errno.EINVAL, "a directory to flush to is a whole path")
        run.generations, run.linger_s = request.number, request.seconds
        run.flush_to = request.target or run.flush_to
