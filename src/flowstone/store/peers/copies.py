"""Send this node's segments (data files) to the memory of other nodes, as copies or for parity. They are sent in parts,
and the receiver checks the digest of each part.
"""

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
from flowstone.store.memory.contents import MemoryFile
from flowstone.store.peers.erasure import coefficient
from flowstone.store.peers.memory import view_of
from flowstone.store.peers.node import NodeLink, check_answer
from flowstone.store.peers.parity import ParityShare, contributions, parity_name, parts
from flowstone.store.peers.wire import PeerRequest


class Limits(msgspec.Struct, frozen=True):
    """Limits on the speed of one save's copies.

    bytes_per_s   how many bytes per second this node may send; None: no limit
    spread_s      the seconds over which the sending of copies is spread, unless the network needs longer; 0: not spread
    is_expedited  returns whether a thread waits for the copies, which then are sent at full rate
    is_cancelled  returns whether the save was cancelled
    """

    bytes_per_s: float | None
    spread_s: float
    is_expedited: Callable[[], bool]
    is_cancelled: Callable[[], bool]


class SendPace:
    """Decides when the next part is sent to one node. For one thread at a time.

    share        the part of the rate limit, from 0 to 1, that is used for the receiving node
    total_bytes  the number of bytes to send to the node
    """

    def __init__(self, limits: Limits, share: float, total_bytes: int) -> None:
        self._limits, self._total_bytes = limits, max(1, total_bytes)
        self._bytes_per_s = None if limits.bytes_per_s is None else limits.bytes_per_s * share
        self._begin = self._due = time.monotonic()
        self._sent_bytes = 0

    def wait(self, length: int) -> None:
        """Wait until `length` bytes may be sent. Raises CancelledError."""
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


class Transfer(msgspec.Struct, frozen=True, eq=False):
    """The messages that send one file to a node: a request that creates the file there, then ranges of this node's
    files, in order.

    asked    the request that creates the file; the bytes `payload` follow it
    verb     the verb of the requests that send parts of the ranges
    ranges   (file, begin, length) of each range
    """

    asked: PeerRequest
    payload: bytes
    verb: Literal["fill", "add"]
    ranges: Sequence[tuple[MemoryFile, int, int]]


def copies_of(files: Sequence[tuple[str, MemoryFile]]) -> list[Transfer]:
    """The transfers that copy these files completely. `files`: path and file."""
    return [
        Transfer(PeerRequest("create", path, size_bytes=file.size_bytes), b"", "fill", [(file, 0, file.size_bytes)])
        for path, file in files
    ]


def shares_of(
    files: Sequence[tuple[str, MemoryFile]], shares: Sequence[ParityShare], writer: str
) -> dict[int, list[Transfer]]:
    """node -> the transfers to that node, for the parity of one directory's files. `writer`: see parity_name."""
    sendings: dict[int, list[Transfer]] = {}
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
            request = PeerRequest(
                "gather", f"{directory}/{parity_name(share, writer, row)}", target=str(share.column),
                number=coefficient(columns, rows, row, share.column), size_bytes=contribution.length,
                payload_bytes=len(described),
            )
            if ranges:
                sendings.setdefault(node, []).append(Transfer(request, described, "add", ranges))
    return sendings


def send(sendings: Sequence[tuple[NodeLink, Sequence[Transfer]]], limits: Limits) -> None:
    """Send to several nodes concurrently. When this returns, all bytes have arrived, and the receivers have verified
    them.

    raises  StorageError, FullError, PeerError: the first failure; CancelledError
    """
    if not sendings:
        return
    share = 1 / len(sendings)
    with ThreadPoolExecutor(len(sendings), thread_name_prefix="flowstone-copy") as executor:
        futures = [executor.submit(_send, link, transfers, limits, share) for link, transfers in sendings]
    for future in futures:
        future.result()


def _send(link: NodeLink, sendings: Sequence[Transfer], limits: Limits, share: float) -> None:
    path = ""
    pace = SendPace(limits, share, sum(length for sending in sendings for _, _, length in sending.ranges))
    try:
        for sending in sendings:
            path = sending.asked.path
            number = link.request(sending.asked, sending.payload).number
            _send_ranges(link, number, sending, pace)
    except FlowstoneError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot copy {path} to the node at {link.place.shown}", errno=error.errno or errno.EIO,
            reason=error.strerror, next="save again; read the memory agent's log on that node",
        ) from error
    finally:
        link.close()


def _send_ranges(link: NodeLink, number: int, sending: Transfer, pace: SendPace) -> None:
    under_way = target = 0
    for file, begin, length in sending.ranges:
        mapping = file.mapped(writable=False)
        for offset in range(begin, begin + length, PEER_PART_BYTES):
            part_bytes = min(PEER_PART_BYTES, begin + length - offset)
            pace.wait(part_bytes)
            assert mapping is not None, "it has bytes"
            part_digest = digest(view_of(mapping.address + offset, part_bytes))
            request = PeerRequest(
                sending.verb, text=part_digest, number=number, offset=target, payload_bytes=part_bytes
            )
            link.send_file(request, file.fd, offset)
            target += part_bytes
            under_way += 1
            if under_way == PEER_PARTS_UNDER_WAY:
                _receive_confirmation(link, sending)
                under_way -= 1
    for _ in range(under_way):
        _receive_confirmation(link, sending)


def _receive_confirmation(link: NodeLink, sending: Transfer) -> None:
    if not check_answer(link.receive(), link.place).yes:
        raise PeerError(
            f"the node at {link.place.shown} did not confirm that it has received a part of {sending.asked.path}",
            next="save again",
        )
