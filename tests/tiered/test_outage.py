"""A farther tier that is down, slow or full: training continues, the backlog is bounded, reported and later flushed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from simulated import ENGINE, Clock, Unsteady, is_of, save, simulated, state, told

import flowstone as fs
from flowstone.commit import catalog
from flowstone.errors import SaveFailedError
from flowstone.store.base import Store
from flowstone.store.local import LocalStore
from flowstone.store.memory.store import MemoryStore, SharedMemoryDirectory
from memory_agent import own_agent


@pytest.fixture
def clock() -> Iterator[Clock]:
    with simulated() as clock:
        yield clock


@pytest.fixture
def agent() -> Iterator[Path]:
    with own_agent() as directory:
        yield directory


@pytest.fixture(params=["directory", "memory", "objects"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Unsteady:
    if request.param == "directory":
        return Unsteady(LocalStore(tmp_path / "far", ENGINE))
    return Unsteady(MemoryStore(location="far", atomic_rename=request.param == "memory"))


def _checkpointer(tiers: list[Any], events: list[Any], **options: Any) -> fs.Checkpointer:
    return fs.Checkpointer(tiers, engine=ENGINE, on_event=events.append, **options)


def _steps(store: Store) -> tuple[int, ...]:
    return catalog.steps(store.inner if isinstance(store, Unsteady) else store)


def test_a_tier_that_is_down_for_an_hour(far: Unsteady, clock: Clock, tmp_path: Path) -> None:
    events: list[Any] = []
    near = LocalStore(tmp_path / "near", ENGINE)
    with _checkpointer([tmp_path / "near", fs.Tier(far, lag=3)], events, keep=2) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step)
        assert _steps(far) == (1, 2)
        far.down = True
        for step in range(3, 15):  # an hour, with a save each five minutes
            save(checkpointer, step)
            assert len(checkpointer._store_writer.flushers[0].waiting) <= 3  # type: ignore[attr-defined]
            clock.advance(300)
        assert _steps(far) == (1, 2)
        assert [event.step for event in told(events, fs.Committed)] == list(range(1, 15)), "training went on"
        assert [e.step for e in told(events, fs.FlushDropped)] == list(range(3, 12)), "the lag is bounded and told"
        assert _steps(near) == (12, 13, 14), "what waits stays, and no more"
        failed = told(events, fs.TierFailed)
        assert [item.again_in_s for item in failed[:4]] == [1, 2, 4, 8]
        assert len(failed) < 30, "tries come less and less often"
        assert failed[-1].waiting == (12, 13, 14)
        far.down = False
        clock.advance(300)
        assert _steps(far) == (1, 2, 12, 13, 14)
        assert [event.step for event in told(events, fs.Flushed)] == [1, 2, 12, 13, 14], "caught up in order"
        save(checkpointer, 15)
        assert _steps(near) == (14, 15)
    for step in (12, 13, 14, 15):
        assert fs.open(far.inner, step).verify().sound


def test_a_tier_that_is_full_gets_all_once_there_is_space(far: Unsteady, clock: Clock, tmp_path: Path) -> None:
    events: list[Any] = []
    with _checkpointer([tmp_path / "near", far], events) as checkpointer:
        save(checkpointer, 1)
        far.full = True
        for step in (2, 3):
            save(checkpointer, step)
        assert "no space" in told(events, fs.TierFailed)[0].reason
        clock.advance(20)
        assert [e.again_in_s for e in told(events, fs.TierFailed)] == [1, 2, 4, 8, 16], "it can be opened, though"
        assert not [name for name in far.inner.names() if name.startswith(".saving")]
        far.full = False
        clock.advance(60)
        assert _steps(far) == (1, 2, 3), "in order"


def test_bytes_that_wait_are_bounded(far: Unsteady, clock: Clock, tmp_path: Path) -> None:
    events: list[Any] = []
    with _checkpointer([tmp_path / "near", fs.Tier(far, lag=9, lag_bytes=2_600_000)], events) as checkpointer:
        save(checkpointer, 1)
        far.down = True
        for step in range(2, 8):  # 1.2 MB each
            save(checkpointer, step)
        assert [event.step for event in told(events, fs.FlushDropped)] == [2, 3, 4, 5]
        far.down = False
        clock.advance(60)
    assert _steps(far) == (1, 6, 7)


def test_each_tier_takes_its_own_share_and_keeps_its_own(clock: Clock, tmp_path: Path) -> None:
    events: list[Any] = []
    tiers = [
        fs.Tier(tmp_path / "near", keep=2), fs.Tier(tmp_path / "middle", every=3, keep=fs.Keep(last=2)),
        fs.Tier(tmp_path / "far", every=6),
    ]
    with _checkpointer(tiers, events) as checkpointer:
        for step in range(1, 21):
            save(checkpointer, step)
    stores = [LocalStore(tmp_path / name) for name in ("near", "middle", "far")]
    assert [catalog.steps(store) for store in stores] == [(19, 20), (16, 19), (1, 7, 13, 19)]


def test_a_start_with_a_tier_that_is_down_catches_up_later(far: Unsteady, clock: Clock, tmp_path: Path) -> None:
    events: list[Any] = []
    far.down = True
    with _checkpointer([tmp_path / "near", far], events) as checkpointer:
        save(checkpointer, 1)
        assert told(events, fs.TierFailed)[0].step is None
        far.down = False
        clock.advance(10)
        assert _steps(far) == (1,)
        far.down = True
        save(checkpointer, 2)
    assert told(events, fs.TiersBehind)[0].waiting == (2,)
    far.down = False
    contents = far.inner
    again = Unsteady(
        LocalStore(tmp_path / "far", ENGINE) if isinstance(contents, LocalStore) else MemoryStore(
            contents.contents, location="far", atomic_rename=contents.capabilities.atomic_rename  # type: ignore[attr-defined]
        )
    )
    with _checkpointer([tmp_path / "near", again], events) as checkpointer:
        save(checkpointer, 3)
    assert _steps(again) == (1, 2, 3)


def test_a_directory_that_is_deleted_in_mid_run_is_made_again(clock: Clock, tmp_path: Path) -> None:
    import shutil

    events: list[Any] = []
    with _checkpointer([tmp_path / "near", tmp_path / "far"], events, keep=2) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step)
        shutil.rmtree(tmp_path / "far")
        save(checkpointer, 3)
        clock.advance(5)
        assert told(events, fs.TierFailed), "it is told"
        assert catalog.steps(LocalStore(tmp_path / "far")) == (2, 3), "what is still there came again"
    assert fs.open(tmp_path / "far").verify().sound


def test_a_volatile_first_tier_calls_nothing_durable(far: Unsteady, clock: Clock, tmp_path: Path) -> None:
    events: list[Any] = []
    memory = MemoryStore(location="memory")
    with _checkpointer([memory, fs.Tier(tmp_path / "disk", every=2, lag=1), far], events) as checkpointer:
        first = checkpointer.save(1, state(1))
        assert first.durable is not first.committed
        assert first.committed.result().path.startswith("memory/")
        checkpointer._saves.sole_writer.drain()
        assert first.durable.result().path.startswith(str(tmp_path / "disk"))
        second = checkpointer.save(2, state(2))
        second.committed.result()
        checkpointer._saves.sole_writer.drain()
        with pytest.raises(SaveFailedError, match="one of 2 steps"):
            second.durable.result()
        assert isinstance(second.durable.exception(), SaveFailedError)
    directory = fs.Checkpointer(tmp_path / "alone", engine=ENGINE)
    only = directory.save(1, state(1))
    assert only.durable is only.committed
    directory.close()


def test_a_failed_save_is_not_durable_either(clock: Clock, tmp_path: Path) -> None:
    memory = Unsteady(MemoryStore(location="memory"))
    checkpointer = _checkpointer([memory, tmp_path / "disk"], [], on_error="continue")
    save(checkpointer, 1)
    memory.full = True
    failed = None
    with suppress(fs.FullError):
        failed = checkpointer.save(2, state(2))
    if failed is not None:
        assert isinstance(failed.durable.exception(), fs.FullError)
    memory.full = False
    checkpointer.close()


def test_a_source_that_is_damaged_gives_way_to_the_next_tier(clock: Clock, tmp_path: Path) -> None:
    events: list[Any] = []
    far = Unsteady(LocalStore(tmp_path / "far", ENGINE))
    with _checkpointer([tmp_path / "near", tmp_path / "middle", far], events) as checkpointer:
        save(checkpointer, 1)
        far.down = True
        save(checkpointer, 2)
        save(checkpointer, 3)
        _damage(tmp_path / "near", 2)
        for name in ("near", "middle"):
            _damage(tmp_path / name, 3)
        far.down = False
        clock.advance(60)
        assert _steps(far) == (1, 2)
    dropped = told(events, fs.FlushDropped)
    assert [item.step for item in dropped] == [3]
    assert "is damaged" in dropped[0].reason
    assert fs.open(tmp_path / "far", 2).verify().sound


def _damage(store: Path, step: int) -> None:
    path = store / f"step-{step:08d}" / "rank-00000.safetensors"
    with path.open("r+b") as file:
        file.seek(700_000)
        content = file.read(1)
        file.seek(700_000)
        file.write(bytes([content[0] ^ 1]))


def test_drain_waits_and_says_what_is_not_there(clock: Clock, tmp_path: Path) -> None:
    far = Unsteady(LocalStore(tmp_path / "far", ENGINE))
    with _checkpointer([tmp_path / "near", far], []) as checkpointer:
        save(checkpointer, 1)
        assert checkpointer.drain() == {}
        far.down = True
        save(checkpointer, 2)
        assert checkpointer.drain(timeout_s=0.0) == {str(tmp_path / "far"): (2,)}
        far.down = False
        assert checkpointer.drain() == {}
    assert _steps(far) == (1, 2)


def test_lags_of_every_length_lose_the_oldest_alone(clock: Clock, tmp_path: Path) -> None:
    for lag, saves in itertools.product((1, 2, 4), (1, 3, 6)):
        far, events = Unsteady(MemoryStore(SharedMemoryDirectory(), location="far")), []
        near = tmp_path / f"near-{lag}-{saves}"
        with _checkpointer([near, fs.Tier(far, lag=lag)], events) as checkpointer:
            save(checkpointer, 0)
            far.down = True
            for step in range(1, saves + 1):
                save(checkpointer, step)
            far.down = False
        assert _steps(far) == (0, *range(max(1, saves - lag + 1), saves + 1)), (lag, saves)
    into = state(0)
    with fs.Checkpointer(far, engine=ENGINE) as alone:
        assert is_of(alone.load(into).step, into)


def test_memory_keeps_its_generations_alone_and_what_it_gives_up_is_told(
    agent: Path, clock: Clock, tmp_path: Path
) -> None:
    events: list[Any] = []
    far = Unsteady(LocalStore(tmp_path / "far", ENGINE))
    memory = fs.NodeMemory("run", generations=3)
    with _checkpointer([memory, fs.Tier(far, lag=4)], events) as checkpointer:
        save(checkpointer, 1)
        far.down = True
        for step in range(2, 6):
            save(checkpointer, step)
        assert catalog.steps(memory) == (3, 4, 5)
        assert checkpointer._store_writer.flushers[0].waiting == (2, 3, 4, 5)  # type: ignore[attr-defined]
        far.down = False
        assert checkpointer.drain() == {}
        assert _steps(far) == (1, 3, 4, 5)
        dropped = told(events, fs.FlushDropped)
        assert [(item.step, item.reason) for item in dropped] == [(2, "no tier has it")]
