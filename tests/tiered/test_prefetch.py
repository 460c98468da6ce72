"""A checkpoint loaded from a farther tier is copied into nearer ones with `prefetch`: completely, or not at all."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from simulated import ENGINE, Unsteady, is_of, state, told

import flowstone as fs
from flowstone.commit import catalog
from flowstone.errors import ArgumentError
from flowstone.store.local import LocalStore
from flowstone.store.memory.store import MemoryStore, SharedMemoryDirectory
from flowstone.tiered import prefetch
from flowstone.tiered.flush import FlushedCheckpoint


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    """Steps 1 and 2 are in the far tier alone, as on a node that is new."""
    near, far = tmp_path / "near", tmp_path / "far"
    with fs.Checkpointer([near, far], engine=ENGINE) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).committed.result()
            checkpointer.drain(60)
    shutil.rmtree(near)
    return near, far


def _opened(near: Any, far: Any, events: list[Any], **options: Any) -> fs.Checkpointer:
    tiers = [fs.Tier(near, prefetch=True), far]
    return fs.Checkpointer(tiers, engine=ENGINE, on_event=events.append, **options)


def test_what_a_load_took_from_afar_is_near_for_the_next_one(paths: tuple[Path, Path]) -> None:
    near, far = paths
    events: list[Any] = []
    with _opened(near, far, events) as checkpointer:
        into = state(0)
        assert checkpointer.load(into).tier == str(far)
        assert is_of(2, into)
        assert checkpointer.drain(60) == {}
        [come] = told(events, fs.Prefetched)
        assert (come.step, come.tier, come.source, come.reason) == (2, str(near), str(far), "")
        assert come.bytes > 0
    for name in LocalStore(far).names("step-00000002"):
        assert (near / "step-00000002" / name).read_bytes() == (far / "step-00000002" / name).read_bytes()
    assert fs.open(near).verify().sound
    with _opened(near, far, events) as checkpointer:
        report = checkpointer.load(state(0))
        assert (report.step, report.tier) == (2, str(near))
        checkpointer.save(3, state(3)).committed.result()
        checkpointer.drain(60)
    assert catalog.steps(LocalStore(near)) == (2, 3)
    assert catalog.steps(LocalStore(far)) == (1, 2, 3)


def test_a_load_writes_nothing_into_a_tier_that_does_not_want_it(paths: tuple[Path, Path]) -> None:
    near, far = paths
    with fs.Checkpointer([near, far], engine=ENGINE) as checkpointer:
        checkpointer.load(state(0))
        assert checkpointer.drain(60) == {}
    assert not near.exists()


def test_memory_is_filled_again_from_the_disk(paths: tuple[Path, Path]) -> None:
    _, far = paths
    contents, events = SharedMemoryDirectory(), list[Any]()
    with _opened(MemoryStore(contents, location="memory"), far, events) as checkpointer:
        checkpointer.load(state(0))
        assert checkpointer.drain(60) == {}
    with _opened(MemoryStore(contents, location="memory"), far, events) as checkpointer:
        assert checkpointer.load(state(0)).tier == "memory"


def _endless(reached: threading.Event) -> Callable[..., FlushedCheckpoint]:
    """A flush that never comes to its end, unless it is called off."""

    def flush(
        source: Any, target: Any, step: int, pace: Any, rest: Callable[[], None], expected: str
    ) -> FlushedCheckpoint:
        target.make_directory(f".saving-{step:08d}-{expected}")
        reached.set()
        never = threading.Event()
        while not never.wait(0.001):
            rest()
        raise AssertionError

    return flush


@pytest.mark.parametrize("act", ["save", "close"])
def test_a_save_and_the_end_call_it_off(paths: tuple[Path, Path], act: str) -> None:
    near, far = paths
    events, reached = list[Any](), threading.Event()
    with mock.patch.object(prefetch, "flush", _endless(reached)):
        checkpointer = _opened(near, far, events)
        checkpointer.load(state(0))
        assert reached.wait(60)
        assert checkpointer.drain(0.01) == {str(near): (2,)}
        if act == "save":
            checkpointer.save(3, state(3)).committed.result()
            checkpointer.drain(60)
        checkpointer.close()
    [called_off] = told(events, fs.Prefetched)
    assert "cancelled by" in called_off.reason
    if act == "save":
        assert catalog.steps(LocalStore(near)) == (3,)
        assert not [name for name in LocalStore(near).names() if name.startswith(".saving")], "the writer sweeps"
    with fs.Checkpointer(near) as other:
        other.save(9, state(9)).committed.result()  # no lock is left


def test_it_is_called_off_before_it_is_published(paths: tuple[Path, Path]) -> None:
    near, far = paths
    events, waits, go = list[Any](), threading.Event(), threading.Event()
    sync = LocalStore.put

    def put(store: LocalStore, path: str, data: bytes) -> None:
        sync(store, path, data)
        if path.endswith("objects.json") and store.location == str(near):
            waits.set()
            assert go.wait(60)

    with mock.patch.object(LocalStore, "put", put):
        checkpointer = _opened(near, far, events)
        checkpointer.load(state(0))
        assert waits.wait(60)
        closing = threading.Thread(target=checkpointer.close)
        closing.start()
        while not checkpointer._store_writer.prefetch._is_called_off:  # type: ignore[attr-defined]
            closing.join(0.001)
        go.set()
        closing.join(60)
    assert "cancelled by" in told(events, fs.Prefetched)[0].reason
    assert catalog.steps(LocalStore(near)) == ()
    assert not [name for name in LocalStore(near).names() if name.startswith(".saving")]


def test_a_tier_that_another_job_writes_into_is_left_alone(paths: tuple[Path, Path]) -> None:
    near, far = paths
    events: list[Any] = []
    other = LocalStore(near)
    other.make_directory()
    other.lock("another job")
    try:
        with _opened(near, far, events) as checkpointer:
            assert checkpointer.load(state(0)).step == 2
            assert checkpointer.drain(60) == {}
    finally:
        other.close()
    assert "another job writes there" in told(events, fs.Prefetched)[0].reason
    assert catalog.steps(LocalStore(near)) == ()


def test_a_tier_that_is_full_is_told_and_the_load_is_whole(paths: tuple[Path, Path]) -> None:
    near, far = paths
    events, into = list[Any](), state(0)
    unsteady = Unsteady(LocalStore(near, ENGINE))
    unsteady.full = True
    with _opened(unsteady, far, events) as checkpointer:
        checkpointer.load(into)
        assert checkpointer.drain(60) == {}
    assert is_of(2, into)
    assert "no space" in told(events, fs.Prefetched)[0].reason


def test_a_tier_that_has_something_newer_is_left_as_it_is(paths: tuple[Path, Path]) -> None:
    near, far = paths
    events: list[Any] = []
    with _opened(near, far, events) as checkpointer:
        checkpointer.load(state(0))
        checkpointer.drain(60)
        assert checkpointer.load(state(0), step=1).tier == str(far)
        checkpointer.drain(60)
    assert "already has the newer step 2" in told(events, fs.Prefetched)[-1].reason
    assert catalog.steps(LocalStore(near)) == (2,)


def test_a_prefetch_that_can_never_be(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="prefetch of the last tier"):
        fs.Checkpointer([tmp_path / "a", fs.Tier(tmp_path / "b", prefetch=True)])
    with pytest.raises(ArgumentError, match="prefetch='yes'"):
        fs.Tier(tmp_path / "a", prefetch="yes")  # type: ignore[arg-type]
