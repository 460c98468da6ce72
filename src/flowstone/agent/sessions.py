"""One client's connection to the agent, and its requests. Each request is carried out completely, or fails without any
effect.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from flowstone._version import __version__
from flowstone.agent.runs import MemoryRun, MemoryRuns, NoSpaceError
from flowstone.commit.entries import SAVING
from flowstone.config import AGENT_POOLED_FROM_BYTES, GENERATIONS
from flowstone.errors import ArgumentError
from flowstone.store.memory.agent_wire import PROTOCOL, AgentRequest, AgentResponse, RunStatus, run_name
from flowstone.store.memory.contents import MemoryFile


class AgentServices(Protocol):
    """The agent's functions that a session calls."""

    def flush(self, run: MemoryRun) -> bool:
        """Start to flush the newest checkpoint, unless it is durable already. Returns whether a flush is running."""

    def statuses(self) -> tuple[RunStatus, ...]: ...
    def serve_run(self, run: MemoryRun, request: AgentRequest) -> str:
        """Serve the run to other nodes, by a child process. Returns the child's port; "" until it is known."""


class RefusedError(Exception):
    """The agent refuses a request. The connection must end after the answer."""

    def __init__(self, answer: AgentResponse) -> None:
        super().__init__(answer.error)
        self.answer = answer


