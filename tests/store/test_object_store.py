"""A store in a bucket: the contract of every store, on a real S3 server and on obstore's store in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract import StoreContract
from obstore.store import MemoryStore

from flowstone.store.objects.store import ObjectStore
from object_server import BUCKET, Server


class TestObjectStoreInMemory(StoreContract):
    @pytest.fixture(autouse=True)
    def _several(self) -> None:
        self.buckets: dict[Path, MemoryStore] = {}

    def open_store(self, root: Path) -> ObjectStore:
        return ObjectStore(self.buckets.setdefault(root, MemoryStore()), location=str(root))


class TestObjectStoreOnS3(StoreContract):
    @pytest.fixture(autouse=True)
    def _one_server(self, server: Server) -> None:
        pass

    def open_store(self, root: Path) -> ObjectStore:
        return ObjectStore(f"s3://{BUCKET}{root}", location=str(root))
