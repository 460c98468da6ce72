"""Connections to a node's server that have not shown yet that they know the job's secret."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import Condition

from flowstone.config import PEER_STRANGER_S, PEER_STRANGERS_MAX, PEER_STRANGERS_TOLD_MAX
from flowstone.errors import escaped


class Strangers:
    """A limited number of them. When a new one comes and all places are taken, the oldest one from the address with the
    most connections is closed, once it is PEER_STRANGER_S old. So slow or numerous clients cannot keep others out.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell`: writes a line to the log."""
        self._tell = tell
        self._changed = Condition()  # guards what follows
        self._since: dict[socket.socket, tuple[str, float]] = {}  # address and time of admission; the oldest first
        self._lines, self._told_at, self._untold = float(PEER_STRANGERS_TOLD_MAX), time.monotonic(), 0

    def admit(self, connection: socket.socket, address: str) -> None:
        """Admit a connection. Waits for a free place, for PEER_STRANGER_S at most."""
        with self._changed:
            while len(self._since) >= PEER_STRANGERS_MAX:
                oldest, left = self._next_to_leave()
                if left <= 0:
                    self._since.pop(oldest)
                    with suppress(OSError):  # safe: it has ended by itself
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread sees its end
                else:
                    self._changed.wait(left)
            self._since[connection] = address, time.monotonic()

    def _next_to_leave(self) -> tuple[socket.socket, float]:
        """The connection to close next, and the seconds until it may be closed."""
        of = Counter(address for address, _ in self._since.values())
        most = max(of.values())
        connection = next(one for one, (address, _) in self._since.items() if of[address] == most)
        return connection, self._since[connection][1] + PEER_STRANGER_S - time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        """Free the place of a connection that has ended, or has shown that it knows the secret."""
        with self._changed:
            self._since.pop(connection, None)
            self._changed.notify_all()

    def refused(self, address: str, why: str) -> None:
        """Log why a connection was refused, in one line; if there are too many lines, only count it."""
        with self._changed:
            now = time.monotonic()
            self._lines, self._told_at = min(PEER_STRANGERS_TOLD_MAX, self._lines + now - self._told_at), now
            if self._lines < 1:
                self._untold += 1
                return
            more = f"; {self._untold} more connections were refused before it" if self._untold else ""
            self._lines, self._untold = self._lines - 1, 0
        self._tell(f"{address}: {escaped(why)}{more}")
