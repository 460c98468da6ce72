"""This node's segments for the memory of other nodes, as copies or for parity: in parts, each verified there."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from flowstone.config import PEER_PART_BYTES, PEER_PARTS_UNDER_WAY, POLL_S
from flowstone.errors import CancelledError, FlowstoneError, PeerError, StorageError
from flowstone.format.digest import digest
from flowstone.store.contents import MemoryFile
from flowstone.store.peers.erasure import coefficient
from flowstone.store.peers.memory import view_of
from flowstone.store.peers.node import Link, checked
from flowstone.store.peers.parity import Share, contributions, parity_name, parts
from flowstone.store.peers.wire import Ask


class Limits(msgspec.Struct, frozen=True):
    """What bounds the copies of one save.

    bytes_per_s   that this node sends; None: no limit
    spread_s      over how long they are spread, as long as that is not slower than the network; 0: not at all
    is_expedited  whether a thread waits for them: then they are spread no more
    is_cancelled  whether the save was cancelled
    """

    bytes_per_s: float | None
    spread_s: float
    is_expedited: Callable[[], bool]
    is_cancelled: Callable[[], bool]


class Pace:
    """When parts are sent to one node. One thread at a time.

    share        of the limit that counts for this node
    total_bytes  that it gets
    """

    def __init__(self, limits: Limits, share: float, total_bytes: int) -> None:
        self._limits, self._total_bytes = limits, max(1, total_bytes)
        self._bytes_per_s = None if limits.bytes_per_s is None else limits.bytes_per_s * share
        self._begin = self._due = time.monotonic()
        self._sent_bytes = 0

    def wait(self, length: int) -> None:
        """Until so many bytes may be sent. Raises CancelledError."""
        while True:
            if self._limits.is_cancelled():
                raise CancelledError("the save was cancelled", next="save again")
            pause = self._next() - time.monotonic()
            if pause <= 0:
                break
            time.sleep(min(pause, POLL_S))
        self._sent_bytes += length
        if self._bytes_per_s is not None:
            self._due = max(self._due, time.monotonic()) + length / self._bytes_per_s

    def _next(self) -> float:
        if self._limits.is_expedited():
            return self._due
        return max(self._due, self._begin + self._limits.spread_s * self._sent_bytes / self._total_bytes)


class Sending(msgspec.Struct, frozen=True, eq=False):
    """What one node is sent for one of its files: first what makes that, then ranges of ours, one after the other.

    asked    what makes it; `payload` follows
    verb     what each part of the ranges is for
    ranges   of files: where they begin, and their length
    """

    asked: Ask
    payload: bytes
    verb: Literal["fill", "add"]
    ranges: Sequence[tuple[MemoryFile, int, int]]


def copies_of(files: Sequence[tuple[str, MemoryFile]]) -> list[Sending]:
    """Of whole files, by their paths."""
    return [
        Sending(Ask("create", path, size_bytes=file.size_bytes), b"", "fill", [(file, 0, file.size_bytes)])
        for path, file in files
    ]


def shares_of(
    files: Sequence[tuple[str, MemoryFile]], shares: Sequence[Share], writer: str
) -> dict[int, list[Sending]]:
    """What each node is sent for the parity of files of one directory. `writer`: see parity_name."""
    sendings: dict[int, list[Sending]] = {}
    if not shares or not files:
        return sendings
    directory = files[0][0].rpartition("/")[0]
    by_name = {path.rpartition("/")[2]: file for path, file in files}
    sizes = [(name, file.size_bytes) for name, file in by_name.items()]
    columns, rows = shares[0].columns, len(shares[0].keepers)
    for share, contribution in zip(shares, contributions(sizes, columns, rows), strict=True):
        ranges = [(by_name[part.file], part.offset, part.length) for part in parts(contribution)]
        described = msgspec.msgpack.encode(contribution)
        for row, node in enumerate(share.keepers):
            asked = Ask(
                "gather", f"{directory}/{parity_name(share, writer, row)}", target=str(share.column),
                number=coefficient(columns, rows, row, share.column), size_bytes=contribution.length,
                payload_bytes=len(described),
            )
            if ranges:
                sendings.setdefault(node, []).append(Sending(asked, described, "add", ranges))
    return sendings


def send(sendings: Sequence[tuple[Link, Sequence[Sending]]], limits: Limits) -> None:
    """Send to several nodes at once. All is there, and verified, when this returns.

    raises  StorageError, FullError, PeerError: the first failure; CancelledError
    """
    if not sendings:
        return
    share = 1 / len(sendings)
    with ThreadPoolExecutor(len(sendings), thread_name_prefix="flowstone-copy") as executor:
        under_way = [executor.submit(_send, link, what, limits, share) for link, what in sendings]
    for one in under_way:
        one.result()


def _send(link: Link, sendings: Sequence[Sending], limits: Limits, share: float) -> None:
    path = ""
    pace = Pace(limits, share, sum(length for sending in sendings for _, _, length in sending.ranges))
    try:
        for sending in sendings:
            path = sending.asked.path
            number = link.ask(sending.asked, sending.payload).number
            _send_ranges(link, number, sending, pace)
    except FlowstoneError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot copy {path} to the node at {link.place.shown}", errno=error.errno or errno.EIO,
            reason=error.strerror, next="save again; look into the memory agent's log of that node",
        ) from error
    finally:
        link.close()


def _send_ranges(link: Link, number: int, sending: Sending, pace: Pace) -> None:
    under_way = target = 0
    for file, begin, length in sending.ranges:
        mapping = file.mapped(writable=False)
        for offset in range(begin, begin + length, PEER_PART_BYTES):
            part_bytes = min(PEER_PART_BYTES, begin + length - offset)
            pace.wait(part_bytes)
            assert mapping is not None, "it has bytes"
            said = digest(view_of(mapping.address + offset, part_bytes))
            asked = Ask(sending.verb, text=said, number=number, offset=target, payload_bytes=part_bytes)
            link.send_file(asked, file.fd, offset)
            target += part_bytes
            under_way += 1
            if under_way == PEER_PARTS_UNDER_WAY:
                _confirmed(link, sending)
                under_way -= 1
    for _ in range(under_way):
        _confirmed(link, sending)


def _confirmed(link: Link, sending: Sending) -> None:
    if not checked(link.receive(), link.place).yes:
        raise PeerError(
            f"the node at {link.place.shown} has not confirmed a part of {sending.asked.path}", next="save again"
        )
