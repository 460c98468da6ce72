"""The writer's lock: a job that has lost it gets an error before any operation of the only writer."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowstone.errors import LockedError, StorageError
from flowstone.store.local import LocalStore
from flowstone.store.lock import LOCK_NAME


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "store")
    store.make_directory()
    store.lock("this job")
    yield store
    store.close()


def _removed(store: LocalStore) -> None:
    (store.root / LOCK_NAME).unlink()


def _replaced(store: LocalStore) -> None:
    (store.root / "new").write_text("somebody\n")
    (store.root / "new").rename(store.root / LOCK_NAME)


def _taken(store: LocalStore) -> None:
    """As after a lease that has run out: the descriptor is there, the lock is another's."""
    fcntl.flock(store._lock._fd, fcntl.LOCK_UN)
    other = LocalStore(store.root)
    other.lock("another job")
    os.set_inheritable(other._lock._fd, False)
    store.other = other  # type: ignore[attr-defined]  (which keeps the lock)


def _taken_and_given_back(store: LocalStore) -> None:
    _taken(store)
    store.other.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("happens", "actual"),
    [(_removed, "was removed"), (_replaced, "was removed or replaced"), (_taken, "another job has it"),
     (_taken_and_given_back, "another job has taken the lock since")],
)
def test_a_lock_that_was_lost_is_told(store: LocalStore, happens: Callable[[LocalStore], None], actual: str) -> None:
    store.check_lock()
    happens(store)
    with pytest.raises(LockedError, match="has lost the lock") as caught:
        store.check_lock()
    assert actual in str(caught.value.facts["found"])


def test_a_lock_that_was_lost_can_be_taken_again_once_it_was_given_back(store: LocalStore) -> None:
    _removed(store)
    with pytest.raises(LockedError):
        store.check_lock()
    store.unlock()
    store.lock("this job")
    store.check_lock()


def test_a_lock_that_nobody_took_is_not_held(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(LockedError, match="not held"):
        store.check_lock()


def test_a_lock_file_that_is_removed_while_it_is_being_locked_is_not_enough(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening it and locking it another job may go, and take its file along."""
    store.unlock()
    real, left = fcntl.flock, [3]

    def flock(fd: int, operation: int) -> None:
        if left[0]:
            left[0] -= 1
            (store.root / LOCK_NAME).unlink()
        real(fd, operation)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", flock)
    store.lock("this job")
    assert left == [0]
    store.check_lock()
    assert len(os.listdir("/proc/self/fd")) == before + 1


def test_a_lock_that_cannot_be_looked_at_is_no_lost_lock(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(StorageError, match="look for the lock"):
        store.check_lock()
