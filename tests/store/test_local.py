"""LocalStore obeys the contract with each backend, bypassing the page cache and through it; and its own behaviour."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from contract import StoreContract, random_bytes, write_rows

from flowstone import _native
from flowstone.config import KIB, MIB, EngineOptions
from flowstone.errors import FullError, StorageError
from flowstone.store.base import FilePlan
from flowstone.store.local import LocalStore
from flowstone.store.system import System


def options(backend: str, direct: str, path: Path) -> EngineOptions:
    if backend == "io_uring" and not _native.has_io_uring():
        pytest.skip("this kernel or container refuses io_uring")
    if direct == "on" and not _native.probe_direct(str(path)):
        pytest.skip(f"the file system at {path} refuses O_DIRECT")
    return EngineOptions(backend=backend, direct=direct, queue_depth=4, request_bytes=2 * MIB)


@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize("backend", ["io_uring", "posix"])
class TestLocalStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _engine(self, backend: str, direct: str, tmp_path: Path) -> None:
        self.options = options(backend, direct, tmp_path)

    def open_store(self, root: Path) -> LocalStore:
        return LocalStore(root, self.options)

    def test_receipt_says_which_path_ran(
        self, store: LocalStore, arena: _native.Arena, backend: str, direct: str
    ) -> None:
        _, _, receipt = self._written(store, arena)
        assert receipt.io.backend == backend
        assert receipt.io.alignment == (4096 if direct == "on" else 1)


@pytest.fixture
def store(tmp_path: Path):
    store = LocalStore(tmp_path / "store", EngineOptions(request_bytes=2 * MIB))
    store.make_directory()
    yield store
    store.close()


class Beside(System):
    """Another rank makes the same directories, a moment before each of ours."""

    def make_directory(self, path: Path, position: int | None = None) -> None:
        super().make_directory(path, position)
        super().make_directory(path, position)


def test_a_root_that_several_ranks_make_at_once_is_there_for_all(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "gpt"
    store = LocalStore(root, EngineOptions(), Beside())
    store.make_directory()
    assert root.is_dir()
    with pytest.raises(StorageError) as caught:
        store.make_directory("step")
    assert caught.value.errno == errno.EEXIST, "of a draft, only one has made it"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        LocalStore(tmp_path / "file" / "gpt", EngineOptions()).make_directory()


@pytest.mark.parametrize("verb", ["read", "size"])
def test_link_is_not_followed(store: LocalStore, tmp_path: Path, verb: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (store.root / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(StorageError) as caught:
        getattr(store, verb)("link")
    assert caught.value.errno == errno.ELOOP


def test_link_is_removed_and_not_what_it_leads_to(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (store.root / "link").symlink_to(tmp_path / "elsewhere")
    store.remove("link")
    assert store.names() == ()
    assert (tmp_path / "elsewhere").exists()


def test_direct_on_where_it_is_refused_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path, EngineOptions(direct="on", request_bytes=2 * MIB))
    monkeypatch.setattr("flowstone.store.engines._native.probe_direct", lambda directory: 0)
    with pytest.raises(StorageError, match="O_DIRECT"):
        store.write([FilePlan("segment", 4096)], write_rows([0], [0], [random_bytes(10)]), _arena())


def test_lock_does_not_outlive_a_fork(store: LocalStore) -> None:
    """A forked child, as a data loader's worker is, must not keep the store locked when its parent is gone."""
    store.lock("parent")
    ready, waiting = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"1")
        os.read(waiting[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        store.unlock()
        other = LocalStore(store.root)
        other.lock("other")
        other.close()
    finally:
        os.write(waiting[1], b"1")
        os.waitpid(child, 0)
        for fd in (*ready, *waiting):
            os.close(fd)


class Full(System):
    """A disk on which nothing can be reserved any more."""

    def reserve(self, fd: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_says_what_is_needed_and_what_is_free(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, EngineOptions(request_bytes=2 * MIB), Full())
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FullError, match=f"{64 * KIB} bytes") as caught:
        store.write([FilePlan("segment", 64 * KIB)], write_rows([0], [0], [random_bytes(10)]), _arena())
    assert caught.value.errno == errno.ENOSPC
    assert "free" in caught.value.facts
    assert len(os.listdir("/proc/self/fd")) == open_before
    store.close()


class Failing(System):
    """A disk that takes bytes and then cannot make them durable."""

    def sync(self, fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_failed_fsync_is_a_receipt_with_its_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, EngineOptions(request_bytes=2 * MIB), Failing())
    writing = store.write([FilePlan("segment", 64 * KIB)], write_rows([0], [0], [random_bytes(10)]), _arena())
    receipt = writing.receipt()
    assert isinstance(receipt.error, StorageError)
    assert receipt.error.errno == errno.EIO
    assert "segment" in str(receipt.error)
    assert receipt.digests.size == 0
    store.close()


def _arena() -> _native.Arena:
    return _native.Arena(budget_bytes=4 * MIB, block_bytes=2 * MIB)


class Watched(System):
    """Notes before each change of a name whether `name` is there."""

    def __init__(self, name: Path) -> None:
        self.name, self.seen = name, list[bool]()

    def rename(self, *names: Any) -> None:
        self.seen.append(self.name.is_dir())
        super().rename(*names)


def test_a_name_that_is_kept_is_never_free(tmp_path: Path) -> None:
    """Otherwise ModelCheckpoint would give it to the next checkpoint too, which then replaces this one."""
    system = Watched(tmp_path / "x-7")
    for name in ("draft", "x-7"):
        (tmp_path / name).mkdir()
    (tmp_path / "draft" / "manifest.json").touch()
    assert LocalStore(tmp_path, system=system).replace("draft", "x-7", "aside") is None
    assert system.seen == [True]
    assert os.listdir(tmp_path / "x-7") == ["manifest.json"]
