"""The key-value store of a job, and a mailbox on it for messages of any length."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from flowstone.config import MESSAGE_BYTES_MAX

_POLL_FIRST_S, _POLL_LAST_S = 0.001, 0.25
_POLL_SHARE = 8  # share of the wait so far: a poll is late by at most that, and thousands of ranks cost little


class KeyValueStore(Protocol):
    """The calls that are used of a torch.distributed store (TCPStore, FileStore, HashStore, PrefixStore of one).

    One connection serves one call at a time, and a `wait` that times out prints a warning. So no call waits in the
    store: keys are polled, at growing intervals.
    """

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class Mailbox:
    """Messages in a key-value store. A message longer than one value may be is stored in parts, their count last."""

    def __init__(self, kv_store: KeyValueStore) -> None:
        self._kv_store = kv_store
        self.sent = self.sent_bytes = 0  # number of values, and their bytes

    def post(self, key: str, message: bytes) -> None:
        """Post a message. Other ranks see all of it or nothing."""
        parts = [message[at : at + MESSAGE_BYTES_MAX] for at in range(0, len(message), MESSAGE_BYTES_MAX)]
        for number, part in enumerate(parts):
            self._set(f"{key}#{number}", part)
        self._set(key, str(len(parts)).encode())

    def is_posted(self, key: str) -> bool:
        return self._kv_store.check([key])

    def read(self, key: str) -> bytes:
        """A posted message. No rank may remove it meanwhile: the store would wait for the missing key."""
        return b"".join([self._kv_store.get(f"{key}#{number}") for number in range(int(self._kv_store.get(key)))])

    def claim(self, key: str) -> bool:
        """Claim a key. Returns whether this is the first claim, by any rank."""
        return self._kv_store.add(key, 1) == 1

    def count(self, key: str, more: int = 0) -> int:
        """Add `more` to a counter; returns its value."""
        return self._kv_store.add(key, more)

    def unclaim(self, key: str) -> None:
        """Delete all claims of the key."""
        self._kv_store.delete_key(key)

    def remove(self, key: str, length: int | None = None) -> None:
        """Remove a message. If only one rank reads a message, that rank removes it.

        length  of the message, if it is known to be posted
        """
        if length is None and not self.is_posted(key):
            return
        count = int(self._kv_store.get(key)) if length is None else -(-length // MESSAGE_BYTES_MAX)
        self._kv_store.delete_key(key)
        for number in range(count):
            self._kv_store.delete_key(f"{key}#{number}")

    def await_posted(self, keys: list[str], *, tick: Callable[[list[str], float], None], since: float) -> None:
        """Wait until all `keys` are posted.

        since  start of the wait, in seconds of the monotonic clock
        tick   called repeatedly with the missing keys and the seconds waited so far; it raises when that is too long
        """
        began = time.monotonic()
        missing = list(keys)
        while missing := [key for key in missing if not self.is_posted(key)]:
            now = time.monotonic()
            tick(missing, now - since)
            time.sleep(min(max(_POLL_FIRST_S, (now - began) / _POLL_SHARE), _POLL_LAST_S))

    def _set(self, key: str, value: bytes) -> None:
        self._kv_store.set(key, value)
        self.sent += 1
        self.sent_bytes += len(value)
