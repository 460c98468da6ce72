"""The replica's thread `flowstone-replica`: receives the trainer's messages, notices the trainer's death, and
answers status requests.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from flowstone.config import AGENT_MESSAGE_BYTES_MAX, REPLICA_END_S
from flowstone.replica.replica_wire import DurableStepMessage, ReplicaStatus, decode_order, encode
from flowstone.store.memory.local_sockets import peer_credentials

Training: TypeAlias = Literal["lives", "ended", "died"]


class TrainerLink:
    """The link to the trainer, for the replica's main thread.

    status        the replica's status, for status requests and `update_status`
    journal       the journal to which the trainer appends; "": none yet
    training      the trainer "lives", has "ended" by itself, or has "died"
    is_following  with several ranks: whether all replicas have loaded a state, so that they decide together when they
                  end. Until then, a replica ends when its trainer ends
    """

    def __init__(
        self, link: socket.socket, listener: socket.socket, status: ReplicaStatus, leave: Callable[[], None], *,
        ranks: int = 1,
    ) -> None:
        """`leave` ends the process. It is called on this thread once the trainer has ended by itself."""
        self._link, self._listener, self._leave, self._is_alone = link, listener, leave, ranks == 1
        self._news = threading.Condition()
        self.status, self.journal, self.is_following = status, "", False
        self.training: Training = "lives"
        self._trainer = os.pidfd_open(status.trainer)
        self._thread = threading.Thread(target=self._serve, name="flowstone-replica", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def update_status(self, **changes: object) -> None:
        """Change the status. A changed status is sent to the trainer, which does not get it if its socket is full."""
        with self._news:
            if all(getattr(self.status, name) == value for name, value in changes.items()):
                return
            self.status = msgspec.structs.replace(self.status, **changes)
        with contextlib.suppress(OSError):
            self._link.send(encode(self.status), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def note_following(self) -> None:
        """Note that from now on, all replicas decide together when they end."""
        self.is_following = True

    @property
    def is_orphaned(self) -> bool:
        return self.training == "died"

    def await_step(self, newest: int, timeout_s: float) -> None:
        """Wait until the trainer reports a step after `newest`, or has ended or died, but at most `timeout_s`."""
        with self._news:
            self._news.wait_for(lambda: self.training != "lives" or self.status.newest > newest, timeout_s)

    # On the thread

    def _serve(self) -> None:
        waited = {self._listener.fileno(), self._link.fileno(), self._trainer}
        while True:
            ready, _, _ = select.select(waited, [], [])
            if self._trainer in ready:
                waited -= {self._trainer, self._link.fileno()}
                self._note_death()
            elif self._link.fileno() in ready and not self._receive_order():
                waited -= {self._link.fileno()}
                if self.training == "ended":
                    waited -= {self._trainer}
                elif not select.select([self._trainer], [], [], REPLICA_END_S)[0]:
                    self._leave()  # the trainer continues without a replica
            if self._listener.fileno() in ready:
                self._answer()

    def _receive_order(self) -> bool:
        """Read a message of the trainer. Returns False if it was the last one."""
        try:
            data = self._link.recv(AGENT_MESSAGE_BYTES_MAX)
            order = decode_order(data) if data else None
        except (OSError, msgspec.DecodeError):
            return False
        if order is None:
            return False
        if isinstance(order, DurableStepMessage):
            with self._news:
                self.journal = order.journal
                self.status = msgspec.structs.replace(self.status, newest=order.step)
                self._news.notify_all()
            return True
        if self._is_alone or not self.is_following:
            self._leave()
        with self._news:
            self.training, self.journal = "ended", ""
            self._news.notify_all()
        self.update_status(has_ended=True)
        return False

    def _note_death(self) -> None:
        with self._news:
            self.training, self.journal = "died", ""
            self.status = msgspec.structs.replace(self.status, is_orphaned=True)
            self._news.notify_all()
        if not self._is_alone and not self.is_following:
            self._leave()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                if self.training == "lives" and select.select([self._trainer], [], [], 0)[0]:
                    self._note_death()
                if peer_credentials(connection)[1] == os.geteuid():
                    connection.send(encode(self.status), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
