"""The contents of the agent: for each run, its names, its files, and the memory of removed files, which later files
reuse.

All of this runs on the agent's only thread. No function blocks, or reads or writes a file's bytes.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count

from flowstone.commit.entries import REWOUND, SAVING, SUPERSEDED, EntryKind, parse_entry, step_directory, step_of
from flowstone.config import (
    AGENT_HEADROOM_BYTES,
    AGENT_LINGER_S,
    AGENT_POOLED_FROM_BYTES,
    GENERATIONS,
    MANIFEST_BYTES_MAX,
)
from flowstone.errors import FormatError
from flowstone.format.manifest import MANIFEST_NAME, decode_manifest
from flowstone.store.memory.agent_wire import RunStatus
from flowstone.store.memory.contents import MemoryDirectory, MemoryFile, new_memory


class NoSpaceError(Exception):
    """A file does not fit in memory. `reason` says what needs `needed_bytes`, of which only `available_bytes` are
    available.
    """

    def __init__(self, reason: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(reason)
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes


class MemoryRun:
    """One run's checkpoints, and the options for keeping them (see NodeMemory)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.contents = MemoryDirectory()
        self.generations, self.flush_to, self.linger_s = GENERATIONS, "", AGENT_LINGER_S
        self.flushed_step, self.flushed_id, self.flush_error = -1, "", ""
        self.rewinds = 0  # how many notes of rewinds there are, plus how many steps rewinds have set aside
        self.flushed_rewinds = 0  # the value of `rewinds` when the last successful flush began
        self.whole, self.epoch = "", 0  # checkpoint and epoch on which several nodes have agreed (store/peers/)
        self.files: dict[int, MemoryFile] = {}  # number -> file
        self.holds: Counter[int] = Counter()  # number of a file -> how many clients use it
        self.pool: list[MemoryFile] = []  # files that have no name and no client, kept to be reused
        self._numbers = count(secrets.randbits(60))  # starts at random, so that two agents do not use the same numbers

    @property
    def held_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def unallocated_bytes(self) -> int:
        """Bytes of this run's files for which the system has not allocated memory yet."""
        return sum(max(0, file.size_bytes - _allocated(file)) for file in self.files.values())

    def steps(self) -> tuple[int, ...]:
        """The complete checkpoints, ascending."""
        entries = ((step_of(name), name) for name in self.contents.names())
        return tuple(sorted(
            step for step, name in entries if step is not None and self.contents.exists(f"{name}/{MANIFEST_NAME}")
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
        """Whether the newest checkpoint, and all rewinds, are durable in `flush_to`."""
        step, identity = self.newest()
        is_there = bool(identity) and (step, identity) == (self.flushed_step, self.flushed_id)
        return is_there and self.flushed_rewinds == self.rewinds

    def begin_flush(self) -> None:
        """A flush begins, so the reason why the last one failed is forgotten."""
        self.flush_error = ""

    def note_flush_error(self, error: str) -> None:
        self.flush_error = error

    def note_durable(self, step: int, identity: str) -> None:
        """Record that `flush_to` has that checkpoint durably."""
        self.flushed_step, self.flushed_id = step, identity

    def end_flush(self, rewinds: int) -> None:
        """Record that a flush has succeeded. `rewinds`: the value of this run's `rewinds` when the flush began."""
        self.flushed_rewinds, self.flush_error = rewinds, ""

    def keep(self, generations: int, linger_s: float, flush_to: str) -> None:
        """Set a client's options for keeping the run (see NodeMemory). `flush_to`: "" leaves the directory unchanged.
        """
        self.generations, self.linger_s, self.flush_to = generations, linger_s, flush_to or self.flush_to

    def agree(self, whole: str, epoch: int) -> None:
        """Record the checkpoint and the epoch on which several nodes have agreed. "" and 0 change nothing."""
        self.whole, self.epoch = whole or self.whole, max(self.epoch, epoch)

    def allocate(self, size_bytes: int, writer: object) -> MemoryFile:
        """Give the client `writer` a memory file of `size_bytes` that has no name yet. It is a file from `pool`, if one
        fits.
        """
        file = self._fitting(size_bytes, writer)
        if file is not None:
            self.pool.remove(file)
        else:
            number = next(self._numbers)
            file = self.files[number] = MemoryFile(number, new_memory("flowstone"), 0)
        if file.size_bytes != size_bytes:
            file.resize(size_bytes)
        file.begin_writing(writer, size_bytes if _allocated(file) >= size_bytes else 0)
        return file

    def new_bytes(self, size_bytes: int, writer: object) -> int:
        """How many bytes of new memory `allocate` would need for a file of this size."""
        file = self._fitting(size_bytes, writer)
        return size_bytes if file is None else max(0, size_bytes - file.size_bytes)

    def _fitting(self, size_bytes: int, writer: object) -> MemoryFile | None:
        """A file of `pool` that has about that size, and that no other client can write into. Files that this client
        wrote before are preferred. None if there is no such file.
        """
        def order(file: MemoryFile) -> tuple[bool, int, bool]:
            return file.size_bytes < size_bytes, abs(file.size_bytes - size_bytes), file.writer is not writer

        fits = (file for file in self.pool if size_bytes // 2 <= file.size_bytes <= 2 * size_bytes)
        return min((file for file in fits if file.writer in (None, writer)), key=order, default=None)

    def put(self, path: str, fd: int, size_bytes: int) -> MemoryFile:
        """Give a client's file a name. From now on, this object owns the descriptor `fd`."""
        number = next(self._numbers)
        file = self.files[number] = MemoryFile(number, fd, size_bytes, touched_bytes=size_bytes)
        try:
            self.contents.add(path, file)
        except OSError:
            self.release_unused(file)
            raise
        self.rewinds += path.startswith(REWOUND)
        return file

    def release_unused(self, file: MemoryFile | None) -> None:
        """Call this after a file has lost a name or a client. If it has neither any more, its memory is freed, or kept
        in `pool`.
        """
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
        """Make space for one more checkpoint: remove the oldest complete checkpoints, and all steps that a rewind has
        set aside.

        Keeps the newest checkpoint and, with several nodes, the one that is complete on all nodes.
        """
        drafts = sum(1 for name in self.contents.names() if name.startswith(SAVING))
        steps = self.steps()
        spared = max(1, self.generations - drafts)
        for name in self.contents.names():
            if (step_of(name) in steps[:-spared] and name != self.whole) or name.startswith(SUPERSEDED):
                self.remove_all(name)

    def rename(self, source: str, target: str) -> None:
        """Rename a file or directory. When an unfinished checkpoint becomes a checkpoint, no client can write into it
        any more.
        """
        self.contents.rename(source, target)
        self.rewinds += target.startswith(SUPERSEDED)
        if step_of(target) is not None:
            for path, file in self.contents.files.items():
                if path.startswith(f"{target}/"):
                    file.end_writing()

    def remove_drafts(self) -> None:
        """Remove unfinished checkpoints, and those whose removal was not finished. Called once no process writes any
        more.
        """
        for name in self.contents.names():
            entry = parse_entry(name)
            if entry is not None and entry.kind in (EntryKind.SAVING, EntryKind.DELETING):
                self.remove_all(name)

    def remove_all(self, name: str) -> None:
        """Remove a directory atomically."""
        for file in self.contents.remove_all(name):
            self.release_unused(file)

    def draft_bytes(self, path: str) -> int:
        """The size of the unfinished checkpoint that contains `path`, without files that other checkpoints share. 0 if
        `path` is in no unfinished checkpoint.
        """
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


class MemoryRuns:
    """All runs in the agent. `available_bytes` is a function that returns the machine's available memory."""

    def __init__(self, available_bytes: Callable[[], int]) -> None:
        self._runs: dict[str, MemoryRun] = {}
        self._available_bytes = available_bytes

    def __iter__(self) -> Iterator[MemoryRun]:
        return iter(tuple(self._runs.values()))

    def of(self, name: str) -> MemoryRun:
        return self._runs.setdefault(name, MemoryRun(name))

    def __contains__(self, run: MemoryRun) -> bool:
        """Whether this object is still in use for its run. After a run was dropped, a new object may have the same
        name.
        """
        return self._runs.get(run.name) is run

    def drop(self, run: MemoryRun) -> None:
        """Remove a run, and free its memory. Files that clients have open are freed later."""
        del self._runs[run.name]

    def available_bytes(self) -> int:
        promised = sum(run.unallocated_bytes for run in self)
        return max(0, self._available_bytes() - promised - AGENT_HEADROOM_BYTES)

    def check_space(self, run: MemoryRun, path: str, size_bytes: int, writer: object, *, is_new: bool = False) -> None:
        """Call this before a file is created or grows. Raises NoSpaceError unless memory has space for
        `run.generations` checkpoints of this size.

        is_new  True: the bytes are added to an existing file, so all of them need new memory
        """
        fresh = size_bytes if is_new else run.new_bytes(size_bytes, writer)
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
            reason = (
                f"{run.generations} checkpoints of {draft} bytes (the option `generations`)" if draft
                else f"{size_bytes} bytes"
            )
            raise NoSpaceError(reason, fresh + more, available)


def _allocated(file: MemoryFile) -> int:
    return os.fstat(file.fd).st_blocks * 512