class Session:
    """One client's session.

    writes   whether the client has changed the run. If so, the run's unfinished checkpoints are removed when the client
             ends
    run      the client's run; None before the first request, and for a client that only lists runs
    """

    def __init__(self, connection: socket.socket, pid: int, runs: MemoryRuns, duties: AgentServices) -> None:
        self.connection, self.pid, self._runs, self._duties = connection, pid, runs, duties
        self.run: MemoryRun | None = None
        self.writes = False
        self._greeted = False
        self._created: set[int] = set()
        self._holds: Counter[int] = Counter()

    def answer(self, request: AgentRequest, fds: list[int]) -> tuple[AgentResponse, int | None]:
        """Carry out a request. Returns the answer, and a descriptor to send with it (or None), which the caller must
        close. `fds`: the descriptors that came with the request, which this object now owns.

        raises  RefusedError
        """
        passed: int | None = fds.pop() if request.verb == "put" and len(fds) == 1 else None
        for fd in fds:
            os.close(fd)
        try:
            if not self._greeted:
                return self._hello(request), None
            if request.verb == "runs":
                return AgentResponse(runs=self._duties.statuses()), None
            if self.run is None:
                raise OSError(errno.EINVAL, "the client has not named its run yet")
            if request.verb == "put":
                owned, passed = passed, None
                return self._put(self.run, request, owned), None
            if request.verb in ("open", "create", "spare"):
                return self._files(self.run, request)
            return self._names(self.run, request), None
        except NoSpaceError as error:
            return AgentResponse(
                errno=errno.ENOSPC, error=str(error), full=True, needed_bytes=error.needed_bytes,
                size_bytes=error.available_bytes,
            ), None
        except OSError as error:
            return AgentResponse(errno=error.errno or errno.EIO, error=error.strerror or str(error)), None
        finally:
            if passed is not None:
                os.close(passed)

    def end(self) -> None:
        """Release the files and the lock of a client that has ended."""
        if self.run is None:
            return
        self.run.contents.unlock(self)
        for number, holds in self._holds.items():
            self._release(self.run, number, holds)
        for file in self.run.files.values():
            if file.writer is self:
                file.end_writing()
        self._holds.clear()

    def _hello(self, request: AgentRequest) -> AgentResponse:
        if request.verb != "hello" or request.number != PROTOCOL:
            raise RefusedError(AgentResponse(
                errno=errno.EPROTO, error="the releases of agent and client differ", number=PROTOCOL, text=__version__
            ))
        if request.path:
            try:
                self.run = self._runs.of(run_name(request.path))
            except ArgumentError as error:
                raise RefusedError(AgentResponse(errno=errno.EINVAL, error=str(error), number=PROTOCOL)) from error
        self._greeted = True
        return AgentResponse(number=PROTOCOL, text=__version__)

    # Files

    def _files(self, run: MemoryRun, request: AgentRequest) -> tuple[AgentResponse, int | None]:
        if request.verb == "open":
            file = run.contents.file(request.path)
            fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC)
            self._holds[file.number] += 1
            run.holds[file.number] += 1
            return AgentResponse(number=file.number, size_bytes=file.size_bytes), fd
        if not 0 <= request.size_bytes < 1 << 62:
            raise OSError(errno.EINVAL, "the requested size is out of range")
        if request.verb == "spare":
            return self._spare(run, request)
        run.contents.check_free(request.path)
        self._runs.check_space(run, request.path, request.size_bytes, self)
        file = run.allocate(request.size_bytes, self)
        run.contents.add(request.path, file)
        return self._written(run, file)

    def _written(self, run: MemoryRun, file: MemoryFile) -> tuple[AgentResponse, int]:
        """The answer, with a descriptor, to a request that creates a file for this client to write."""
        self.writes = True
        self._created = {*self._created, file.number} & run.files.keys()
        return AgentResponse(
            number=file.number, size_bytes=file.size_bytes, touched_bytes=file.touched_bytes,
            kept=tuple(self._created)[:1000],
        ), os.dup(file.fd)

    def _spare(self, run: MemoryRun, request: AgentRequest) -> tuple[AgentResponse, int | None]:
        """Create a file for a later checkpoint, and return its descriptor with the answer. If this client has enough
        files of about this size, the answer has no descriptor.
        """
        size_bytes = request.size_bytes
        files = [run.files[number] for number in self._created & run.files.keys()]
        alike = sum(1 for file in files if size_bytes // 2 <= file.size_bytes <= 2 * size_bytes)
        if size_bytes < AGENT_POOLED_FROM_BYTES or alike >= run.generations * request.number:
            return AgentResponse(), None
        self._runs.check_space(run, "", size_bytes, self)
        file = run.allocate(size_bytes, self)
        run.release_unused(file)
        return self._written(run, file)

    def _put(self, run: MemoryRun, request: AgentRequest, fd: int | None) -> AgentResponse:
        if fd is None:
            raise OSError(errno.EBADF, "the request must come with one file descriptor")
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != request.size_bytes:
            os.close(fd)
            raise OSError(errno.EINVAL, "the file descriptor is not that of a file with the size in the request")
        file = run.put(request.path, fd, request.size_bytes)
        self.writes = True
        return AgentResponse(number=file.number)

    def _release(self, run: MemoryRun, number: int, holds: int) -> None:
        run.holds[number] -= holds
        file = run.files.get(number)
        if file is not None:
            run.release_unused(file)

    # Names

    def _names(self, run: MemoryRun, request: AgentRequest) -> AgentResponse:
        acts: dict[str, Callable[[MemoryRun, AgentRequest], AgentResponse | None]] = {
            "exists": lambda run, request: AgentResponse(yes=run.contents.exists(request.path)),
            "names": lambda run, request: AgentResponse(names=run.contents.names(request.path)),
            "look": self._look, "release": self._release_one, "resize": self._resize, "lock": self._lock,
            "make_directory": self._make_directory,
            "remove": lambda run, request: run.release_unused(run.contents.remove(request.path)),
            "rename": lambda run, request: run.rename(request.path, request.target),
            "link": lambda run, request: run.contents.link(request.path, request.target),
            "keep": self._keep, "agree": self._agree,
        }
        if request.verb in acts:
            self.writes = self.writes or request.verb in ("make_directory", "remove", "rename", "link", "lock")
            return acts[request.verb](run, request) or AgentResponse()
        if request.verb == "lost_lock":
            return AgentResponse(yes=run.contents.writer is self, text=run.contents.holder)
        if request.verb == "unlock":
            run.contents.unlock(self)
            return AgentResponse()
        if request.verb == "free":
            return AgentResponse(size_bytes=self._runs.available_bytes())
        if request.verb == "serve":
            return AgentResponse(text=self._duties.serve_run(run, request))
        if request.verb == "settle":
            return AgentResponse(yes=self._duties.flush(run))
        raise OSError(errno.EINVAL, "the client has already sent hello")

    def _look(self, run: MemoryRun, request: AgentRequest) -> AgentResponse:
        file = run.contents.file(request.path)
        return AgentResponse(number=file.number, size_bytes=file.size_bytes)

    def _release_one(self, run: MemoryRun, request: AgentRequest) -> None:
        if self._holds[request.number] <= 0:
            raise OSError(errno.EBADF, "this client does not have the file open")
        self._holds[request.number] -= 1
        self._release(run, request.number, 1)

    def _resize(self, run: MemoryRun, request: AgentRequest) -> None:
        file = run.files.get(request.number)
        if file is None or file.writer is not self:
            raise OSError(errno.EPERM, "this client did not create the file, or the file is in a checkpoint already")
        if not 0 <= request.size_bytes < 1 << 62:
            raise OSError(errno.EINVAL, "the requested size is out of range")
        if request.size_bytes > file.size_bytes:
            path = next((name for name, candidate in run.contents.files.items() if candidate is file), "")
            self._runs.check_space(run, path, request.size_bytes - file.size_bytes, self, is_new=True)
        file.resize(request.size_bytes)

    def _make_directory(self, run: MemoryRun, request: AgentRequest) -> None:
        run.contents.make_directory(request.path)
        if request.path.startswith(SAVING):
            run.begin_draft()

    def _agree(self, run: MemoryRun, request: AgentRequest) -> AgentResponse:
        run.agree(request.path, request.number)
        return AgentResponse(text=run.whole, number=run.epoch)

    def _lock(self, run: MemoryRun, request: AgentRequest) -> AgentResponse:
        is_locked = run.contents.lock(self, request.text)
        return AgentResponse(yes=True) if is_locked else AgentResponse(text=run.contents.holder)

    def _keep(self, run: MemoryRun, request: AgentRequest) -> None:
        if request.number < GENERATIONS or not 0 <= request.seconds < 1e9:
            raise OSError(
                errno.EINVAL,
                "`generations` (checkpoints to keep) must be at least 2, and `linger_s` (how long to keep them) "
                "at least 0 and below 1e9",
            )
        if request.target and not request.target.startswith("/"):
            raise OSError(errno.EINVAL, "the directory to flush to must be an absolute path")
        run.keep(request.number, request.seconds, request.target)
