"""Which checkpoint is loaded from several tiers, and why; rewinds; lists that change from one start to the next."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated import ENGINE, Clock, Unsteady, is_of, save, simulated, state, told

import flowstone as fs
from flowstone.commit import catalog
from flowstone.commit.entries import SUPERSEDED
from flowstone.errors import DamagedError, NoCheckpointError, NotAStoreError, StepExistsError, StorageError
from flowstone.store.local import LocalStore
from flowstone.store.memory import MemoryStore


@pytest.fixture
def clock() -> Iterator[Clock]:
    with simulated() as clock:
        yield clock


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "near", tmp_path / "far"


def _tiers(*tiers: Any, events: list[Any] | None = None, **options: Any) -> fs.Checkpointer:
    return fs.Checkpointer(
        list(tiers), engine=ENGINE, on_event=None if events is None else events.append, **options
    )


def _run(steps: range, *tiers: Any, **options: Any) -> None:
    with _tiers(*tiers, **options) as checkpointer:
        for step in steps:
            save(checkpointer, step)


def _damage(store: Path, step: int, name: str = "rank-00000.safetensors", offset: int = 700_000) -> None:
    with (store / f"step-{step:08d}" / name).open("r+b") as file:
        file.seek(offset)
        content = file.read(1)
        file.seek(offset)
        file.write(bytes([content[0] ^ 1]))


def test_the_nearest_tier_is_read(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    _run(range(1, 4), near, far)
    into = state(0)
    with _tiers(near, far) as checkpointer:
        report = checkpointer.load(into)
        assert (report.step, report.tier, report.why) == (3, str(near), "")
        newest = checkpointer.latest()
    assert is_of(3, into)
    assert newest is not None
    assert newest.path == f"{near}/step-00000003"


def test_a_new_node_takes_the_newest_from_afar_and_goes_on(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    _run(range(1, 4), near, far)
    marker = (far / "flowstone.json").read_bytes()
    shutil.rmtree(near)
    into, events = state(0), []
    with _tiers(near, far, events=events) as checkpointer:
        report = checkpointer.load(into)
        assert (report.step, report.tier, report.why) == (3, str(far), f"{near} does not have the step")
        with pytest.raises(StepExistsError):
            checkpointer.save(3, into)
        save(checkpointer, 4)
    assert (near / "flowstone.json").read_bytes().split(b"created")[0] == marker.split(b"created")[0]
    assert catalog.steps(LocalStore(near)) == (4,)
    assert catalog.steps(LocalStore(far)) == (1, 2, 3, 4)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "index.safetensors", "manifest.json", "objects.json"])
def test_damage_in_the_near_tier_gives_the_same_step_from_the_next(
    name: str, clock: Clock, paths: tuple[Path, Path]
) -> None:
    near, far = paths
    _run(range(1, 4), near, far)
    _damage(near, 3, name, offset=700_000 if name.startswith("rank") else 60)
    into, events = state(0), []
    with _tiers(near, far, events=events) as checkpointer:
        report = checkpointer.load(into)
        assert (report.step, report.tier) == (3, str(far))
        assert str(near) in report.why
        newest = checkpointer.latest()
        assert newest is not None
        assert newest.step == 3
        save(checkpointer, 4)
    assert is_of(3, into)
    if name != "manifest.json":
        assert [(event.step, event.tier) for event in told(events, fs.TierPassedOver)] == [(3, str(near))]
    assert not told(events, fs.FellBack)


def test_a_tiers_step_without_manifest_is_damaged_and_set_aside_by_the_flush_of_a_whole_one(
    clock: Clock, paths: tuple[Path, Path]
) -> None:
    near, far = paths
    _run(range(1, 4), near, far)
    (near / "step-00000003/manifest.json").unlink()
    into = state(0)
    with _tiers(near, far) as checkpointer:
        report = checkpointer.load(into)
        assert (report.step, report.tier) == (3, str(far))
        assert f"{near} has a damaged manifest of the step" in report.why
    (far / "step-00000003/manifest.json").unlink()
    with _tiers(near, far) as checkpointer:
        with pytest.raises(DamagedError, match="has no manifest"):
            checkpointer.load(into)
        report = checkpointer.load(into, fallback=True)
        assert (report.step, report.tier) == (2, str(near))
        assert "step 3 is damaged and was skipped" in report.notes[0]
        save(checkpointer, 3)
    for store in paths:
        assert fs.open(store, 3).verify().sound


def test_damage_in_every_tier_raises_or_falls_back(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    _run(range(1, 4), near, far)
    for store in paths:
        _damage(store, 3)
    into, events = state(0), []
    with _tiers(near, far, events=events) as checkpointer:
        with pytest.raises(DamagedError):
            checkpointer.load(into)
        report = checkpointer.load(into, fallback=True)
        assert (report.step, report.tier) == (2, str(near))
        assert is_of(2, into)
        save(checkpointer, 3)
        assert checkpointer.load(into).step == 3
    assert [event.damaged_step for event in told(events, fs.FellBack)] == [3]
    for store in paths:
        assert len([name for name in store.iterdir() if name.name.startswith(SUPERSEDED)]) == 1
        assert fs.open(store, 3).verify().sound


def test_absence_is_not_known_while_a_tier_is_down(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, inner = paths
    _run(range(1, 3), near, inner)
    shutil.rmtree(near)
    far = Unsteady(LocalStore(inner, ENGINE))
    far.down = True
    with _tiers(near, far) as checkpointer:
        with pytest.raises(StorageError, match="another tier does not answer"):
            checkpointer.latest()
        with pytest.raises(StorageError, match="another tier does not answer"):
            checkpointer.load(state(0))
        far.down = False
        assert checkpointer.load(state(0)).step == 2
    with _tiers(near, MemoryStore(location="m")) as checkpointer:
        with pytest.raises(NoCheckpointError, match="no tier has a checkpoint"):
            checkpointer.load(state(0))
        assert checkpointer.latest() is None


def test_a_tier_that_is_down_is_passed_over(clock: Clock, paths: tuple[Path, Path]) -> None:
    inner, far = paths
    _run(range(1, 3), inner, far)
    near = Unsteady(LocalStore(inner, ENGINE))
    near.down = True
    with _tiers(near, far) as checkpointer:
        report = checkpointer.load(state(0))
        assert (report.step, report.tier, report.why) == (2, str(far), f"{inner} does not answer")


def test_a_rewind_holds_in_a_tier_that_was_down(
    clock: Clock, paths: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    near, inner = paths
    far = Unsteady(LocalStore(inner, ENGINE))
    with _tiers(near, far) as checkpointer:
        for step in (10, 20, 30, 40):
            save(checkpointer, step)
        far.down = True
        checkpointer.rewind(20)
        save(checkpointer, 21)
    assert catalog.steps(LocalStore(inner)) == (10, 20, 30, 40)
    with _tiers(near, inner) as checkpointer:
        into = state(0)
        assert checkpointer.load(into).step == 21
        save(checkpointer, 25)
    set_aside = "step 40 was saved before a rewind to an earlier step, so it is set aside as .superseded-00000040-"
    assert f"{inner}: {set_aside}" in caplog.text
    assert catalog.steps(LocalStore(inner)) == (10, 20, 21, 25)
    shutil.rmtree(near)
    with _tiers(near, inner) as checkpointer:
        assert checkpointer.load(state(0)).step == 25


def test_a_rewind_that_comes_back_with_the_same_run(clock: Clock, paths: tuple[Path, Path]) -> None:
    """The tier is back while the run goes on: first it is set right, then it gets what is new, of an old number too."""
    near, inner = paths
    far = Unsteady(LocalStore(inner, ENGINE))
    with _tiers(near, far) as checkpointer:
        for step in (10, 20, 30):
            save(checkpointer, step)
        far.down = True
        checkpointer.rewind(10)
        checkpointer.save(30, state(31)).committed.result()
        far.down = False
        clock.advance(600)
    assert catalog.steps(LocalStore(inner)) == (10, 30)
    assert (fs.open(inner).read("weights") == state(31)["weights"]).all()


def test_rewinding_to_a_step_that_only_a_farther_tier_has(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    with _tiers(near, far, keep=1) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
        with pytest.raises(NoCheckpointError):
            checkpointer.rewind(7)
        checkpointer.rewind(1)
        into = state(0)
        report = checkpointer.load(into)
        assert (report.step, report.tier) == (1, str(far))
        save(checkpointer, 2)
    assert [catalog.steps(LocalStore(store)) for store in paths] == [(2,), (1, 2)]


def test_a_start_without_the_tier_that_has_the_newest(clock: Clock, tmp_path: Path) -> None:
    """Two of three tiers are lost for a while; training goes on from what is left, and that is what counts."""
    near, middle, inner = (tmp_path / name for name in ("near", "middle", "far"))
    far = Unsteady(LocalStore(inner, ENGINE))
    with _tiers(near, fs.Tier(middle, every=5), far) as checkpointer:
        for step in range(1, 9):
            save(checkpointer, step)
    assert catalog.steps(LocalStore(middle)) == (1, 6)
    shutil.rmtree(near)
    far = Unsteady(LocalStore(inner, ENGINE))
    far.down = True
    with _tiers(near, fs.Tier(middle, every=5), far) as checkpointer:
        assert checkpointer.load(state(0)).step == 6
        checkpointer.save(7, state(70)).committed.result()
        far.down = False
        clock.advance(600)
        assert checkpointer.load(state(0)).step == 7
    assert catalog.steps(LocalStore(inner)) == (1, 2, 3, 4, 5, 6, 7)
    assert (fs.open(inner).read("weights") == state(70)["weights"]).all()


def test_the_same_list_in_another_order(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    _run(range(1, 4), fs.Tier(near, keep=1), far)
    with _tiers(far, near) as checkpointer:
        report = checkpointer.load(state(0))
        assert (report.step, report.tier) == (3, str(far))
        save(checkpointer, 4)
    assert [catalog.steps(LocalStore(store)) for store in paths] == [(3, 4), (1, 2, 3, 4)]


def test_a_tier_that_is_dropped_and_comes_back(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    _run(range(1, 3), near, far)
    _run(range(3, 5), near)
    with fs.Checkpointer(near, engine=ENGINE) as alone:
        assert alone.load(state(0)).step == 4
    _run(range(5, 6), near, far)
    assert [catalog.steps(LocalStore(store)) for store in paths] == [(1, 2, 3, 4, 5), (1, 2, 3, 4, 5)]


def test_a_rewind_while_a_tier_is_dropped_holds_when_it_comes_back(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    _run(range(1, 5), near, far)
    with fs.Checkpointer(near, engine=ENGINE) as alone:
        alone.rewind(2)
        alone.save(3, state(30)).committed.result()
    with _tiers(near, far) as checkpointer:
        assert checkpointer.load(state(0)).step == 3
        save(checkpointer, 5)
    assert catalog.steps(LocalStore(far)) == (1, 2, 3, 5)
    assert (fs.open(far, 3).read("weights") == state(30)["weights"]).all()


def test_a_first_tier_that_was_away_for_a_rewind_is_set_right_first(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    _run(range(1, 5), near, far)
    with fs.Checkpointer(far, engine=ENGINE) as alone:
        alone.rewind(2)
        alone.save(3, state(30)).committed.result()
    events: list[Any] = []
    into = state(0)
    with _tiers(near, far, events=events) as checkpointer:
        report = checkpointer.load(into)
        assert (report.step, report.tier) == (3, str(far))
        assert report.why == f"{near} has the step from before a rewind"
        assert (into["weights"] == state(30)["weights"]).all()
        save(checkpointer, 4)
    assert [catalog.steps(LocalStore(store)) for store in paths] == [(1, 2, 4), (1, 2, 3, 4)]
    assert not told(events, fs.FlushDropped)


@pytest.mark.parametrize("first", [True, False])
def test_another_runs_store_is_refused_by_name(first: bool, clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    _run(range(1, 2), near)
    with fs.Checkpointer(far, engine=ENGINE) as other:
        save(other, 9)
    files = sorted(path.name for path in far.iterdir())
    with _tiers(near, far) as checkpointer:
        if first:
            with pytest.raises(NotAStoreError, match=f"{far} is a store of another run"):
                checkpointer.load(state(0))
        with pytest.raises(NotAStoreError, match=f"{far} is a store of another run"):
            checkpointer.save(2, state(2))
    assert sorted(path.name for path in far.iterdir()) == files
    assert catalog.steps(LocalStore(near)) == (1,)


def test_what_is_no_store_is_refused_by_name(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    far.mkdir()
    (far / "thesis.tex").write_text("precious")
    with _tiers(near, far) as checkpointer, pytest.raises(NotAStoreError, match=str(far)):
        checkpointer.load(state(0))


def test_a_tier_that_another_job_writes_into_is_refused(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    _run(range(1, 2), near, far)
    with fs.Checkpointer(far, engine=ENGINE) as other:
        save(other, 2)
        with _tiers(near, far) as checkpointer, pytest.raises(fs.LockedError, match=str(far)):
            checkpointer.save(3, state(3))
    with fs.Checkpointer(near, engine=ENGINE) as free:
        save(free, 3)


def test_the_newest_of_several_stores_opens(clock: Clock, paths: tuple[Path, Path]) -> None:
    near, far = paths
    _run(range(1, 4), fs.Tier(near, keep=1), far)
    assert fs.open([near, far]).path.startswith(str(near))
    assert fs.open([near, far], step=2).path.startswith(str(far))
    _damage(near, 3, "manifest.json", 60)
    assert fs.open([near, far]).path == f"{far}/step-00000003"
    with pytest.raises(NoCheckpointError):
        fs.open([near, far], step=9)
