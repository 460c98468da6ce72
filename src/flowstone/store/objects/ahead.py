"""Small reads that are made before anybody asks for them: a round trip is saved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from flowstone.store.base import Store
from flowstone.store.objects.client import Client
from flowstone.store.wrap import Wrapper


class Beginning:
    """The first bytes of an object, and its size, as they are read by a thread. Any thread.

    length  how many are asked for
    size    of the whole object; None: it is not known
    """

    def __init__(self, client: Client, path: str, length: int) -> None:
        self._client, self._path, self._length = client, path, length
        self._found = b""
        self._size: int | None = None
        self._thread = threading.Thread(target=self._run, name="flowstone-ahead")
        self._thread.start()

    def _run(self) -> None:
        try:
            found = self._client.once.get(self._path, options={"range": (0, self._length)})
            self._found, self._size = bytes(found.bytes()), found.meta["size"]
        except Exception:  # safe: the bytes are asked for again when they are wanted, and that call tells what is wrong
            return

    def size(self) -> int | None:
        self._thread.join()
        return self._size

    def read(self, offset: int, length: int) -> bytes | None:
        """Bytes of the object, fewer where it ends; None: not all of them were asked for, or have come. Blocks."""
        size = self.size()
        if size is None or min(offset + length, size) > len(self._found):
            return None
        return self._found[offset : offset + length]


class AheadStore(Wrapper):
    """See store.asks_ahead.Ahead. `on_seen` is told of objects that are there."""

    def __init__(self, inner: Store, client: Client, on_seen: Callable[[str], None]) -> None:
        super().__init__(inner)
        self._client, self._on_seen = client, on_seen
        self._beginnings: dict[str, Beginning] = {}

    def ask(self, lengths: Mapping[str, int]) -> None:
        for path, length in lengths.items():
            if path in self._beginnings:
                continue
            try:
                self._beginnings[path] = Beginning(self._client, path, length)
            except RuntimeError:
                return  # safe: there is no thread for it, so it is read when it is asked for

    def size(self, path: str) -> int:
        beginning = self._beginnings.get(path)
        found = None if beginning is None else beginning.size()
        if found is None:
            return super().size(path)
        self._on_seen(path)
        return found

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        beginning = self._beginnings.get(path)
        found = None if beginning is None or not length else beginning.read(offset, length)
        if found is None:
            return super().read(path, offset=offset, length=length, bytes_max=bytes_max)
        return found

    def close(self) -> None:
        """Wait for what is on its way. The store stays open."""
        for beginning in self._beginnings.values():
            beginning.size()
