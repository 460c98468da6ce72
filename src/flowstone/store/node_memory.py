"""A store in the memory of this node, which outlives the processes that save: the memory agent keeps names and files.

Files are passed by descriptor, and captured, digested and read where they lie (store/memory.py). What the agent does,
and when it lets memory go: docs/decisions/025-memory-tier.md.
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
from flowstone.store.agent_client import AgentClient
from flowstone.store.agent_wire import Request, RunStatus, run_name
from flowstone.store.base import Capabilities
from flowstone.store.contents import MemoryFile, new_memory
from flowstone.store.forks import forget_in_children
from flowstone.store.local import LocalStore
from flowstone.store.memory import StoreInMemory
from flowstone.store.mount import available_bytes
from flowstone.store.system import System

SCHEME = "memory://"
_NOTE = ".rewound-"  # how the names of notes of rewinds begin (commit/entries.py)
_POLL_S = 0.01


class NodeMemory(StoreInMemory):
    """The checkpoints of the run `name` in this node's memory. A Store: `fs.Checkpointer(fs.NodeMemory("gpt"))`.

    `fs.Checkpointer("memory://gpt")` is the same with the defaults. All ranks are on this node.

    generations  how many checkpoints there is memory for, the one that is being written included: 2 at least. Before
                 one is written, the oldest are removed, but never the newest that is complete
    flush_to     the directory of a store on a disk. Once the last process that saves has ended, in any way, the agent
                 makes the newest complete checkpoint durable there. `rewind` sets newer steps aside there, too
    linger_s     how long the memory is kept after the last process that used it has ended
    state_bytes  of one checkpoint, if it is known: what does not fit is refused here, else at the first save

    raises  ArgumentError; BudgetError if this node has less memory than the generations take
    """

    def __init__(
        self, name: str, *, generations: int = GENERATIONS, flush_to: str | os.PathLike[str] | None = None,
        linger_s: float = AGENT_LINGER_S, state_bytes: int | None = None, options: EngineOptions | None = None,
    ) -> None:
        self.run = run_name(name)
        self.generations = whole_number("generations", generations)
        if self.generations < GENERATIONS:
            raise ArgumentError(
                f"generations {generations} is less than {GENERATIONS}", next="one is kept while one is written"
            )
        if not linger_s >= 0:
            raise ArgumentError(f"linger_s {linger_s!r:.60} is less than none", next="give a number of seconds")
        self.flush_to = None if flush_to is None else _directory(flush_to)
        self._keep = Request(
            "keep", number=self.generations, target="" if self.flush_to is None else str(self.flush_to),
            seconds=float(linger_s),
        )
        self._agent = AgentTree(self.run, f"{SCHEME}{self.run}")
        super().__init__(self._agent, f"{SCHEME}{self.run}", options, Capabilities(
            atomic_rename=True, conditional_put=True, directory_sync=False, durable_on_return=True, range_reads=True,
            appends=False, direct=False, links=True, drafts_max=self.generations - 1, volatile=True, checks_room=True,
        ))
        if state_bytes is not None:
            self._check_room(whole_number("state_bytes", state_bytes))

    def make_directory(self, path: str = "") -> None:
        if not path:
            self._agent.keep(self._keep)
        super().make_directory(path)

    def lock(self, holder: str) -> None:
        """As in `Lock`. A run that is flushed into a store has that store's identity, so that it is one run there, and
        takes part in the rewinds that it has seen.
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
            self.put(MARKER_NAME, disk.read(MARKER_NAME))  # last: without it all is done again

    def status(self) -> RunStatus | None:
        """What the agent holds of this run; None if it holds nothing."""
        return next((run for run in held_runs() if run.name == self.run), None)

    def flush(self) -> bool:
        """Have the agent make the newest complete checkpoint durable in `flush_to`, in the background. Whether it does.
        """
        answer, _ = self._agent.client.ask(Request("settle"))
        return answer.yes

    def flush_rewind(self) -> None:
        """After a rewind: wait until its steps are set aside in `flush_to`, too, so that they cannot come back from
        there. If the directory refuses, or has not answered after TIER_ANSWER_S and a lock's grace, that is done later,
        and the log says so.
        """
        limit_s = TIER_ANSWER_S + LOCK_GRACE_S  # a lock that is refused says so within that
        deadline = time.monotonic() + limit_s
        if not self.flush():
            return
        while (status := self.status()) is not None and (status.is_flushing or status.flush_error):
            if status.flush_error or time.monotonic() > deadline:
                log.warning(
                    "%s was rewound, but %s still has the newer steps, which a load after a reboot would take (%s); "
                    "the memory agent tries again; if that fails too, remove the cause and run `flowstone flush %s %s`",
                    self.location, status.flush_to,
                    status.flush_error or f"setting them aside has taken longer than {limit_s:g} s",
                    self.location, status.flush_to,
                )
                return
            time.sleep(_POLL_S)

    def _check_room(self, state_bytes: int) -> None:
        held = self.status()
        needed, available = self.generations * state_bytes, available_bytes() + (0 if held is None else held.held_bytes)
        if needed > available:
            raise BudgetError(
                f"{self.location} cannot hold {self.generations} generations in the memory of this node",
                needed=f"{self.generations} x {state_bytes} bytes", available=f"{available} bytes",
                next="save to a directory, or give each node less of the state",
            )


def _directory(flush_to: str | os.PathLike[str]) -> Path:
    """Raises ArgumentError for a URL."""
    from flowstone.store.objects.urls import object_url, without_secrets  # imported here: most runs have none

    text = os.fspath(flush_to)
    if "://" in text or (":/" in text and object_url(text) is not None):
        raise ArgumentError(
            f"flush_to {without_secrets(text)!r} is a URL", expected="a directory",
            next="give the Checkpointer both as a list of tiers: [memory, URL]",
        )
    return Path(text).expanduser().absolute()


