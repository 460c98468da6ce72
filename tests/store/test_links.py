"""Links in a store are treated as foreign: no write, lock or removal follows them. Reads may."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from contract import random_bytes, write_rows

from flowstone import _native
from flowstone.config import MIB, EngineOptions
from flowstone.errors import LockedError, StorageError
from flowstone.store.base import FilePlan
from flowstone.store.local import LocalStore
from flowstone.store.lock import LOCK_NAME
from flowstone.store.system import System


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Somebody's directory, elsewhere."""
    (tmp_path / "archive" / "inner").mkdir(parents=True)
    (tmp_path / "archive" / "file").write_bytes(b"precious")
    return tmp_path / "archive"


@pytest.fixture
def store(tmp_path: Path, archive: Path):
    store = LocalStore(tmp_path / "store", EngineOptions(request_bytes=2 * MIB))
    store.make_directory()
    (store.root / "link").symlink_to(archive)
    yield store
    store.close()


def content(place: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(place)): None if path.is_dir() else path.read_bytes() for path in place.rglob("*")}


def _write_segment(store: LocalStore) -> None:
    arena = _native.Arena(budget_bytes=4 * MIB, block_bytes=2 * MIB)
    store.write([FilePlan("link/segment", 4096)], write_rows([0], [0], [random_bytes(10)]), arena)


CHANGES: dict[str, Callable[[LocalStore], None]] = {
    "mkdir": lambda store: store.make_directory("link/new"),
    "put": lambda store: store.put("link/new", b"1"),
    "rename": lambda store: store.rename("link/file", "link/new"),
    "rename into": lambda store: store.rename("own", "link/new"),
    "remove": lambda store: store.remove("link/file"),
    "rmdir": lambda store: store.remove("link/inner"),
    "fsync": lambda store: store.sync_directory("link"),
    "segment": _write_segment,
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_changed_through_a_link(store: LocalStore, archive: Path, change: str) -> None:
    store.put("own", b"1")
    before = content(archive)
    with pytest.raises(StorageError, match="link") as caught:
        CHANGES[change](store)
    assert caught.value.errno == errno.ELOOP
    assert "must not contain symbolic links" in str(caught.value.facts["next"])
    assert content(archive) == before


def test_what_a_link_leads_to_can_be_read(store: LocalStore) -> None:
    assert store.is_link("link")
    assert store.exists("link/file")
    assert store.names("link") == ("file", "inner")
    assert store.size("link/file") == 8
    assert store.read("link/file") == b"precious"


def test_a_store_may_itself_be_reached_through_a_link(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(store.root)
    other = LocalStore(tmp_path / "alias")
    other.make_directory()
    other.lock("by the alias")
    other.check_lock()
    other.make_directory("draft")
    other.put("draft/file", b"1")
    other.sync_directory("draft")
    other.rename("draft", "done")
    other.remove("done/file")
    other.remove("done")
    with pytest.raises(LockedError, match="by the alias"):
        store.lock("by its name")
    other.close()


class Swapping(System):
    """Puts a link in the place of the draft's directory, just before something is created in it."""

    def __init__(self, draft: Path, archive: Path) -> None:
        self._draft, self._archive = draft, archive

    def create(self, path: Path, flags: int, position: int | None = None) -> int:
        if path.parent == self._draft and not self._draft.is_symlink():
            self._draft.rename(self._draft.with_name("moved"))
            self._draft.symlink_to(self._archive)
        return super().create(path, flags, position)


def test_a_link_that_somebody_puts_in_the_way_at_the_last_moment_leads_nowhere(tmp_path: Path, archive: Path) -> None:
    before = content(archive)
    root = tmp_path / "store"
    store = LocalStore(root, system=Swapping(root / "draft", archive))
    store.make_directory()
    store.make_directory("draft")
    store.put("draft/file", b"1")
    assert content(archive) == before
    assert (root / "moved" / "file").read_bytes() == b"1"
    store.close()


# The lock


def test_a_lock_file_that_is_a_link_is_refused_and_what_it_leads_to_is_as_it_was(
    store: LocalStore, archive: Path
) -> None:
    (store.root / LOCK_NAME).symlink_to(archive / "file")
    with pytest.raises(StorageError, match="lock") as caught:
        store.lock("a job")
    assert caught.value.errno == errno.ELOOP
    assert str(caught.value.facts["next"]).startswith(f"remove {LOCK_NAME}")
    assert (archive / "file").read_bytes() == b"precious"


def test_a_lock_file_that_is_a_link_into_nothing_makes_no_file_there(store: LocalStore, archive: Path) -> None:
    (store.root / LOCK_NAME).symlink_to(archive / "new")
    with pytest.raises(StorageError):
        store.lock("a job")
    assert not (archive / "new").exists()


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_a_lock_file_that_is_no_file_is_refused(store: LocalStore, kind: str) -> None:
    os.mkfifo(store.root / LOCK_NAME) if kind == "pipe" else (store.root / LOCK_NAME).mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="lock") as caught:
        store.lock("a job")
    assert str(caught.value.facts["next"]).startswith(f"remove {LOCK_NAME}")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_file_with_another_name_is_replaced_and_the_other_name_keeps_its_content(
    store: LocalStore, archive: Path
) -> None:
    os.link(archive / "file", store.root / LOCK_NAME)
    store.lock("a job")
    store.check_lock()
    assert (archive / "file").read_bytes() == b"precious"
    with pytest.raises(LockedError, match="a job"):
        LocalStore(store.root).lock("another")
    assert store.names() == (LOCK_NAME, "link")


def test_a_copy_of_a_store_made_of_hard_links_has_a_lock_of_its_own(store: LocalStore, tmp_path: Path) -> None:
    store.lock("the original")
    (tmp_path / "copy").mkdir()
    os.link(store.root / LOCK_NAME, tmp_path / "copy" / LOCK_NAME)
    store.check_lock()
    store.unlock()
    copy = LocalStore(tmp_path / "copy")
    copy.lock("the copy")
    store.lock("the original, again")
    store.check_lock()
    copy.check_lock()
    copy.close()
