"""What the agent holds: for each run names, files, and the memory of removed files, which the next ones get.

No files are read or written here, and nothing blocks: all of it happens on the agent's one thread.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count

from flowstone.commit.entries import SAVING, SUPERSEDED, Kind, parse, step_directory, step_of
from flowstone.config import (
    AGENT_HEADROOM_BYTES,
    AGENT_LINGER_S,
    AGENT_POOLED_FROM_BYTES,
    GENERATIONS,
    MANIFEST_BYTES_MAX,
)
from flowstone.errors import FormatError
from flowstone.format.manifest import MANIFEST_NAME, decode_manifest
from flowstone.store.agent_wire import RunStatus
from flowstone.store.contents import Contents, MemoryFile, new_memory


class NoRoomError(Exception):
    """A file does not fit. `needed_bytes` are needed for what `why` says, and `available_bytes` are there."""

    def __init__(self, why: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(why)
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes


class Run:
    """One run's checkpoints, with how they are kept (NodeMemory says what the options mean)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.contents = Contents()
        self.generations, self.flush_to, self.linger_s = GENERATIONS, "", AGENT_LINGER_S
        self.flushed_step, self.flushed_id, self.flush_error = -1, "", ""
        self.rewinds = 0  # counts notes of rewinds that were put, and steps that were set aside
        self.flushed_rewinds = 0  # that count when the last successful flush began
        self.whole, self.epoch = "", 0  # what several nodes have agreed on (store/peers/)
        self.files: dict[int, MemoryFile] = {}  # all of them, by number
        self.holds: Counter[int] = Counter()  # clients that use a file, by its number
        self.pool: list[MemoryFile] = []  # without a name and a hold
        self._numbers = count(secrets.randbits(60))  # those of one agent are not those of the next one

    @property
    def held_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def unallocated_bytes(self) -> int:
        """Of its files, for which the system has not given memory yet."""
        return sum(max(0, file.size_bytes - _allocated(file)) for file in self.files.values())

    def steps(self) -> tuple[int, ...]:
        """The complete checkpoints, ascending."""
        found = ((step_of(name), name) for name in self.contents.names())
        return tuple(sorted(
            step for step, name in found if step is not None and self.contents.exists(f"{name}/{MANIFEST_NAME}")
        ))

    def newest(self) -> tuple[int, str]:
        """The step and the id of the newest complete checkpoint: -1 if there is none, "" if its manifest is damaged."""
        steps = self.steps()
        if not steps:
            return -1, ""
        path = f"{step_directory(steps[-1])}/{MANIFEST_NAME}"
        file = self.contents.file(path)
        try:
            return steps[-1], decode_manifest(file.read(0, min(file.size_bytes, MANIFEST_BYTES_MAX)), path=path).id
        except FormatError:
            return steps[-1], ""

    def is_flushed(self) -> bool:
        """Whether `flush_to` has the newest checkpoint, durably, and all rewinds."""
        step, identity = self.newest()
        is_there = bool(identity) and (step, identity) == (self.flushed_step, self.flushed_id)
        return is_there and self.flushed_rewinds == self.rewinds

    def take(self, size_bytes: int, writer: object) -> MemoryFile:
        """A file of that size for that client, of memory that was used before where there is some. It has no name."""
        file = self._fitting(size_bytes, writer)
        if file is not None:
            self.pool.remove(file)
        else:
            number = next(self._numbers)
            file = self.files[number] = MemoryFile(number, new_memory("flowstone"), 0)
        if file.size_bytes != size_bytes:
            file.resize(size_bytes)
        file.touched_bytes, file.writer = size_bytes if _allocated(file) >= size_bytes else 0, writer
        return file

    def fresh_bytes(self, size_bytes: int, writer: object) -> int:
        """What `take` would need beyond the memory of removed files."""
        file = self._fitting(size_bytes, writer)
        return size_bytes if file is None else max(0, size_bytes - file.size_bytes)

    def _fitting(self, size_bytes: int, writer: object) -> MemoryFile | None:
        """Memory of about that size, which no other client may write into still; first what the client knows."""
        def order(file: MemoryFile) -> tuple[bool, int, bool]:
            return file.size_bytes < size_bytes, abs(file.size_bytes - size_bytes), file.writer is not writer

        fits = (file for file in self.pool if size_bytes // 2 <= file.size_bytes <= 2 * size_bytes)
        return min((file for file in fits if file.writer in (None, writer)), key=order, default=None)

    def adopt(self, fd: int, size_bytes: int) -> MemoryFile:
        number = next(self._numbers)
        file = self.files[number] = MemoryFile(number, fd, size_bytes, touched_bytes=size_bytes)
        return file

    def settle(self, file: MemoryFile | None) -> None:
        """A file has lost a name or a hold: if that was the last, its memory is free."""
        if file is None or file.links or self.holds[file.number] or file.number not in self.files or file in self.pool:
            return
        del self.holds[file.number]
        if file.size_bytes >= AGENT_POOLED_FROM_BYTES:
            self.pool.append(file)
        else:
            del self.files[file.number]

    def drop_pool(self) -> None:
        for file in self.pool:
            del self.files[file.number]
        self.pool.clear()

    def begin_draft(self) -> None:
        """Make room for one more draft: the oldest complete checkpoints go, but never the newest.

        Nor that which is known to be whole on all nodes, if this is one of several. So does what a rewind has set
        aside: memory is for what may be loaded.
        """
        drafts = sum(1 for name in self.contents.names() if name.startswith(SAVING))
        steps = self.steps()
        spared = max(1, self.generations - drafts)
        for name in self.contents.names():
            if (step_of(name) in steps[:-spared] and name != self.whole) or name.startswith(SUPERSEDED):
                self.remove_all(name)

    def rename(self, source: str, target: str) -> None:
        """A draft that becomes a checkpoint is written no more: all its writers have said so before."""
        self.contents.rename(source, target)
        self.rewinds += target.startswith(SUPERSEDED)
        if step_of(target) is not None:
            for path, file in self.contents.files.items():
                if path.startswith(f"{target}/"):
                    file.writer = None

    def sweep(self) -> None:
        """No process writes any more: what is no checkpoint and never will be gives its memory back."""
        for name in self.contents.names():
            entry = parse(name)
            if entry is not None and entry.kind in (Kind.SAVING, Kind.DELETING):
                self.remove_all(name)

    def remove_all(self, name: str) -> None:
        """Remove a directory as a whole: no reader sees a part of it."""
        for file in self.contents.remove_all(name):
            self.settle(file)

    def draft_bytes(self, path: str) -> int:
        """Of the draft that the path is in, without what it shares with others; 0 outside of drafts."""
        directory = path.rpartition("/")[0]
        if not directory.startswith(SAVING):
            return 0
        files = self.contents.files.items()
        return sum(file.size_bytes for name, file in files if name.startswith(f"{directory}/") and file.links == 1)

    def status(self, jobs: int, *, is_flushing: bool) -> RunStatus:
        return RunStatus(
            self.name, self.steps()[-20:], self.held_bytes, sum(file.size_bytes for file in self.pool), jobs,
            self.contents.holder.partition("\n")[0],
            self.flush_to, self.flushed_step, is_flushing, self.flush_error, self.flushed_id,
        )


class Runs:
    """All runs. `available_bytes` tells how much memory the machine has left."""

    def __init__(self, available_bytes: Callable[[], int]) -> None:
        self._runs: dict[str, Run] = {}
        self._available_bytes = available_bytes

    def __iter__(self) -> Iterator[Run]:
        return iter(tuple(self._runs.values()))

    def of(self, name: str) -> Run:
        return self._runs.setdefault(name, Run(name))

    def __contains__(self, run: Run) -> bool:
        """Whether it was not dropped: another one may have its name now."""
        return self._runs.get(run.name) is run

    def drop(self, run: Run) -> None:
        """Give all of its memory back to the system, but what clients have open."""
        del self._runs[run.name]

    def available_bytes(self) -> int:
        promised = sum(run.unallocated_bytes for run in self)
        return max(0, self._available_bytes() - promised - AGENT_HEADROOM_BYTES)

    def make_room(self, run: Run, path: str, size_bytes: int, writer: object, *, is_new: bool = False) -> None:
        """Before a file is made: raise NoRoomError unless it fits, with all generations of its draft.

        is_new  it is so much more of a file that is there
        """
        fresh = size_bytes if is_new else run.fresh_bytes(size_bytes, writer)
        draft = run.draft_bytes(path) + size_bytes if path.startswith(SAVING) else 0
        more = max(0, run.generations * draft - run.held_bytes - fresh)
        if not fresh + more:
            return
        available = self.available_bytes()
        for other in self:
            if fresh + more > available and other is not run:
                other.drop_pool()
                available = self.available_bytes()
        if fresh + more > available:
            why = f"{run.generations} generations of {draft} bytes" if draft else f"{size_bytes} bytes"
            raise NoRoomError(why, fresh + more, available)


def _allocated(file: MemoryFile) -> int:
    return os.fstat(file.fd).st_blocks * 512
