"""Stores in file systems of fsspec: the contract of every store, on a disk and in memory; and refusals."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from contract import StoreContract
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import flowstone as fs
from flowstone.errors import ArgumentError, FrameworkError, LockedError, StorageError
from flowstone.store.objects.client import RetryPolicy
from flowstone.store.objects.file_system import FileSystemBucket
from flowstone.store.objects.store import ObjectStore

BRIEF = RetryPolicy(budget_s=0.3, request_s=5, first_delay_s=0.01, delay_s_max=0.05)


class TestOnLocalDisk(StoreContract):
    def open_store(self, root: Path) -> ObjectStore:
        return ObjectStore(f"fsspec+file://{root}", location=str(root))


class TestInMemory(StoreContract):
    @pytest.fixture(autouse=True)
    def _of_its_own(self) -> None:
        self.memory = new_memory()

    def open_store(self, root: Path) -> ObjectStore:
        return ObjectStore(FileSystemBucket(self.memory, str(root)), location=str(root))


class TestInADirectoryOfAnother(TestInMemory):
    """A file system around another one, which says of neither what it is."""

    def open_store(self, root: Path) -> ObjectStore:
        bucket = FileSystemBucket(DirFileSystem("/below", self.memory), str(root).lstrip("/"))
        return ObjectStore(bucket, location=str(root))


def new_memory() -> MemoryFileSystem:
    return MemoryFileSystem(global_store=False, skip_instance_cache=True)


def state(step: int) -> dict[str, Any]:
    return {"x": np.full(3_000_000, step, np.float64), "step": step}  # 24 MB: three parts


@pytest.fixture(params=["url", "handed over", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    """What a Checkpointer takes."""
    if request.param == "url":
        return f"fsspec+file://{tmp_path}/run"
    if request.param == "handed over":
        return fs.Fsspec(fsspec.filesystem("file"), f"{tmp_path}/run")
    return fs.Fsspec(new_memory(), "run")


def test_what_loads_is_what_was_saved_and_retention_leaves_nothing(store: Any) -> None:
    with fs.Checkpointer(store, keep=2) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).committed.result(60)
        ckpt.rewind(2)
        ckpt.save(4, state(4)).committed.result(60)
        into = state(0)
        assert ckpt.load(into).step == 4
        assert (into["x"] == 4).all()
    opened = store if isinstance(store, str) else fs.Fsspec(store.client.once._fs, store.client.once._root)
    checkpoint = fs.open(opened)
    assert checkpoint.verify().sound
    names = (ObjectStore(opened) if isinstance(opened, str) else opened).names()
    assert not [name for name in names if "part" in name or name.startswith((".saving", ".deleting"))]
    assert sorted(name for name in names if name.startswith("step-")) == ["step-00000002", "step-00000004"]


def test_it_is_a_tier_like_any_other(tmp_path: Path) -> None:
    with fs.Checkpointer([tmp_path / "near", f"fsspec+file://{tmp_path}/far"]) as ckpt:
        ckpt.save(1, state(1))
        assert ckpt.drain(60) == {}
    assert fs.open(f"fsspec+file://{tmp_path}/far").verify().sound


def test_verbs_of_the_command_line_and_packs_take_its_urls(tmp_path: Path) -> None:
    url = f"fsspec+file://{tmp_path}/run"
    with fs.Checkpointer(url) as ckpt:
        ckpt.save(1, state(1))
    for verb in ("ls", "show", "verify"):
        done = subprocess.run(
            [sys.executable, "-m", "flowstone", verb, url], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "1" in done.stdout
    assert fs.open(Path(url)).step == 1, "three slashes that Path has joined"
    fs.pack(url, f"fsspec+file://{tmp_path}/packed/one")
    assert fs.open(f"fsspec+file://{tmp_path}/packed/one").verify().sound


def test_readers_never_see_a_part_of_a_file(tmp_path: Path) -> None:
    bucket = FileSystemBucket(LocalFileSystem(), str(tmp_path))

    def pieces() -> Iterator[bytes]:
        yield b"1"
        assert not (tmp_path / "file").exists(), "it is under its name before it is whole"
        raise InterruptedError

    with pytest.raises(InterruptedError):
        bucket.put("file", pieces())
    assert list(tmp_path.iterdir()) == [], "what is given up is removed"


def test_a_part_that_a_killed_writer_has_left_goes_with_its_directory(tmp_path: Path) -> None:
    store = fs.Fsspec(LocalFileSystem(), f"{tmp_path}/run")
    store.make_directory()
    store.make_directory("draft")
    (tmp_path / "run/draft/.flowstone-part-0123").write_bytes(b"half")
    assert store.names("draft") == ()
    store.remove("draft")
    assert (store.names(), sorted(path.name for path in (tmp_path / "run").iterdir())) == ((), [".flowstone-directory"])


class Slow(MemoryFileSystem):
    """Waits in each call until another thread is in one, or a moment."""

    inside = most = 0

    def info(self, path: str, **kwargs: Any) -> Any:
        type(self).inside += 1
        type(self).most = max(self.most, self.inside)
        threading.Event().wait(0.01)
        try:
            return super().info(path, **kwargs)
        finally:
            type(self).inside -= 1


def test_a_file_system_that_is_not_known_to_bear_it_is_called_by_one_thread_at_a_time() -> None:
    store = ObjectStore(FileSystemBucket(Slow(), "/one-at-a-time"))
    threads = [threading.Thread(target=store.exists, args=("a",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Slow.most == 1


def test_a_second_job_is_refused_and_one_whose_lock_was_replaced_is_told(tmp_path: Path) -> None:
    first, other = (fs.Fsspec(LocalFileSystem(), f"{tmp_path}/run") for _ in range(2))
    first.make_directory()
    first.lock("the first job")
    with pytest.raises(LockedError, match="the first job"):
        other.lock("the second job")
    lock = tmp_path / "run" / "flowstone.lock"
    lock.write_bytes(lock.read_bytes().replace(b"first", b"third"))
    first.check_lock()  # its own token: this holding's, whoever has touched the file
    lock.unlink()
    with pytest.raises(LockedError, match="was removed"):
        first.check_lock()
    other.close()
    first.close()


class Coarse(MemoryFileSystem):
    """Tells nothing of a file but its size and the day."""

    def info(self, path: str, **kwargs: Any) -> Any:
        result = super().info(path, **kwargs)
        return {name: result[name] for name in ("name", "size", "type")} | {"mtime": "2026-01-01"}


def test_a_small_file_is_told_from_another_one_of_its_size_where_times_are_coarse() -> None:
    bucket = FileSystemBucket(Coarse(global_store=False, skip_instance_cache=True), "/run")
    first = bucket.put("lock", b"of one", mode="create")["e_tag"]
    assert bucket.head("lock")["e_tag"] == first
    bucket.put("lock", b"of two", mode={"e_tag": first})
    assert bucket.head("lock")["e_tag"] != first
    with pytest.raises(FileExistsError):
        bucket.put("lock", b"of six", mode={"e_tag": first})


class NoReplacing(LocalFileSystem):
    """Moves to free names alone, as servers of SMB do."""

    protocol = "other"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if Path(path2).exists():
            raise OSError(errno.EEXIST, "there is one", path2)
        super().mv(path1, path2, **kwargs)


def test_one_that_moves_to_free_names_alone_serves(tmp_path: Path) -> None:
    with fs.Checkpointer(fs.Fsspec(NoReplacing(), f"{tmp_path}/run")) as ckpt:
        ckpt.save(1, state(1)).committed.result(60)
    assert fs.open(f"fsspec+file://{tmp_path}/run").verify().sound


class LosesAnswers(LocalFileSystem):
    """It moves, and then the connection breaks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.deleted: list[str] = []

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        super().mv(path1, path2, **kwargs)
        raise OSError(errno.ECONNRESET, "the answer did not arrive")

    def rm_file(self, path: str) -> None:
        self.deleted.append(path)
        super().rm_file(path)


