"""Wrappers: one without changes obeys the contract of every store; faults, traces and retries work as documented."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from contract import StoreContract

import flowstone as fs
from flowstone.commit import catalog
from flowstone.errors import SaveFailedError, StorageError
from flowstone.store.base import PROTOCOLS, Store, members
from flowstone.store.memory.store import MemoryStore, SharedMemoryDirectory
from flowstone.store.wrap import FaultInjectingStore, RetryingStore, StoreCall, TracingStore, Wrapper


class _Wrapped(StoreContract):
    def wrap(self, store: Store) -> Store:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _several(self) -> None:
        self.contents: dict[Path, SharedMemoryDirectory] = {}

    def open_store(self, root: Path) -> Store:
        return self.wrap(MemoryStore(self.contents.setdefault(root, SharedMemoryDirectory()), location=str(root)))


class TestTraced(_Wrapped):
    def wrap(self, store: Store) -> Store:
        return TracingStore(store, lambda call: None)


class TestRetrying(_Wrapped):
    def wrap(self, store: Store) -> Store:
        return RetryingStore(store, sleep=_never)


class TestFaulty(_Wrapped):
    def wrap(self, store: Store) -> Store:
        return FaultInjectingStore(store)


class TestSeveral(_Wrapped):
    def wrap(self, store: Store) -> Store:
        return TracingStore(RetryingStore(FaultInjectingStore(store), sleep=_never), lambda call: None)


def _never(delay_s: float) -> None:
    raise AssertionError("nothing was to be tried again")


def _refusal(verb: str, path: str = "", code: int = errno.EIO) -> Callable[[str, str], StorageError | None]:
    """Refuses one verb, on paths that end so."""
    def refuse(result: str, on: str) -> StorageError | None:
        return StorageError(f"cannot {verb} {on}", errno=code) if result == verb and on.endswith(path) else None

    return refuse


def _state() -> dict[str, object]:
    return {"weights": torch.arange(100_000.0), "epoch": 3}


def test_every_verb_of_a_store_passes_through_the_wrapper() -> None:
    own = {name for protocol in PROTOCOLS for name in members(protocol)}
    assert own <= vars(Wrapper).keys()


# Traces


def test_a_trace_has_each_call_with_its_duration_and_bytes() -> None:
    calls: list[StoreCall] = []
    ticks = count()
    store = TracingStore(MemoryStore(), calls.append, clock=lambda: float(next(ticks)))
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, _state()).committed.result()
        checkpointer.load(_state())
    assert all(call.seconds >= 1 for call in calls)
    written, = [call for call in calls if call.verb == "written"]
    assert written.bytes >= 400_000
    through, = [call for call in calls if call.verb == "read_through"]
    assert through.bytes >= 400_000
    manifest, = [call for call in calls if call.verb == "put" and call.path.endswith("manifest.json")]
    assert manifest.bytes == store.size("step-00000001/manifest.json")
    order = [call.verb for call in calls if call.verb in ("written", "put", "rename")]
    assert order == ["put", "written", "put", "put", "put", "rename"], "marker; segments, index, objects, manifest"


def test_a_trace_has_what_a_call_raised_and_what_a_receipt_carries() -> None:
    calls: list[StoreCall] = []
    store = TracingStore(FaultInjectingStore(MemoryStore(), _refusal("written")), calls.append)
    with fs.Checkpointer(store, on_error="continue") as checkpointer:
        checkpointer.save(1, _state())
    written, = [call for call in calls if call.verb == "written"]
    assert "cannot written" in str(written.error)
    with pytest.raises(StorageError):
        store.size("missing")
    assert calls[-1].verb == "size"
    assert isinstance(calls[-1].error, StorageError)


# Faults


@pytest.mark.parametrize(("verb", "path"), [
    ("write", ""), ("written", ""), ("put", "index.safetensors"), ("put", "manifest.json"), ("rename", "step-00000002"),
])
def test_a_fault_before_a_call_fails_that_save_and_leaves_the_one_before(verb: str, path: str) -> None:
    inner = MemoryStore()
    with fs.Checkpointer(MemoryStore(inner.contents, location="first")) as checkpointer:
        checkpointer.save(1, _state())
    store = FaultInjectingStore(inner, _refusal(verb, path))
    with fs.Checkpointer(store, on_error="continue") as checkpointer:
        with pytest.raises((StorageError, SaveFailedError), match=f"cannot {verb}"):
            checkpointer.save(2, _state()).committed.result()
        assert checkpointer.latest().step == 1  # type: ignore[union-attr]
    assert fs.open(inner).verify().sound
    assert not [name for name in inner.names() if name.startswith(".saving-")], "the failed save leaves nothing"


@pytest.mark.parametrize("atomic_rename", [True, False])
def test_a_commit_whose_answer_is_lost_fails_the_save_and_leaves_a_whole_checkpoint(atomic_rename: bool) -> None:
    inner = MemoryStore(atomic_rename=atomic_rename)
    lost = _refusal("rename") if atomic_rename else _refusal("put", "manifest.json")
    checkpointer = fs.Checkpointer(FaultInjectingStore(inner, after=lost), on_error="continue")
    with checkpointer, pytest.raises(StorageError):
        checkpointer.save(1, _state()).committed.result()
    assert catalog.steps(inner) == (1,)
    assert fs.open(inner).verify().sound


def test_a_fault_while_bytes_are_read_fails_the_load() -> None:
    inner = MemoryStore()
    with fs.Checkpointer(MemoryStore(inner.contents)) as checkpointer:
        checkpointer.save(1, _state())
    checkpointer = fs.Checkpointer(FaultInjectingStore(inner, _refusal("read_through", code=errno.ETIMEDOUT)))
    with checkpointer, pytest.raises(StorageError, match="reading failed partway"):
        checkpointer.load(_state())


# Retries


class _Unsteady:
    """Refuses the first `times` calls of each verb and path."""

    def __init__(self, times: int, code: int = errno.ETIMEDOUT) -> None:
        self.times, self.code, self.seen = times, code, dict[tuple[str, str], int]()

    def __call__(self, verb: str, path: str) -> StorageError | None:
        seen = self.seen[verb, path] = self.seen.get((verb, path), 0) + 1
        return StorageError(f"cannot {verb} {path}", errno=self.code) if seen <= self.times else None


def test_what_may_pass_is_tried_again_later_and_later(caplog: pytest.LogCaptureFixture) -> None:
    inner = MemoryStore()
    inner.make_directory()
    inner.put("file", b"content")
    slept: list[float] = []
    store = RetryingStore(
        FaultInjectingStore(inner, _Unsteady(4)), attempts=5, first_delay_s=1.0, delay_s_max=3.0, sleep=slept.append
    )
    with caplog.at_level(logging.WARNING, logger="flowstone"):
        assert store.read("file") == b"content"
    assert slept == [1.0, 2.0, 3.0, 3.0]
    assert "trying again in 2 s" in caplog.text


def test_attempts_are_bounded() -> None:
    slept: list[float] = []
    store = RetryingStore(
        FaultInjectingStore(MemoryStore(), _Unsteady(99)), attempts=3, first_delay_s=1.0, sleep=slept.append
    )
    with pytest.raises(StorageError, match="cannot names"):
        store.names()
    assert slept == [1.0, 2.0]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT, errno.ENOSPC, errno.EACCES])
def test_what_does_not_pass_by_itself_is_not_tried_again(code: int) -> None:
    store = RetryingStore(FaultInjectingStore(MemoryStore(), _Unsteady(1, code)), sleep=_never)
    with pytest.raises(StorageError):
        store.names()


def test_what_must_not_be_made_twice_is_not_tried_again() -> None:
    inner = MemoryStore()
    inner.make_directory()
    for name in ("source", "file"):
        inner.put(name, b"")
    lost = RetryingStore(FaultInjectingStore(inner, after=_Unsteady(1)), sleep=_never)
    acts: dict[str, Callable[[], None]] = {
        "put": lambda: lost.put("new", b""), "rename": lambda: lost.rename("source", "target"),
        "remove": lambda: lost.remove("file"), "make_directory": lambda: lost.make_directory("directory"),
        "lock": lambda: lost.lock("this job"), "unlock": lost.unlock,
    }
    for verb, act in acts.items():
        with pytest.raises(StorageError, match=f"cannot {verb}"):
            act()
    assert inner.names() == ("directory", "new", "target"), "each was made, once"


@pytest.mark.parametrize("atomic_rename", [True, False])
def test_a_job_on_a_store_that_looks_badly_saves_and_loads(atomic_rename: bool) -> None:
    """What only looks fails twice each; what changes something goes through."""
    looks = {"exists", "is_link", "names", "size", "stamp", "read", "check_lock", "free_bytes", "read_extents"}
    unsteady = _Unsteady(2)
    inner = MemoryStore(atomic_rename=atomic_rename)
    faulty = FaultInjectingStore(inner, lambda verb, path: unsteady(verb, path) if verb in looks else None)
    state = _state()
    with fs.Checkpointer(RetryingStore(faulty, sleep=lambda delay_s: None), keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).committed.result()
        assert checkpointer.load(state).step == 2
    assert catalog.steps(inner) == (2,)
    assert fs.open(inner).verify().sound
