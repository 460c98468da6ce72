"""A store over several paths: the contract of every store, with its segments on the first path and on another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract import SEGMENT, StoreContract

from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.objects.store import ObjectStore
from flowstone.store.striped.store import StripedStore
from object_server import BUCKET, Server

_DRAFT = ".saving-00000001-0123"


class _OnOtherPath(StoreContract):
    draft = _DRAFT
    segment = f"{_DRAFT}/rank-00000.0001-path1.safetensors"

    def other(self, root: Path) -> Store:
        raise NotImplementedError

    def open_store(self, root: Path) -> StripedStore:
        return StripedStore([LocalStore(root), self.other(root)])


class TestOnTheFirstOfTwoDirectories(StoreContract):
    def open_store(self, root: Path) -> StripedStore:
        return StripedStore([LocalStore(root), LocalStore(root.with_name("other"))])


class TestOnTheOtherOfTwoDirectories(_OnOtherPath):
    def other(self, root: Path) -> Store:
        return LocalStore(root.with_name("other"))

    def test_its_segments_are_there(self, store: Store, root: Path) -> None:
        store.make_directory(self.draft)
        store.put(self.segment, b"content")
        assert (root.with_name("other") / f"segments-{_DRAFT[8:]}" / SEGMENT.rpartition("/")[2].replace(
            ".safetensors", ".0001-path1.safetensors"
        )).read_bytes() == b"content"
        assert store.names(self.draft) == (self.segment.rpartition("/")[2],)
        assert not list((root / self.draft).iterdir())


class TestInABucketBesideADirectory(_OnOtherPath):
    @pytest.fixture(autouse=True)
    def _one_server(self, server: Server) -> None:
        pass

    def other(self, root: Path) -> Store:
        return ObjectStore(f"s3://{BUCKET}{root}-striped")
