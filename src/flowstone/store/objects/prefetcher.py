"""Reads the beginnings of objects in advance, which saves a round trip when they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from flowstone.store.base import Store
from flowstone.store.objects.client import Client
from flowstone.store.wrap.wrapper import Wrapper


class PrefetchedObject:
    """The first `length` bytes of an object, and the object's size. A separate thread reads them. Can be used on any
    thread.
    """

    def __init__(self, client: Client, path: str, length: int) -> None:
        self._client, self._path, self._length = client, path, length
        self._data = b""
        self._size: int | None = None
        self._thread = threading.Thread(target=self._run, name="flowstone-ahead")
        self._thread.start()

    def _run(self) -> None:
        try:
            result = self._client.once.get(self._path, options={"range": (0, self._length)})
            self._data, self._size = bytes(result.bytes()), result.meta["size"]
        except Exception:  # the caller reads the bytes itself then, and that call reports the error
            return

    def size(self) -> int | None:
        """The size of the object in bytes; None if it is not known. Waits for the read."""
        self._thread.join()
        return self._size

    def read(self, offset: int, length: int) -> bytes | None:
        """A range of the object's bytes, which is shorter if the object ends. None if some of these bytes were not
        prefetched. Waits for the read.
        """
        size = self.size()
        if size is None or min(offset + length, size) > len(self._data):
            return None
        return self._data[offset : offset + length]


class ObjectPrefetcher(Wrapper):
    """A store.prefetching.Prefetcher for objects. `on_seen` is called with the path of each object that was found."""

    def __init__(self, inner: Store, client: Client, on_seen: Callable[[str], None]) -> None:
        super().__init__(inner)
        self._client, self._on_seen = client, on_seen
        self._beginnings: dict[str, PrefetchedObject] = {}

    def prefetch(self, lengths: Mapping[str, int]) -> None:
        for path, length in lengths.items():
            if path in self._beginnings:
                continue
            try:
                self._beginnings[path] = PrefetchedObject(self._client, path, length)
            except RuntimeError:
                return  # without a thread, the object is read when the caller needs it

    def size(self, path: str) -> int:
        beginning = self._beginnings.get(path)
        size = None if beginning is None else beginning.size()
        if size is None:
            return super().size(path)
        self._on_seen(path)
        return size

    def read(
        self, path: str, *, offset: int = 0, length: int | None = None, bytes_max: int | None = None
    ) -> bytes:
        beginning = self._beginnings.get(path)
        data = None if beginning is None or not length else beginning.read(offset, length)
        if data is None:
            return super().read(path, offset=offset, length=length, bytes_max=bytes_max)
        return data

    def close(self) -> None:
        """Wait for running reads. The underlying store stays open."""
        for beginning in self._beginnings.values():
            beginning.size()
