"""A store in the memory of this node, which outlives the processes that save: the memory agent keeps names and files.

Agent and processes pass files to each other by their descriptors. A process captures, digests and reads a file in the
file's own memory (store/memory/store.py). docs/decisions/025 describes the agent, and when it frees memory.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from flowstone import _native
from flowstone.config import (
    AGENT_LINGER_S,
    GENERATIONS,
    LOCK_GRACE_S,
    TIER_ANSWER_S,
    EngineOptions,
    whole_number,
)
from flowstone.errors import ArgumentError, BudgetError, MemoryAgentError
from flowstone.format.manifest import MARKER_NAME
from flowstone.log import log
from flowstone.store.base import Capabilities
from flowstone.store.forks import forget_in_children
from flowstone.store.local import LocalStore
from flowstone.store.memory.agent_client import AgentClient
from flowstone.store.memory.agent_wire import AgentRequest, RunStatus, run_name
from flowstone.store.memory.contents import MemoryFile, new_memory
from flowstone.store.memory.store import StoreInMemory
from flowstone.store.mount import available_bytes
from flowstone.store.system import System

SCHEME = "memory://"
_NOTE = ".rewound-"  # prefix of the names of rewind notes (commit/entries.py)
_POLL_S = 0.01


class NodeMemory(StoreInMemory):
    """The checkpoints of the run `name` in this node's memory. A Store: `fs.Checkpointer(fs.NodeMemory("gpt"))`.

    `fs.Checkpointer("memory://gpt")` is the same with the defaults. All ranks must be on this node.

    generations  how many checkpoints are kept in memory, including the one that is being written; at least 2. Before a
                 checkpoint is written, the oldest ones are removed, but never the newest complete one
    flush_to     the directory of a store on a disk. Once the last process that saves has ended, even by a crash, the
                 agent makes the newest complete checkpoint durable there. `rewind` sets newer steps aside there, too
    linger_s     how long the memory is kept, in seconds, after the last process that used it has ended
    state_bytes  size of one checkpoint in bytes, if it is known. If it does not fit in memory, the error is raised
                 here, instead of at the first save

    raises  ArgumentError
            BudgetError  this node has less memory than `generations` checkpoints need
    """

    def __init__(
        self, name: str, *, generations: int = GENERATIONS, flush_to: str | os.PathLike[str] | None = None,
        linger_s: float = AGENT_LINGER_S, state_bytes: int | None = None, options: EngineOptions | None = None,
    ) -> None:
        self.run = run_name(name)
        self.generations = whole_number("generations", generations)
        if self.generations < GENERATIONS:
            raise ArgumentError(
                f"generations is {generations}, must be at least {GENERATIONS}",
                next=f"give {GENERATIONS} or more: one checkpoint is kept while the next is written",
            )
        if not linger_s >= 0:
            raise ArgumentError(f"linger_s is {linger_s!r:.60}, must be at least 0", next="give a number of seconds")
        self.flush_to = None if flush_to is None else _directory(flush_to)
        self._keep = AgentRequest(
            "keep", number=self.generations, target="" if self.flush_to is None else str(self.flush_to),
            seconds=float(linger_s),
        )
        self._agent = AgentTree(self.run, f"{SCHEME}{self.run}")
        super().__init__(self._agent, f"{SCHEME}{self.run}", options, Capabilities(
            atomic_rename=True, conditional_put=True, directory_sync=False, durable_on_return=True, range_reads=True,
            appends=False, direct=False, links=True, drafts_max=self.generations - 1, volatile=True, checks_room=True,
        ))
        if state_bytes is not None:
            self._check_memory(whole_number("state_bytes", state_bytes))

    def make_directory(self, path: str = "") -> None:
        if not path:
            self._agent.keep(self._keep)
        super().make_directory(path)

    def lock(self, holder: str) -> None:
        """See `Lock`. With `flush_to`, a run that has no identity yet (no marker file) also gets the identity of the
        store there, and its rewind notes (files that say that newer steps were set aside), so that both stores belong
        to the same run.
        """
        self._agent.keep(self._keep)
        super().lock(holder)
        try:
            self._take_identity()
        except BaseException:
            self.unlock()
            raise

    def _take_identity(self) -> None:
        if self.flush_to is None or self.exists(MARKER_NAME):
            return
        disk = LocalStore(self.flush_to)
        if disk.exists(MARKER_NAME):
            for name in disk.names():
                if name.startswith(_NOTE) and not self.exists(name):
                    self.put(name, disk.read(name))
            # the marker is copied last: without it, the next lock repeats all of this
            self.put(MARKER_NAME, disk.read(MARKER_NAME))

    def status(self) -> RunStatus | None:
        """The status of this run in the agent. None if the agent has no checkpoint or lock of it."""
        return next((run for run in list_runs() if run.name == self.run), None)

    def flush(self) -> bool:
        """Ask the agent to make the newest complete checkpoint durable in `flush_to`, in the background. Returns False
        if there is nothing to flush.
        """
        answer, _ = self._agent.client.request(AgentRequest("settle"))
        return answer.yes

    def flush_rewind(self) -> None:
        """Called after a rewind: wait until the agent has set the rewound steps aside in `flush_to`, too, so that no
        later load reads them from there. If the directory refuses, or has not answered after TIER_ANSWER_S +
        LOCK_GRACE_S, a warning is logged, and the agent does it later.
        """
        limit_s = TIER_ANSWER_S + LOCK_GRACE_S  # within that time, the agent reports a lock that it cannot get
        deadline = time.monotonic() + limit_s
        if not self.flush():
            return
        while (status := self.status()) is not None and (status.is_flushing or status.flush_error):
            if status.flush_error or time.monotonic() > deadline:
                log.warning(
                    "%s was rewound, but %s still has the newer steps, and a load after a reboot would use them (%s); "
                    "the memory agent tries again; if it fails again, remove the cause and run `flowstone flush %s %s`",
                    self.location, status.flush_to,
                    status.flush_error or f"setting them aside has taken longer than {limit_s:g} s", self.location,
                    status.flush_to,
                )
                return
            time.sleep(_POLL_S)

    def _check_memory(self, state_bytes: int) -> None:
        status = self.status()
        needed = self.generations * state_bytes
        available = available_bytes() + (0 if status is None else status.held_bytes)
        if needed > available:
            raise BudgetError(
                f"{self.location} cannot hold {self.generations} generations (checkpoints) in this node's memory",
                needed=f"{self.generations} x {state_bytes} bytes", available=f"{available} bytes",
                next="save to a directory, or put less of the state on each node",
            )


def _directory(flush_to: str | os.PathLike[str]) -> Path:
    """The absolute path of `flush_to`. Raises ArgumentError for a URL."""
    from flowstone.store.urls import object_url, without_secrets  # imported here: most runs have no URL

    text = os.fspath(flush_to)
    if "://" in text or (":/" in text and object_url(text) is not None):
        raise ArgumentError(
            f"flush_to {without_secrets(text)!r} is a URL", expected="a directory",
            next="instead of flush_to, give the Checkpointer a list of tiers: [NodeMemory(...), URL]",
        )
    return Path(text).expanduser().absolute()


class AgentTree:
    """The names and files of a run in the agent. See store.memory.store.MemoryTree.

    Files that this process has written stay mapped as long as they exist. The agent reuses the memory of removed files
    for new ones. Mapping that memory again would cost page faults, and each takes a third of the time of copying the
    page.
    """

    def __init__(self, run: str, location: str) -> None:
        self.client = AgentClient(run)
        self._location = location
        self._written: dict[int, _WrittenFile] = {}
        self._locked_on = 0  # the number of the connection that has the lock; 0: none
        forget_in_children(self)

    def forget(self) -> None:
        """In a forked child: close the copies of descriptors, which would keep memory that the agent frees."""
        for file in self._written.values():
            file.forget()
        self._written = {}

    def hold(self) -> AbstractContextManager[object]:
        return self.client.hold()

    def keep(self, how: AgentRequest) -> None:
        self.client.request(how, start=True)

    def exists(self, path: str) -> bool:
        return self.client.find_agent() and self.client.request(AgentRequest("exists", path))[0].yes

    def names(self, path: str) -> tuple[str, ...]:
        return self.client.request(AgentRequest("names", path))[0].names if self.client.find_agent() else ()

    def stat(self, path: str) -> tuple[int, int]:
        answer, _ = self.client.request(AgentRequest("look", path))
        return answer.number, answer.size_bytes

    def open(self, path: str) -> MemoryFile:
        answer, fd = self.client.request(AgentRequest("open", path))
        assert fd is not None, "the agent sends a descriptor"
        return _PinnedFile(self.client, answer.number, fd, answer.size_bytes, path=f"{self._location}/{path}")

    def create(self, path: str, size_bytes: int) -> MemoryFile:
        answer, fd = self.client.request(AgentRequest("create", path, size_bytes=size_bytes))
        assert fd is not None, "the agent sends a descriptor"
        self._written = {number: written for number, written in self._written.items() if number in answer.kept}
        written = self._written.get(answer.number)
        if written is not None and written.size_bytes == size_bytes:
            os.close(fd)
            written.reuse(f"{self._location}/{path}", answer.touched_bytes)
            return written
        written = self._written[answer.number] = _WrittenFile(
            answer.number, fd, size_bytes, path=f"{self._location}/{path}", touched_bytes=answer.touched_bytes
        )
        return written

    def spare(self, files: Sequence[MemoryFile]) -> Sequence[MemoryFile]:
        spare = []
        for file in files:
            answer, fd = self.client.request(AgentRequest("spare", size_bytes=file.size_bytes, number=len(files)))
            if fd is not None:
                spare.append(MemoryFile(answer.number, fd, answer.size_bytes))
        return spare

    def put(self, path: str, content: bytes) -> None:
        file = MemoryFile(0, new_memory("flowstone"), len(content))
        System().write(file.fd, content)
        self.client.request(AgentRequest("put", path, size_bytes=len(content)), file.fd)

    def resize(self, file: MemoryFile, size_bytes: int) -> None:
        self.client.request(AgentRequest("resize", number=file.number, size_bytes=size_bytes))
        file.resize(size_bytes)

    def make_directory(self, path: str) -> None:
        self.client.request(AgentRequest("make_directory", path), start=not path)

    def remove(self, path: str) -> None:
        self.client.request(AgentRequest("remove", path))

    def rename(self, source: str, target: str, *, directories: bool) -> None:
        assert directories, "the agent renames directories, too"
        self.client.request(AgentRequest("rename", source, target))

    def link(self, source: str, target: str) -> None:
        self.client.request(AgentRequest("link", source, target))

    def lock(self, holder: str) -> str | None:
        answer, _ = self.client.request(AgentRequest("lock", text=holder), start=True)
        self.client.forget_loss()
        self._locked_on = self.client.connections if answer.yes else 0
        return None if answer.yes else answer.text

    def lost_lock(self) -> str | None:
        """See MemoryTree. Sends no request: as long as the connection is open, the agent gives the lock to no other
        process.
        """
        if self._locked_on and self._locked_on == self.client.connections and self.client.is_connected():
            return None
        try:
            answer, _ = self.client.request(AgentRequest("lost_lock"))
        except MemoryAgentError:
            return self.client.lost_message
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            return "no memory agent is running"
        return None if answer.yes else self.client.lost_message or answer.text or "no holder"

    def unlock(self) -> None:
        self._locked_on = 0
        if self.client.find_agent():
            self.client.request(AgentRequest("unlock"))

    def free_bytes(self) -> int:
        return self.client.request(AgentRequest("free"))[0].size_bytes

    def close(self) -> None:
        """Close the connection, by which the agent knows that the job has ended."""
        self._written.clear()
        self.client.close()


class _WrittenFile(MemoryFile):
    """A file that stays mapped into this process, as its memory will be reused."""

    _mapping: _native.Mapping | None = None

    def reuse(self, path: str, touched_bytes: int) -> None:
        """Use this memory for another file of the same size."""
        self.path, self.touched_bytes = path, touched_bytes

    def mapped(self, *, writable: bool) -> _native.Mapping | None:
        if self._mapping is None or self._mapping.bytes != self.size_bytes:
            self._mapping = super().mapped(writable=writable)
        return self._mapping


class _PinnedFile(MemoryFile):
    """A file that the agent neither frees nor reuses while this object exists."""

    def __init__(self, client: AgentClient, number: int, fd: int, size_bytes: int, *, path: str) -> None:
        super().__init__(number, fd, size_bytes, path=path)
        self._client = client

    def __del__(self) -> None:
        self._client.release_later(self.number)


def list_runs() -> tuple[RunStatus, ...]:
    """The runs in this node's memory agent; empty if no agent is running."""
    client = AgentClient("")
    try:
        return client.request(AgentRequest("runs"))[0].runs if client.find_agent() else ()
    finally:
        client.close()
