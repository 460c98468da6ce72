"""The store in memory: the contract of every store, with both ways to commit; and the full life of a Checkpointer."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from contract import StoreContract
from msgspec.structs import replace

import flowstone as fs
from flowstone.commit import catalog
from flowstone.errors import ArgumentError, DamagedError, NotAStoreError, StorageError
from flowstone.store.memory.store import MemoryStore, SharedMemoryDirectory


class TestMemoryStore(StoreContract):
    atomic_rename = True

    @pytest.fixture(autouse=True)
    def _several(self) -> None:
        self.contents: dict[Path, SharedMemoryDirectory] = {}

    def open_store(self, root: Path) -> MemoryStore:
        contents = self.contents.setdefault(root, SharedMemoryDirectory())
        return MemoryStore(contents, location=str(root), atomic_rename=self.atomic_rename)


class TestMemoryStoreThatPutsConditionally(TestMemoryStore):
    atomic_rename = False


def _training() -> dict[str, object]:
    model = torch.nn.Linear(300, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": fs.rng(), "epoch": 3}


def _weight(state: dict[str, object]) -> torch.Tensor:
    model = state["model"]
    assert isinstance(model, torch.nn.Linear)
    return model.weight


@pytest.fixture(params=[True, False], ids=["rename", "put"])
def store(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(atomic_rename=request.param)


def test_a_training_state_is_saved_kept_and_loaded(store: MemoryStore) -> None:
    state = _training()
    with fs.Checkpointer(store, keep=2) as checkpointer:
        for step in range(1, 5):
            with torch.no_grad():
                _weight(state).fill_(step)
            checkpointer.save(step, state)
            checkpointer.fence()
        checkpointer.wait()
        with torch.no_grad():
            _weight(state).zero_()
        assert checkpointer.load(state).step == 4
        assert (_weight(state) == 4).all()
    assert catalog.steps(store) == (3, 4)
    again = MemoryStore(store.contents, location=store.location, atomic_rename=store.capabilities.atomic_rename)
    assert fs.open(again).verify().sound
    assert (fs.open(again, step=3).read("model.weight") == 3).all()
    assert "epoch" in fs.open(again).objects


def test_a_rewind_sets_newer_steps_aside(store: MemoryStore) -> None:
    state = _training()
    with fs.Checkpointer(store) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state)
        checkpointer.rewind(1)
        checkpointer.save(2, state).committed.result()
    assert catalog.steps(store) == (1, 2)
    aside = [name for name in store.names() if name.startswith(".superseded-")]
    assert len(aside) == 2
    for name in aside:
        whole = {"index.safetensors", "manifest.json", "objects.json", "rank-00000.safetensors"}
        assert whole <= set(store.names(name))


def test_a_flipped_bit_is_found(store: MemoryStore) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, _training())
    path = "step-00000001/rank-00000.safetensors"
    content = bytearray(store.read(path))
    content[-5000] ^= 1
    store.remove(path)
    store.put(path, bytes(content))
    with pytest.raises(DamagedError, match="damaged"):
        fs.open(store).verify()


def test_a_file_is_renamed_into_another_directory(store: MemoryStore) -> None:
    store.make_directory()
    store.make_directory("a")
    store.put("file", b"content")
    store.rename("file", "a/other")
    assert store.names() == ("a",)
    assert store.read("a/other") == b"content"


def test_what_is_removed_gives_its_descriptors_back(store: MemoryStore) -> None:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    store.make_directory()
    before = count()
    for name in ("a", "b"):
        store.put(name, b"content")
    assert count() == before + 2
    for name in ("a", "b"):
        store.remove(name)
    assert count() == before


def test_a_checkpoint_alone_is_no_store_and_nothing_is_no_checkpoint() -> None:
    store = MemoryStore()
    store.make_directory()
    store.put("notes.txt", b"mine")
    with pytest.raises(NotAStoreError):
        fs.open(store)


def test_memory_that_is_not_there_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store.make_directory()

    def refuse(fd: int, begin: int, end: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("flowstone.store.memory.store._native.reserve_memory", refuse)
    with pytest.raises(fs.FullError, match="no space to write"):
        store.put("file", b"content")
    assert store.names() == ()


@pytest.mark.parametrize("lacking", ["read_extents", "check_lock", "rename", "names"])
def test_an_object_that_lacks_a_part_of_a_store_is_refused_with_what_it_lacks(lacking: str) -> None:
    whole = MemoryStore()
    names = {name for name in dir(whole) if not name.startswith("_")} - {lacking}
    partial = type("Partial", (), {name: getattr(whole, name) for name in names})()
    for act in (fs.Checkpointer, fs.open):
        _refused(act, partial, lacking)


def test_a_store_that_cannot_commit_is_refused() -> None:
    store = MemoryStore()
    store.capabilities = replace(store.capabilities, atomic_rename=False, conditional_put=False)
    _refused(fs.Checkpointer, store, "conditional_put")


def _refused(act: Callable[..., object], store: object, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        act(store)
    assert words in str(caught.value)


def test_sync_is_not_called_where_none_is_needed(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str = "") -> None:
        raise StorageError("cannot sync", errno=errno.EIO)

    monkeypatch.setattr(store, "sync_directory", refuse)
    with fs.Checkpointer(store, keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _training()).committed.result()
        checkpointer.rewind(2)
    assert 2 in catalog.steps(store)