class AgentTree:
    """Names that the agent keeps. See store.memory.MemoryTree.

    Files that this process has written stay mapped while they exist: the agent gives the memory of removed ones to
    later ones, and to find a page anew costs as much as a third of copying it.
    """

    def __init__(self, run: str, location: str) -> None:
        self.client = AgentClient(run)
        self._location = location
        self._written: dict[int, _WrittenFile] = {}
        self._locked_on = 0  # the number of the connection for which the agent holds the lock; 0: none
        forget_in_children(self)

    def forget(self) -> None:
        """In a forked child: its copies of descriptors would keep memory that the agent lets go."""
        for file in self._written.values():
            file.forget()
        self._written = {}

    def acting(self) -> AbstractContextManager[object]:
        return self.client.acting()

    def keep(self, how: Request) -> None:
        self.client.ask(how, start=True)

    def exists(self, path: str) -> bool:
        return self.client.is_there() and self.client.ask(Request("exists", path))[0].yes

    def names(self, path: str) -> tuple[str, ...]:
        return self.client.ask(Request("names", path))[0].names if self.client.is_there() else ()

    def look(self, path: str) -> tuple[int, int]:
        answer, _ = self.client.ask(Request("look", path))
        return answer.number, answer.size_bytes

    def open(self, path: str) -> MemoryFile:
        answer, fd = self.client.ask(Request("open", path))
        assert fd is not None, "the agent gives a descriptor"
        return _HeldFile(self.client, answer.number, fd, answer.size_bytes, path=f"{self._location}/{path}")

    def create(self, path: str, size_bytes: int) -> MemoryFile:
        answer, fd = self.client.ask(Request("create", path, size_bytes=size_bytes))
        assert fd is not None, "the agent gives a descriptor"
        self._written = {number: file for number, file in self._written.items() if number in answer.kept}
        known = self._written.get(answer.number)
        if known is not None and known.size_bytes == size_bytes:
            os.close(fd)
            known.path, known.touched_bytes = f"{self._location}/{path}", answer.touched_bytes
            return known
        file = self._written[answer.number] = _WrittenFile(
            answer.number, fd, size_bytes, path=f"{self._location}/{path}", touched_bytes=answer.touched_bytes
        )
        return file

    def spare(self, files: Sequence[MemoryFile]) -> Sequence[MemoryFile]:
        spare = []
        for file in files:
            answer, fd = self.client.ask(Request("spare", size_bytes=file.size_bytes, number=len(files)))
            if fd is not None:
                spare.append(MemoryFile(answer.number, fd, answer.size_bytes))
        return spare

    def put(self, path: str, content: bytes) -> None:
        file = MemoryFile(0, new_memory("flowstone"), len(content))
        System().write(file.fd, content)
        self.client.ask(Request("put", path, size_bytes=len(content)), file.fd)

    def resize(self, file: MemoryFile, size_bytes: int) -> None:
        self.client.ask(Request("resize", number=file.number, size_bytes=size_bytes))
        file.resize(size_bytes)

    def make_directory(self, path: str) -> None:
        self.client.ask(Request("make_directory", path), start=not path)

    def remove(self, path: str) -> None:
        self.client.ask(Request("remove", path))

    def rename(self, source: str, target: str, *, directories: bool) -> None:
        assert directories, "they are moved as a whole"
        self.client.ask(Request("rename", source, target))

    def link(self, source: str, target: str) -> None:
        self.client.ask(Request("link", source, target))

    def lock(self, holder: str) -> str | None:
        answer, _ = self.client.ask(Request("lock", text=holder), start=True)
        self.client.ended = ""
        self._locked_on = self.client.connections if answer.yes else 0
        return None if answer.yes else answer.text

    def lost_lock(self) -> str | None:
        """As MemoryTree says. The agent gives a lock to no other while its holder's connection stands: it is not asked.
        """
        if self._locked_on and self._locked_on == self.client.connections and self.client.stands():
            return None
        try:
            answer, _ = self.client.ask(Request("lost_lock"))
        except MemoryAgentError:
            return self.client.ended
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            return "no memory agent runs"
        return None if answer.yes else self.client.ended or answer.text or "no holder"

    def unlock(self) -> None:
        self._locked_on = 0
        if self.client.is_there():
            self.client.ask(Request("unlock"))

    def free_bytes(self) -> int:
        return self.client.ask(Request("free"))[0].size_bytes

    def close(self) -> None:
        """The agent takes the end of the connection for that of the job."""
        self._written.clear()
        self.client.close()


class _WrittenFile(MemoryFile):
    """A file that stays mapped."""

    _mapping: _native.Mapping | None = None

    def mapped(self, *, writable: bool) -> _native.Mapping | None:
        if self._mapping is None or self._mapping.bytes != self.size_bytes:
            self._mapping = super().mapped(writable=writable)
        return self._mapping


class _HeldFile(MemoryFile):
    """A file that the agent keeps as it is until this is dropped."""

    def __init__(self, client: AgentClient, number: int, fd: int, size_bytes: int, *, path: str) -> None:
        super().__init__(number, fd, size_bytes, path=path)
        self._client = client

    def __del__(self) -> None:
        self._client.release_later(self.number)


def held_runs() -> tuple[RunStatus, ...]:
    """What the memory agent of this node holds; nothing if none runs."""
    client = AgentClient("")
    try:
        return client.ask(Request("runs"))[0].runs if client.is_there() else ()
    finally:
        client.close()
