"""The replica's thread `flowstone-replica`: training's messages and its death; and who asks how the replica is."""

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
from flowstone.store.local_sockets import peer
from flowstone.store.replica_wire import Noted, ReplicaStatus, decode_order, encode

Training: TypeAlias = Literal["lives", "ended", "died"]


class TrainerLink:
    """What the replica's main thread knows of its training.

    status        is told to whom asks, and by `tell`
    journal       to which training appends; "": none yet
    training      how it is, of several ranks this one's: "ended" in order, or "died" without a word
    is_following  of several ranks: they have a state, and what comes of it is for all of them to say. Before that, a
                  replica ends with its rank of the training
    """

    def __init__(
        self, link: socket.socket, listener: socket.socket, status: ReplicaStatus, leave: Callable[[], None], *,
        ranks: int = 1,
    ) -> None:
        """`leave`: called on the thread once training has ended in order; ends the process."""
        self._link, self._listener, self._leave, self._is_alone = link, listener, leave, ranks == 1
        self._news = threading.Condition()
        self.status, self.journal, self.is_following = status, "", False
        self.training: Training = "lives"
        self._trainer = os.pidfd_open(status.trainer)
        self._thread = threading.Thread(target=self._serve, name="flowstone-replica", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, **changes: object) -> None:
        """Note how the replica is, and tell training, if that is new to it; it may be too busy to hear it."""
        with self._news:
            if all(getattr(self.status, name) == value for name, value in changes.items()):
                return
            self.status = msgspec.structs.replace(self.status, **changes)
        with contextlib.suppress(OSError):
            self._link.send(encode(self.status), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    @property
    def is_orphaned(self) -> bool:
        return self.training == "died"

    def await_news(self, newest: int, timeout_s: float) -> None:
        """Wait until training tells of a step beyond `newest`, or has died; or for so long. Not if it has ended."""
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
            elif self._link.fileno() in ready and not self._take_order():
                waited -= {self._link.fileno()}
                if self.training == "ended":
                    waited -= {self._trainer}
                elif not select.select([self._trainer], [], [], REPLICA_END_S)[0]:
                    self._leave()  # training lives, and wants no replica
            if self._listener.fileno() in ready:
                self._answer()

    def _take_order(self) -> bool:
        """A message of training; False if there will be none."""
        try:
            data = self._link.recv(AGENT_MESSAGE_BYTES_MAX)
            order = decode_order(data) if data else None
        except (OSError, msgspec.DecodeError):
            return False
        if order is None:
            return False
        if isinstance(order, Noted):
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
        self.tell(has_ended=True)
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
                if peer(connection)[1] == os.geteuid():
                    connection.send(encode(self.status), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
