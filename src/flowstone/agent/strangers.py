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

    def __init__(self, log: Callable[[str], None]) -> None:
        """`log`: writes a line to the log."""
        self._log = log
        self._changed = Condition()  # guards what follows
        self._admitted: dict[socket.socket, tuple[str, float]] = {}  # address and time of admission; the oldest first
        self._lines, self._logged_s, self._unlogged = float(PEER_STRANGERS_TOLD_MAX), time.monotonic(), 0

    def admit(self, connection: socket.socket, address: str) -> None:
        """Admit a connection. Waits for a free place, for PEER_STRANGER_S at most."""
        with self._changed:
            while len(self._admitted) >= PEER_STRANGERS_MAX:
                oldest, left = self._next_to_leave()
                if left <= 0:
                    self._admitted.pop(oldest)
                    with suppress(OSError):  # safe: it has ended by itself
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread sees its end
                else:
                    self._changed.wait(left)
            self._admitted[connection] = address, time.monotonic()

    def _next_to_leave(self) -> tuple[socket.socket, float]:
        """The connection to close next, and the seconds until it may be closed."""
        of = Counter(address for address, _ in self._admitted.values())
        most = max(of.values())
        connection = next(one for one, (address, _) in self._admitted.items() if of[address] == most)
        return connection, self._admitted[connection][1] + PEER_STRANGER_S - time.monotonic()

    def release(self, connection: socket.socket) -> None:
        """Free the place of a connection that has ended, or has shown that it knows the secret."""
        with self._changed:
            self._admitted.pop(connection, None)
            self._changed.notify_all()

    def log_refusal(self, address: str, why: str) -> None:
        """Log why a connection was refused, in one line; if there are too many lines, only count it."""
        with self._changed:
            now = time.monotonic()
            self._lines, self._logged_s = min(PEER_STRANGERS_TOLD_MAX, self._lines + now - self._logged_s), now
            if self._lines < 1:
                self._unlogged += 1
                return
            more = f"; {self._unlogged} more connections were refused before it" if self._unlogged else ""
            self._lines, self._unlogged = self._lines - 1, 0
        self._log(f"{address}: {escaped(why)}{more}")
