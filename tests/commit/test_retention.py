"""Which of a store's own checkpoints expire: the decision as a pure function, then the removed and the kept files."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recording import Recording

import flowstone as fs
from flowstone.commit import catalog, publish, retention
from flowstone.config import Keep
from flowstone.errors import StorageError
from flowstone.events.phases import Event, LeftAlone, RemovalFailed, Removed
from flowstone.store.local import LocalStore
from forge import flip


def flowstone_store(path: Path) -> LocalStore:
    return LocalStore(path, fs.EngineOptions())


STEPS = st.sets(st.integers(0, 50)).map(sorted)


@given(STEPS, st.integers(1, 5), st.none() | st.integers(1, 10))
def test_retention_spares_the_newest_and_the_multiples(steps: list[int], last: int, every: int | None) -> None:
    verdicts = retention.decide_retention(steps, Keep(last=last, every=every))
    kept = {verdict.step for verdict in verdicts if verdict.keep}
    expected = set(steps[-last:]) | {step for step in steps if every is not None and step % every == 0}
    assert kept == expected
    assert [verdict.step for verdict in verdicts] == steps
    assert all(verdict.reason for verdict in verdicts)


@given(STEPS)
def test_without_retention_everything_is_kept(steps: list[int]) -> None:
    assert all(verdict.keep for verdict in retention.decide_retention(steps, None))


@given(STEPS, st.sets(st.integers(0, 60)), st.sets(st.integers(0, 50)), st.none() | st.integers(0, 50))
def test_a_rule_decides_over_own_committed_steps_and_cannot_give_up_the_newest(
    steps: list[int], chosen: set[int], foreign: set[int], committed: int | None
) -> None:
    seen: list[tuple[int, ...]] = []
    verdicts = retention.decide_retention(
        steps, lambda own: seen.append(tuple(own)) or chosen, committed=committed,
        foreign=lambda step: "elsewhere" if step in foreign else None,
    )
    own = [s for s in steps if (s not in foreign or s == committed) and (committed is None or s <= committed)]
    assert seen == ([tuple(own)] if own else [])
    assert {v.step for v in verdicts if not v.keep} == set(own[:-1]) - chosen
    assert [v.step for v in verdicts] == steps
    assert all(v.reason for v in verdicts)


def test_a_checkpointer_keeps_what_the_rule_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    best = {1: 1, 2: 1, 3: 1, 4: 4}
    rules: list[object] = [lambda steps: {best[steps[-1]], steps[-1]}, lambda steps: 1 / 0]
    with fs.Checkpointer(tmp_path, keep=rules[0]) as checkpointer:  # type: ignore[arg-type]
        kept = []
        for step in best:
            checkpointer.save(step, {"w": torch.zeros(4)})
            checkpointer.wait()
            checkpointer.finish_saves(str(tmp_path))
            kept.append(catalog.steps(flowstone_store(tmp_path)))
    assert kept == [(1,), (1, 2), (1, 3), (4,)]
    with fs.Checkpointer(tmp_path, keep=rules[1]) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(5, {"w": torch.zeros(4)})
    assert catalog.steps(flowstone_store(tmp_path)) == (4, 5)
    assert "retention failed" in caplog.text


@pytest.mark.parametrize(("last", "every"), [(0, None), (-1, None), (1, 0), (1, -5)])
def test_retention_that_could_keep_nothing_is_refused(last: int, every: int | None) -> None:
    with pytest.raises(ValueError, match="Keep"):
        Keep(last=last, every=every)


def test_prune_takes_the_name_away_first_then_the_manifest(several: Path) -> None:
    store = Recording(several)
    store.lock("this job")
    pairs: list[tuple[str, object]] = []
    verdicts = retention.decide_retention((1, 2, 3, 4), Keep(last=3))
    retention.remove_expired(store, verdicts, lambda name, _, error: pairs.append((name, error)))
    assert store.done[0].startswith("rename step-00000001 .deleting")
    assert store.done[1] == "sync "
    assert store.done[2] == "remove manifest.json"
    assert store.done[-1].startswith("remove .deleting")
    assert pairs == [("step-00000001", None)]
    assert catalog.steps(store) == (2, 3, 4)


def test_a_removal_that_fails_is_told_and_the_others_go_on(several: Path) -> None:
    store = Recording(several, refuse=lambda name: name.startswith("rename step-00000001"))
    store.lock("this job")
    pairs: list[tuple[str, str, object]] = []
    verdicts = retention.decide_retention((1, 2, 3, 4), Keep(last=2))
    retention.remove_expired(store, verdicts, lambda *value: pairs.append(value))
    assert [(name, reason) for name, reason, _ in pairs] == [
        ("step-00000001", "older than the newest 2"), ("step-00000002", "older than the newest 2")
    ]
    assert isinstance(pairs[0][2], StorageError)
    assert pairs[1][2] is None
    assert catalog.steps(store) == (1, 3, 4)


@given(STEPS, st.integers(1, 5), st.none() | st.integers(1, 10), st.sets(st.integers(0, 50)), st.data())
def test_what_is_foreign_or_newer_stays_and_does_not_count(
    steps: list[int], last: int, every: int | None, foreign: set[int], data: st.DataObject
) -> None:
    own = [step for step in steps if step not in foreign]
    committed = data.draw(st.sampled_from(own)) if own else None
    verdicts = retention.decide_retention(
        steps, Keep(last=last, every=every), committed=committed,
        foreign=lambda step: "is somebody's" if step in foreign else None,
    )
    assert [verdict.step for verdict in verdicts] == steps
    gone = {verdict.step for verdict in verdicts if not verdict.keep}
    older = own if committed is None else [step for step in own if step <= committed]
    assert gone == {step for step in older[:-last] if every is None or step % every}
    assert committed not in gone


def test_whether_a_step_is_foreign_is_asked_only_where_it_matters() -> None:
    asked = []
    retention.decide_retention(range(0, 2000, 10), Keep(last=2, every=100), committed=1990, foreign=asked.append)
    assert sorted(asked) == [step for step in range(0, 1990, 10) if step % 100 or step == 1980]


# What a job removes, and what it leaves


def state(value: float = 1.0) -> dict[str, object]:
    return {"w": torch.full((100,), value), "n": 3}


def saved(path: Path, *steps: int, **options: object) -> list[Event]:
    """Save these steps by a job of their own; what it said."""
    events: list[Event] = []
    with fs.Checkpointer(path, on_event=events.append, **options) as checkpointer:  # type: ignore[arg-type]
        for step in steps:
            checkpointer.save(step, state(float(step))).committed.result()
    return events


def steps_of(path: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted(path.glob("step-*")) if path.suffix == ""]


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def left(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.name, event.reason) for event in events if isinstance(event, LeftAlone)]


@pytest.mark.parametrize("how", [fs.Keep(last=2), 2])
def test_a_number_keeps_the_newest_so_many(store: Path, how: fs.Keep | int) -> None:
    saved(store, 1, 2, 3, 4, keep=how)
    assert steps_of(store) == [3, 4]


def test_a_step_that_is_a_link_is_read_and_never_removed_nor_what_it_leads_to(store: Path, tmp_path: Path) -> None:
    saved(store, 1, 2, 3)
    archive = tmp_path / "archive"
    shutil.move(store / "step-00000001", archive)
    (store / "step-00000001").symlink_to(archive)
    before = files(archive)
    events = saved(store, 4, 5, keep=fs.Keep(last=1))
    assert files(archive) == before
    assert steps_of(store) == [1, 5]
    assert left(events) == [("step-00000001", "is a link")], "told once"
    assert fs.open(store, 1).verify().sound
    blank = state(0.0)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.load(blank, step=1)
    assert blank["w"].tolist() == [1.0] * 100  # type: ignore[attr-defined]


def test_a_link_that_takes_a_steps_place_at_the_last_moment_does_not_empty_what_it_leads_to(
    store: Path, tmp_path: Path
) -> None:
    saved(store, 1, 2)
    archive = tmp_path / "archive"
    shutil.copytree(store / "step-00000001", archive)
    before = files(archive)
    opened = Recording(store)
    opened.lock("this job")
    real = opened.rename

    def rename(source: str, target: str) -> None:
        shutil.rmtree(store / source)
        (store / source).symlink_to(archive)
        real(source, target)

    with mock.patch.object(opened, "rename", rename):
        errors: list[object] = []
        retention.remove_expired(
            opened, retention.decide_retention((1, 2), Keep(last=1)), lambda *value: errors.append(value[2])
        )
    assert files(archive) == before
    assert isinstance(errors[0], StorageError)
    opened.close()


def test_links_inside_of_a_step_are_removed_and_not_what_they_lead_to(store: Path, tmp_path: Path) -> None:
    saved(store, 1, 2)
    segment = store / "step-00000001" / "rank-00000.safetensors"
    shutil.move(segment, tmp_path / "kept")
    segment.symlink_to(tmp_path / "kept")
    before = (tmp_path / "kept").read_bytes()
    saved(store, 3, keep=1)
    assert steps_of(store) == [3]
    assert not list(store.glob(".deleting-*"))
    assert (tmp_path / "kept").read_bytes() == before


@pytest.mark.parametrize(
    "name", [".saving-00000009-a", ".deleting-00000009-b", ".flowstone.json-c", ".flowstone-tuning-d"]
)
def test_a_leftover_that_is_a_link_is_not_swept(store: Path, tmp_path: Path, name: str) -> None:
    saved(store, 1)
    archive = tmp_path / "archive"
    shutil.copytree(store / "step-00000001", archive)
    (store / name).symlink_to(archive)
    before = files(archive)
    events = saved(store, 2, keep=1)
    assert files(archive) == before
    assert (store / name).is_symlink()
    assert left(events) == [(name, "is a link, which Flowstone did not make")]


# Steps that are not this job's


def test_what_was_just_committed_stays_when_a_higher_step_of_another_store_is_copied_beside(
    store: Path, tmp_path: Path
) -> None:
    saved(tmp_path / "other", 9000)
    events: list[Event] = []
    with fs.Checkpointer(store, keep=1, on_event=events.append) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state()).committed.result()
        shutil.copytree(tmp_path / "other" / "step-00009000", store / "step-00009000")
        for step in (3, 4):
            checkpointer.save(step, state()).committed.result()
    assert steps_of(store) == [4, 9000]
    ((name, reason),) = left(events)
    assert name == "step-00009000"
    assert re.fullmatch(r"was saved into another store; it is newer than step \d, so load\(\) loads it", reason)


def test_what_was_just_committed_stays_when_a_higher_step_of_this_store_is_put_back(
    store: Path, tmp_path: Path
) -> None:
    saved(store, 1, 9)
    shutil.move(store / "step-00000009", tmp_path / "backup")
    with fs.Checkpointer(store, keep=2) as checkpointer:
        checkpointer.save(2, state()).committed.result()
        shutil.copytree(tmp_path / "backup", store / "step-00000009")
        for step in (3, 4):
            checkpointer.save(step, state()).committed.result()
    assert steps_of(store) == [3, 4, 9]


def test_steps_of_another_store_are_neither_counted_nor_removed(store: Path, tmp_path: Path) -> None:
    saved(tmp_path / "other", 1, 2, 3)
    store.mkdir()
    for step in (1, 2, 3):
        shutil.copytree(tmp_path / "other" / f"step-{step:08d}", store / f"step-{step:08d}")
    saved(store, 4, 5, 6, keep=2)
    assert steps_of(store) == [1, 2, 3, 5, 6]


def test_a_step_whose_manifest_cannot_be_read_is_neither_counted_nor_removed(store: Path) -> None:
    saved(store, 1, 2, 3)
    flip(store / "step-00000002" / "manifest.json", 100)
    events = saved(store, 4, 5, keep=2)
    assert steps_of(store) == [2, 4, 5]
    assert [name for name, _ in left(events)] == ["step-00000002"]


def test_directories_without_a_manifest_are_not_looked_at(store: Path) -> None:
    saved(store, 1)
    (store / "step-00000000").mkdir()
    (store / "step-00000000" / "notes.txt").write_text("mine")
    saved(store, 2, 3, keep=1)
    assert (store / "step-00000000" / "notes.txt").read_text() == "mine"
    assert steps_of(store) == [0, 3]


def test_saving_below_a_step_of_another_store_says_whose_it_is_and_what_to_do(store: Path, tmp_path: Path) -> None:
    saved(tmp_path / "other", 9000)
    saved(store, 1)
    shutil.copytree(tmp_path / "other" / "step-00009000", store / "step-00009000")
    with fs.Checkpointer(store) as checkpointer:
        with pytest.raises(fs.StepExistsError) as caught:
            checkpointer.save(2, state())
        assert caught.value.facts["found"] == "newest step 9000, which was saved into another store"
        assert "rewind(1)" in str(caught.value.facts["next"])
        checkpointer.rewind(1)
        checkpointer.save(2, state()).committed.result()
    assert steps_of(store) == [1, 2]


def test_a_save_that_failed_is_not_taken_for_one_that_somebody_put_there(store: Path, tmp_path: Path) -> None:
    saved(tmp_path / "other", 9000)
    with fs.Checkpointer(store, on_error="continue") as checkpointer:
        checkpointer.save(1, state()).committed.result()
        shutil.copytree(tmp_path / "other" / "step-00009000", store / "step-00009000")
        with mock.patch.object(publish, "publish", side_effect=StorageError("made up")):
            assert checkpointer.save(2, state()).committed.exception() is not None
        assert checkpointer.save(3, state()).committed.result().step == 3


def test_a_directory_in_a_steps_place_is_told_before_anything_is_written(store: Path) -> None:
    saved(store, 1)
    (store / "step-00000002").mkdir()
    with fs.Checkpointer(store) as checkpointer:
        with pytest.raises(fs.StepExistsError, match="which is not a checkpoint") as caught:
            checkpointer.save(2, state())
        assert "move step-00000002 away" in str(caught.value.facts["next"])
        checkpointer.save(3, state()).committed.result()


# What users put into a step


@pytest.mark.parametrize("kind", ["a file", "a directory", "a link"])
def test_what_a_user_has_put_into_a_step_stays_and_the_steps_space_is_freed(
    store: Path, tmp_path: Path, kind: str
) -> None:
    saved(store, 1, 2, 3)
    for step in (1, 2):
        mine = store / f"step-{step:08d}" / "eval"
        if kind == "a file":
            mine.write_text("mine")
        elif kind == "a directory":
            mine.mkdir()
            (mine / "rank-00000.safetensors").write_text("mine")
        else:
            mine.symlink_to(tmp_path)
    events = saved(store, 4, 5, keep=1)
    assert steps_of(store) == [5]
    assert not list(store.glob(".deleting-*"))
    for step in (1, 2):
        assert [path.name for path in (store / f"step-{step:08d}.left").iterdir()] == ["eval"]
        kept = [p.read_text() for p in (store / f"step-{step:08d}.left").rglob("*") if p.is_file()]
        assert kept == ["mine"] * (kind != "a link")
    assert left(events) == [
        (f"step-{step:08d}", (f"the checkpoint is removed, but step-{step:08d}.left remains: it has eval, "
                              "which Flowstone did not write"))
        for step in (1, 2)
    ]
    assert [event.name for event in events if isinstance(event, Removed)] == [f"step-{n:08d}" for n in (1, 2, 3, 4)]


def test_a_deletion_that_died_beside_a_users_file_is_finished_by_the_next_writer(store: Path) -> None:
    saved(store, 1, 2)
    shutil.copytree(store / "step-00000001", store / ".deleting-00000000-dead")
    (store / ".deleting-00000000-dead" / "manifest.json").unlink()
    (store / ".deleting-00000000-dead" / "notes.txt").write_text("mine")
    (store / "step-00000000.left").mkdir()
    saved(store, 3)
    assert not list(store.glob(".deleting-*"))
    assert files(store / "step-00000000.left-dead") == {"notes.txt": b"mine"}


def test_a_file_that_a_network_file_system_keeps_for_a_reader_goes_later(store: Path) -> None:
    saved(store, 1, 2)
    held = store / "step-00000001" / ".nfs000000000000001"
    held.write_text("what a reader has open")
    events = saved(store, 3, keep=1)
    (deleting,) = store.glob(".deleting-00000001-*")
    assert [path.name for path in deleting.iterdir()] == [held.name]
    assert [event.name for event in events if isinstance(event, RemovalFailed)] == ["step-00000001"]
    assert left(events) == []
    (deleting / held.name).unlink()
    saved(store, 4, keep=1)
    assert not list(store.glob(".deleting-*"))


def test_a_file_that_cannot_be_removed_keeps_no_other_ones_space(store: Path) -> None:
    saved(store, 1, 2)
    blocked = store / "step-00000001" / "index.safetensors"
    blocked.unlink()
    blocked.mkdir()
    (blocked / "inner").write_text("mine")
    saved(store, 3, keep=1)
    (deleting,) = store.glob(".deleting-00000001-*")
    assert [path.name for path in deleting.iterdir()] == ["index.safetensors"]


# A job that has lost its lock


def _remove(store: Path) -> None:
    (store / "flowstone.lock").unlink(missing_ok=True)


def _replace(store: Path) -> None:
    (store / "new").write_text("somebody\n")
    os.replace(store / "new", store / "flowstone.lock")


@pytest.mark.parametrize("happens", [_remove, _replace])
def test_a_job_that_loses_its_lock_during_a_save_publishes_and_removes_nothing(
    store: Path, happens: Callable[[Path], None]
) -> None:
    events: list[Event] = []
    real = publish.chunk_digests

    def lose(data: bytes) -> tuple[str, ...]:
        if (store / "step-00000002").exists() and not (store / "step-00000003").exists():
            happens(store)
        return real(data)

    with fs.Checkpointer(store, keep=1, on_error="continue", on_event=events.append) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state()).committed.result()
        with mock.patch.object(publish, "chunk_digests", lose):
            error = checkpointer.save(3, state()).committed.exception()
        assert isinstance(error, fs.LockedError)
        assert "has lost the lock" in str(error)
        assert steps_of(store) == [2]
        assert checkpointer.save(4, state()).committed.result().step == 4, "the next one asks for the lock again"
    assert steps_of(store) == [4]
    assert not [path for path in store.iterdir() if path.name.startswith(".")]


def test_a_job_whose_lock_another_one_has_taken_is_told_at_its_next_save(store: Path) -> None:
    with fs.Checkpointer(store, keep=1) as checkpointer:
        checkpointer.save(1, state()).committed.result()
        _remove(store)
        with fs.Checkpointer(store) as other:
            other.save(2, state()).committed.result()
            with pytest.raises(fs.LockedError, match="another Checkpointer of this process"):
                checkpointer.save(3, state())
        with pytest.raises(fs.StepExistsError):
            checkpointer.save(2, state())
        checkpointer.save(3, state()).committed.result()
    assert steps_of(store) == [3], "steps of both jobs are this store's"


def test_retention_stops_once_the_lock_is_lost(store: Path) -> None:
    saved(store, 1, 2, 3)
    opened = Recording(store, refuse=lambda name: name.startswith("sync") and (_remove(store) or False))
    opened.lock("this job")
    with pytest.raises(fs.LockedError):
        retention.remove_expired(opened, retention.decide_retention((1, 2, 3), Keep(last=1)), lambda *_: None)
    assert steps_of(store) == [2, 3]
    opened.close()