@pytest.mark.parametrize("mode", ["create", "overwrite"])
def test_a_move_whose_answer_is_lost_deletes_nothing(tmp_path: Path, mode: str) -> None:
    file_system = LosesAnswers(skip_instance_cache=True)
    bucket = FileSystemBucket(file_system, str(tmp_path))
    if mode == "overwrite":
        (tmp_path / "name").write_bytes(b"the old one")
    bucket.put("name", b"the new one", mode=mode)
    assert (tmp_path / "name").read_bytes() == b"the new one"
    assert file_system.deleted == []
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


class Refuses(LocalFileSystem):
    protocol = "other"
    error: Exception = OSError(errno.EIO, "")

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode:
            raise self.error
        return super().open(path, mode, **kwargs)


@pytest.mark.parametrize(("error", "code", "says"), [
    (OSError(errno.ENOSPC, "no space"), errno.ENOSPC, "prune old checkpoints"),
    (PermissionError(errno.EACCES, "denied"), errno.EACCES, "refused: write"),
    (NotImplementedError("read only"), errno.ENOTSUP, "use another file system"),
    (ConnectionResetError(errno.ECONNRESET, "reset"), errno.ETIMEDOUT, "check the network"),
])
def test_a_refusal_says_what_to_do(tmp_path: Path, error: Exception, code: int, says: str) -> None:
    refusing = Refuses(skip_instance_cache=True)
    refusing.error = error
    store = ObjectStore(FileSystemBucket(refusing, str(tmp_path)), patience=BRIEF)
    with pytest.raises(StorageError) as caught:
        store.put("file", b"1")
    assert (caught.value.errno, says in str(caught.value.facts["next"])) == (code, True), caught.value


def test_an_open_transaction_is_refused_by_name(tmp_path: Path) -> None:
    local = LocalFileSystem(skip_instance_cache=True)
    store = ObjectStore(FileSystemBucket(local, str(tmp_path)), patience=BRIEF)
    with local.transaction, pytest.raises(StorageError, match="cannot write") as caught:
        store.put("file", b"1")
    assert "transaction" in str(caught.value.facts["reason"])


@pytest.mark.parametrize(("make", "says"), [
    (lambda: fs.Fsspec(object(), "run"), "is not an fsspec file system"),
    (lambda: fs.Fsspec(new_memory(), ""), "is not the path of a directory"),
    (lambda: fs.Fsspec(new_memory(), "run[1]"), "takes as a pattern"),
    (lambda: fs.Fsspec(fsspec.filesystem("simplecache", target_protocol="memory"), "run"), "caches what"),
    (lambda: fs.Checkpointer("fsspec+nowhere://run").latest(), "fsspec cannot open the URL"),
    (lambda: fs.Checkpointer("ftp://host/run"), r"write fsspec\+ftp://host/run"),
])
def test_what_is_no_such_file_system_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert says.replace("\\", "") in str(caught.value)


def test_a_password_in_a_url_is_in_no_message_and_a_host_that_does_not_answer_is_named() -> None:
    with pytest.raises((FrameworkError, StorageError)) as caught:
        ObjectStore("fsspec+sftp://me:secret@127.0.0.1:1/run")
    assert "secret" not in str(caught.value)
    assert "fsspec+sftp://me:***@127.0.0.1:1/run" in str(caught.value)
