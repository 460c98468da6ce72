"""Extents out of the memory of other nodes: ranges over the network into blocks of the arena, many at once.

A range that a node does not give is asked of the next node that has the file.
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
from flowstone.store.jobs import JobReading
from flowstone.store.peers.memory import view_of
from flowstone.store.peers.node import Link
from flowstone.store.peers.parity import Part, Rebuilt, rebuild
from flowstone.store.peers.tree import PeersTree
from flowstone.store.peers.view import Source, WholeStep
from flowstone.store.peers.wire import Ask


class Located(msgspec.Struct, frozen=True, eq=False):
    """The files of a read.

    location    of the store, for messages
    paths       of the files; the engine numbers them from `first_file` on
    sources     the nodes that have each, by its path
    local       of these, the files that this node has: they are copied
    rebuilt     files that are on no node, with their checkpoints
    """

    location: str
    paths: Sequence[str]
    first_file: int
    sources: Mapping[str, tuple[Source, ...]]
    local: Mapping[str, _native.Mapping | None]
    rebuilt: Mapping[str, tuple[WholeStep, Rebuilt]] = {}


class PeerReading(JobReading):
    """A Reading of one job. Its threads carry out the engine's requests until the job has ended."""

    def __init__(
        self, tree: PeersTree, engine: _native.Engine, job: _native.ReadJob, located: Located, threads: int
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
            thread.join()  # the job has ended, and each looks for that
        return receipt

    def _error(self) -> FlowstoneError | None:
        return self._refusal or super()._error()

    def _run(self) -> None:
        links: dict[int, Link] = {}
        room = memoryview(bytearray(PEER_REBUILD_BYTES if self._rebuilt else 0))
        try:
            while True:
                wakes = self._engine.wakes
                if self._job.wait(0):
                    return
                taken = self._engine.take("read", self._numbers, 1, POLL_S, wakes)
                for number, file, offset, address, length, _ in taken:
                    path = self._paths[file - self._numbers[0]]
                    moved, code = 0, 0
                    try:
                        moved = self._read(links, path, offset, (address, length), room)
                    except FlowstoneError as error:
                        self._refusal, code = self._refusal or error, errno.EIO
                    self._engine.complete(number, moved, code)
                if not threading.main_thread().is_alive():
                    self._job.cancel()  # what is read ahead waits for a load that will not come
        finally:
            for link in links.values():
                link.close()

    def _read(
        self, links: dict[int, Link], path: str, offset: int, where: tuple[int, int], room: memoryview
    ) -> int:
        """Fill memory, given by address and length. How many bytes there are. `room`: to rebuild with.

        raises  FlowstoneError
        """
        if path in self._local:
            mapping, (address, length) = self._local[path], where
            moved = 0 if mapping is None else max(0, min(length, mapping.bytes - offset))
            if mapping is not None and moved:
                ctypes.memmove(address, mapping.address + offset, moved)  # other threads run meanwhile
            return moved
        target = view_of(*where)
        if path not in self._rebuilt:
            return self._fetch(links, path, self._sources[path], offset, target)
        step, rebuilt = self._rebuilt[path]
        directory = path.partition("/")[0]

        def read(part: Part, into: memoryview) -> None:
            there = f"{directory}/{part.file}"
            sources = step.files.get(part.file) or step.parity[part.file]
            if self._fetch(links, there, sources, part.offset, into) != part.length:
                raise StorageError(
                    f"cannot read {self._location}/{there}", errno=errno.EIO, reason="a file that became shorter",
                    next="load again: an older checkpoint, or a farther tier, may be whole",
                )

        return rebuild(rebuilt, offset, target, read, room)

    def _fetch(
        self, links: dict[int, Link], path: str, sources: Sequence[Source], offset: int, target: memoryview
    ) -> int:
        """From the first node that gives it. How many bytes."""
        failure: Exception | None = None
        for source in sources:
            link = links.setdefault(source.node, self._tree.link_of(source.node).link)
            asked = Ask("read", path, number=source.number, offset=offset, size_bytes=len(target))
            try:
                return link.read_into(asked, target)
            except (PeerError, OSError) as error:
                log.warning("cannot read %s from the node at %s: %s", path, link.place.shown, error)
                failure = error
        number = getattr(failure, "errno", None) or errno.ENOENT
        raise StorageError(
            f"cannot read {self._location}/{path}", errno=number, reason=failure,
            next="load again: an older checkpoint, or a farther tier, may be whole",
        ) from failure
