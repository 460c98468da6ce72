"""This node's segments for the memory of other nodes, as copies or for parity: in parts, each verified there."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from flowstone.config import PEER_PART_BYTES, PEER_PARTS_UNDER_WAY
from flowstone.errors import CancelledError, FlowstoneError, PeerError, StorageError
from flowstone.format.digest import digest
from flowstone.store.contents import MemoryFile
from flowstone.store.peers.erasure import coefficient
from flowstone.store.peers.memory import view_of
from flowstone.store.peers.node import Link, checked
from flowstone.store.peers.parity import Share, contributions, parity_name, parts
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


def send(
    sendings: Sequence[tuple[Link, Sequence[Sending]]], bytes_per_s: float | None, is_cancelled: Callable[[], bool]
) -> None:
    """Send to several nodes at once. All is there, and verified, when this returns.

    bytes_per_s  that this node sends; None: no limit

    raises  StorageError, FullError, PeerError: the first failure; CancelledError
    """
    if not sendings:
        return
    each = None if bytes_per_s is None else bytes_per_s / len(sendings)
    with ThreadPoolExecutor(len(sendings), thread_name_prefix="flowstone-copy") as executor:
        under_way = [executor.submit(_send, link, what, Pace(each), is_cancelled) for link, what in sendings]
    for one in under_way:
        one.result()


def _send(link: Link, sendings: Sequence[Sending], pace: Pace, is_cancelled: Callable[[], bool]) -> None:
    path = ""
    try:
        for sending in sendings:
            path = sending.asked.path
            number = link.ask(sending.asked, sending.payload).number
            _send_ranges(link, number, sending, pace, is_cancelled)
    except FlowstoneError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot copy {path} to the node at {link.place.shown}", errno=error.errno or errno.EIO,
            reason=error.strerror, next="save again; look into the memory agent's log of that node",
        ) from error
    finally:
        link.close()


def _send_ranges(
    link: Link, number: int, sending: Sending, pace: Pace, is_cancelled: Callable[[], bool]
) -> None:
    under_way = target = 0
    for file, begin, length in sending.ranges:
        mapping = file.mapped(writable=False)
        for offset in range(begin, begin + length, PEER_PART_BYTES):
            part_bytes = min(PEER_PART_BYTES, begin + length - offset)
            if is_cancelled():
                raise CancelledError("the save was cancelled", next="save again")
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
