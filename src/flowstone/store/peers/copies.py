"""Copies of this node's segments in the memory of other nodes: sent in parts, several under way, each verified there.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from flowstone.config import PEER_PART_BYTES, PEER_PARTS_UNDER_WAY
from flowstone.errors import CancelledError, FlowstoneError, PeerError, StorageError
from flowstone.format.digest import digest
from flowstone.store.contents import MemoryFile
from flowstone.store.peers.memory import view_of
from flowstone.store.peers.node import Link, checked
from flowstone.store.peers.wire import Ask


class Pace:
    """Bytes per second, over all copies of one save. One thread at a time; None: as fast as the network."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._due = time.monotonic()

    def wait(self, length: int) -> None:
        """Until so many bytes may be sent."""
        if self._bytes_per_s is None:
            return
        pause = self._due - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        self._due = max(self._due, time.monotonic()) + length / self._bytes_per_s


def copy_to(
    links: Sequence[Link], files: Sequence[tuple[str, MemoryFile]], bytes_per_s: float | None,
    is_cancelled: Callable[[], bool],
) -> None:
    """Copy files, by their paths, to each of these nodes. They are there, and verified, when this returns.

    bytes_per_s  that this node sends; None: no limit

    raises  StorageError, FullError, PeerError: the first failure; CancelledError
    """
    if not links or not files:
        return
    each = None if bytes_per_s is None else bytes_per_s / len(links)
    with ThreadPoolExecutor(len(links), thread_name_prefix="flowstone-copy") as executor:
        copies = [executor.submit(_copy, link, files, Pace(each), is_cancelled) for link in links]
    for copy in copies:
        copy.result()


def _copy(
    link: Link, files: Sequence[tuple[str, MemoryFile]], pace: Pace, is_cancelled: Callable[[], bool]
) -> None:
    try:
        for path, file in files:
            number = checked(link.ask(Ask("create", path, size_bytes=file.size_bytes)), link.place).number
            _fill(link, number, file, pace, is_cancelled)
    except FlowstoneError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot copy {path} to the node at {link.place.shown}", errno=error.errno or errno.EIO,
            reason=error.strerror, next="save again; look into the memory agent's log of that node",
        ) from error
    finally:
        link.close()


def _fill(link: Link, number: int, file: MemoryFile, pace: Pace, is_cancelled: Callable[[], bool]) -> None:
    mapping = file.mapped(writable=False)
    under_way = 0
    for begin in range(0, file.size_bytes, PEER_PART_BYTES):
        length = min(PEER_PART_BYTES, file.size_bytes - begin)
        if is_cancelled():
            raise CancelledError("the save was cancelled", next="save again")
        pace.wait(length)
        assert mapping is not None, "it has bytes"
        said = digest(view_of(mapping.address + begin, length))
        link.send_file(Ask("fill", text=said, number=number, offset=begin, payload_bytes=length), file.fd)
        under_way += 1
        if under_way == PEER_PARTS_UNDER_WAY:
            _confirmed(link, file)
            under_way -= 1
    for _ in range(under_way):
        _confirmed(link, file)


def _confirmed(link: Link, file: MemoryFile) -> None:
    if not checked(link.receive(), link.place).yes:
        raise PeerError(f"the node at {link.place.shown} has not confirmed a part of {file.path}", next="save again")
