"""A tier that cannot be used when a Checkpointer is created: the next one is used, and that is reported."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import flowstone as fs
from flowstone.errors import LockedError, StorageError
from flowstone.store import holders
from flowstone.store.local import LocalStore
from flowstone.tiered import writer
from memory_agent import own_agent

SECRET, ANOTHER = "32 characters from /dev/urandom!", "32 others of these, for a test.."


@pytest.fixture(autouse=True)
def agent() -> Iterator[Path]:
    with own_agent() as directory:
        yield directory


def _memory(secret: str = SECRET) -> fs.PeerMemory:
    return fs.PeerMemory("run", secret=secret, interface="127.0.0.1")


def _state(step: int) -> dict[str, object]:
    return {"w": np.full(1000, step), "step": step}


def _saved(tiers: list[object], step: int) -> None:
    with fs.Checkpointer(tiers) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(step, _state(step)).committed.result()


def test_a_job_whose_first_tier_refuses_goes_on_from_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _saved([_memory(), tmp_path / "disk"], 1)
    reported: list[object] = []
    tiers = [_memory(ANOTHER), tmp_path / "disk"]
    with fs.Checkpointer(tiers, on_event=reported.append) as checkpointer:
        assert "memory://run cannot be used and is left out; saves go to" in caplog.text
        assert "another secret" in caplog.text
        state = _state(0)
        report = checkpointer.load(state)
        assert (report.step, report.tier) == (1, str(tmp_path / "disk"))
        checkpointer.save(2, _state(2)).committed.result()
        checkpointer.drain(0.1)
    assert [event for event in reported if isinstance(event, fs.TierFailed) and event.tier == "memory://run"]
    assert fs.open(tmp_path / "disk").step == 2


def test_what_the_tier_that_was_left_out_has_beyond_that_does_not_come_back(tmp_path: Path) -> None:
    _saved([_memory(), fs.Tier(tmp_path / "disk", every=5)], 1)
    _saved([_memory(), fs.Tier(tmp_path / "disk", every=5)], 2)
    assert fs.open(tmp_path / "disk").step == 1
    _saved([_memory(ANOTHER), tmp_path / "disk"], 2)
    with fs.Checkpointer([_memory(), tmp_path / "disk"]) as checkpointer:
        newest, again = checkpointer.latest(), fs.open(tmp_path / "disk")
        assert newest is not None
        assert newest.manifest.id == again.manifest.id, "not the other step 2"
        checkpointer.save(3, _state(3)).committed.result()
        assert fs.open(_memory(), step=3).manifest.store == again.manifest.store


def test_training_does_not_begin_anew_because_the_one_tier_with_a_checkpoint_refuses(tmp_path: Path) -> None:
    _saved([_memory(), fs.Tier(tmp_path / "disk")], 1)
    with (
        fs.Checkpointer([_memory(ANOTHER), tmp_path / "empty"]) as checkpointer,
        pytest.raises(StorageError, match="another tier does not answer"),
    ):
        checkpointer.latest()


def test_without_another_durable_tier_the_refusal_is_raised(tmp_path: Path) -> None:
    with fs.Checkpointer(_memory()) as checkpointer:
        checkpointer.save(1, _state(1)).committed.result()
    with pytest.raises(StorageError, match="another secret"):
        fs.Checkpointer(_memory(ANOTHER))


def test_a_farther_tier_whose_holder_cannot_be_seen_is_refused_by_its_lock_and_not_for_its_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grace of a lock takes up all the time that a tier has to answer."""
    monkeypatch.setattr(holders, "LOCK_GRACE_S", 1.0)
    monkeypatch.setattr(writer, "TIER_ANSWER_S", 1.0)
    tiers = [tmp_path / "near", tmp_path / "far"]
    _saved(list(tiers), 1)
    other = LocalStore(tmp_path / "far")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(holders, "machine_and_process", lambda: ("another machine", "1 1"))
        other.lock("another job")
    with fs.Checkpointer(tiers) as checkpointer:
        with pytest.raises(LockedError, match=str(tmp_path / "far")) as caught:
            checkpointer.save(2, _state(2))
        assert caught.value.facts["holder"] == "another job"
        assert "cannot be seen from here" in str(caught.value)
        other.close()
        checkpointer.save(2, _state(2)).committed.result()
    assert fs.open(tmp_path / "far").step == 2


def test_a_tier_that_does_not_answer_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "TIER_ANSWER_S", 1.0)
    may_answer, exists = threading.Event(), LocalStore.exists

    def hung(store: LocalStore, path: str) -> bool:
        if store.root == tmp_path / "far" and threading.current_thread().name == "flowstone-flush":
            assert may_answer.wait(60)
        return exists(store, path)

    monkeypatch.setattr(LocalStore, "exists", hung)
    with fs.Checkpointer([tmp_path / "near", tmp_path / "far"]) as checkpointer:
        checkpointer.save(1, _state(1)).committed.result()
        assert caplog.text.count("has not answered within 1 s") == 1
        may_answer.set()
        checkpointer.drain()
    assert fs.open(tmp_path / "far").step == 1
