"""Connections to a node's server whose clients have not proven yet that they know the job's secret."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import Condition

from flowstone.config import PEER_STRANGER_S, PEER_STRANGERS_LOGGED_MAX, PEER_STRANGERS_MAX
from flowstone.errors import escaped


class UnprovenConnections:
    """Limits unproven connections to PEER_STRANGERS_MAX. If another one arrives, one of them is closed: the oldest from
    the address that has the most, as soon as it is PEER_STRANGER_S old. Thus, slow or numerous clients cannot keep
    others out.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        """`log` writes a line to the log."""
        self._log = log
        self._changed = Condition()  # guards the attributes below
        # connection -> its address and the time of its admission; the oldest first
        self._admitted: dict[socket.socket, tuple[str, float]] = {}
        self._lines, self._logged_s, self._unlogged = float(PEER_STRANGERS_LOGGED_MAX), time.monotonic(), 0

    def admit(self, connection: socket.socket, address: str) -> None:
        """Admit a connection. If there are too many, waits at most PEER_STRANGER_S until one ends."""
        with self._changed:
            while len(self._admitted) >= PEER_STRANGERS_MAX:
                oldest, left = self._next_to_leave()
                if left <= 0:
                    self._admitted.pop(oldest)
                    with suppress(OSError):  # the connection has ended by itself
                        oldest.shutdown(socket.SHUT_RDWR)  # the thread of that connection notices this
                else:
                    self._changed.wait(left)
            self._admitted[connection] = address, time.monotonic()

    def _next_to_leave(self) -> tuple[socket.socket, float]:
        """The connection that is closed next, and the seconds until it may be closed."""
        counts = Counter(address for address, _ in self._admitted.values())
        most = max(counts.values())
        connection = next(candidate for candidate, (address, _) in self._admitted.items() if counts[address] == most)
        return connection, self._admitted[connection][1] + PEER_STRANGER_S - time.monotonic()

    def release(self, connection: socket.socket) -> None:
        """Stop counting a connection that has ended, or whose client has proven that it knows the secret."""
        with self._changed:
            self._admitted.pop(connection, None)
            self._changed.notify_all()

    def log_refusal(self, address: str, reason: str) -> None:
        """Log, in one line, why a connection was refused. After many lines, refusals are only counted."""
        with self._changed:
            now = time.monotonic()
            self._lines, self._logged_s = min(PEER_STRANGERS_LOGGED_MAX, self._lines + now - self._logged_s), now
            if self._lines < 1:
                self._unlogged += 1
                return
            more = f"; {self._unlogged} more connections were refused before this one" if self._unlogged else ""
            self._lines, self._unlogged = self._lines - 1, 0
        self._log(f"{address}: {escaped(reason)}{more}")
