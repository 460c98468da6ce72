"""The key-value store of a job, and a mailbox on it for messages of any length."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from flowstone.config import MESSAGE_BYTES_MAX

_POLL_FIRST_S, _POLL_LAST_S = 0.001, 0.25
_POLL_SHARE = 8  # a pause between two polls is this fraction (1/8) of the wait so far


class KeyValueStore(Protocol):
    """The methods that agreements use of a torch.distributed store (TCPStore, FileStore, HashStore, PrefixStore).

    A connection serves one call at a time, and a `wait` that times out prints a warning. So no call waits in the store;
    keys are polled at growing intervals.
    """

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class Mailbox:
    """Posts and reads messages in a key-value store. A message that is too long for one value is stored in parts; the
    number of parts is stored last.
    """

    def __init__(self, kv_store: KeyValueStore) -> None:
        self._kv_store = kv_store
        self.sent = self.sent_bytes = 0  # number of values that were posted, and their total length

    def post(self, key: str, message: bytes) -> None:
        """Post a message. Other ranks see all of it or nothing."""
        parts = [message[begin : begin + MESSAGE_BYTES_MAX] for begin in range(0, len(message), MESSAGE_BYTES_MAX)]
        for number, part in enumerate(parts):
            self._set(f"{key}#{number}", part)
        self._set(key, str(len(parts)).encode())

    def is_posted(self, key: str) -> bool:
        return self._kv_store.check([key])

    def read(self, key: str) -> bytes:
        """Read a posted message. The call waits if a key is missing, so no rank may remove the message meanwhile."""
        return b"".join([self._kv_store.get(f"{key}#{number}") for number in range(int(self._kv_store.get(key)))])

    def claim(self, key: str) -> bool:
        """Claim a key, by adding 1 to its counter. Returns whether this is the first claim of any rank."""
        return self._kv_store.add(key, 1) == 1

    def add_to_counter(self, key: str, more: int = 0) -> int:
        """Add `more` to a counter. Returns its new value."""
        return self._kv_store.add(key, more)

    def unclaim(self, key: str) -> None:
        """Delete the key's counter, and with it all claims."""
        self._kv_store.delete_key(key)

    def remove(self, key: str, length: int | None = None) -> None:
        """Remove a message. If only one rank reads a message, that rank removes it.

        length  length of the message in bytes; None if it may not have been posted
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
        tick   called repeatedly with the missing keys and the seconds waited so far; it raises an error to end the wait
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
