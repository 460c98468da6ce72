"""Read ranges of files from the memory of other nodes, by concurrent requests into blocks of the arena (staging
memory).

If a node does not deliver a range, the next node that has the file is tried.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from flowstone import _native
from flowstone.config import PEER_READS_MAX, PEER_REBUILD_BYTES, POLL_S
from flowstone.errors import FlowstoneError, PeerError, StorageError
from flowstone.log import log
from flowstone.store.base import ReadReceipt
from flowstone.store.jobs import JobReadHandle
from flowstone.store.peers.memory import view_of
from flowstone.store.peers.node import NodeLink
from flowstone.store.peers.parity import FileRange, RebuildPlan, rebuild
from flowstone.store.peers.tree import PeersTree
from flowstone.store.peers.view import CompleteStep, FileSource
from flowstone.store.peers.wire import PeerRequest


class ReadSources(msgspec.Struct, frozen=True, eq=False):
    """The files of a read.

    location    the store's location, for messages
    paths       the files' paths; the engine numbers them from `first_file` on
    sources     for each path, the nodes that have the file
    local       files that this node has, which are copied from its memory
    rebuilt     for each path of a file that no node has: its checkpoint, and how to compute the file from parity
    """

    location: str
    paths: Sequence[str]
    first_file: int
    sources: Mapping[str, tuple[FileSource, ...]]
    local: Mapping[str, _native.Mapping | None]
    rebuilt: Mapping[str, tuple[CompleteStep, RebuildPlan]] = {}


class PeerReadHandle(JobReadHandle):
    """A ReadHandle of one job. Its threads carry out the engine's requests until the job has ended."""

    def __init__(
        self, tree: PeersTree, engine: _native.Engine, job: _native.ReadJob, located: ReadSources, threads: int
    ) -> None:
        super().__init__(Path(located.location), job, located)
        self._tree, self._location, self._engine, self._paths = tree, located.location, engine, located.paths
        self._sources, self._local, self._rebuilt = located.sources, located.local, located.rebuilt
        self._numbers = located.first_file, located.first_file + len(located.paths)
        self._refusal: FlowstoneError | None = None
        self._threads = [
            threading.Thread(target=self._run, name="flowstone-fetch") for _ in range(min(threads, PEER_READS_MAX))
        ]
        for thread in self._threads:
            thread.start()

    def receipt(self) -> ReadReceipt:
        receipt = super().receipt()
        for thread in self._threads:
            thread.join()  # this thread ends after the job
        return receipt

    def _error(self) -> FlowstoneError | None:
        return self._refusal or super()._error()

    def _run(self) -> None:
        links: dict[int, NodeLink] = {}
        buffer = memoryview(bytearray(PEER_REBUILD_BYTES if self._rebuilt else 0))
        try:
            while True:
                wakes = self._engine.wakes
                if self._job.wait(0):
                    return
                requests = self._engine.take("read", self._numbers, 1, POLL_S, wakes)
                for number, file, offset, address, length, _ in requests:
                    path = self._paths[file - self._numbers[0]]
                    moved, code = 0, 0
                    try:
                        moved = self._read(links, path, offset, (address, length), buffer)
                    except FlowstoneError as error:
                        self._refusal, code = self._refusal or error, errno.EIO
                    self._engine.complete(number, moved, code)
                if not threading.main_thread().is_alive():
                    self._job.cancel()  # a job that reads ahead would wait for a load that never begins
        finally:
            for link in links.values():
                link.close()

    def _read(
        self, links: dict[int, NodeLink], path: str, offset: int, memory: tuple[int, int], buffer: memoryview
    ) -> int:
        """Read from the file at `path` into `memory` (address and length). Returns the number of bytes read. `buffer`:
        memory for computing lost files.

        raises  FlowstoneError
        """
        if path in self._local:
            mapping, (address, length) = self._local[path], memory
            moved = 0 if mapping is None else max(0, min(length, mapping.bytes - offset))
            if mapping is not None and moved:
                ctypes.memmove(address, mapping.address + offset, moved)  # other threads of Python run during this copy
            return moved
        target = view_of(*memory)
        if path not in self._rebuilt:
            return self._fetch(links, path, self._sources[path], offset, target)
        step, rebuilt = self._rebuilt[path]
        directory = path.partition("/")[0]

        def read(part: FileRange, output: memoryview) -> None:
            full_path = f"{directory}/{part.file}"
            sources = step.files.get(part.file) or step.parity[part.file]
            if self._fetch(links, full_path, sources, part.offset, output) != part.length:
                raise StorageError(
                    f"cannot read {self._location}/{full_path}", errno=errno.EIO, reason="the file became shorter",
                    next="load again: an older checkpoint, or another tier, may be complete",
                )

        return rebuild(rebuilt, offset, target, read, buffer)

    def _fetch(
        self, links: dict[int, NodeLink], path: str, sources: Sequence[FileSource], offset: int, target: memoryview
    ) -> int:
        """Read from the first node of `sources` that delivers the bytes. Returns the number of bytes read."""
        failure: Exception | None = None
        for source in sources:
            link = links.setdefault(source.node, self._tree.link_of(source.node).link)
            request = PeerRequest("read", path, number=source.number, offset=offset, size_bytes=len(target))
            try:
                return link.read_into(request, target)
            except (PeerError, OSError) as error:
                log.warning("cannot read %s from the node at %s: %s", path, link.place.shown, error)
                failure = error
        number = getattr(failure, "errno", None) or errno.ENOENT
        raise StorageError(
            f"cannot read {self._location}/{path}", errno=number, reason=failure,
            next="load again: an older checkpoint, or another tier, may be complete",
        ) from failure
