"""torchft's replica groups over gloo: one is killed and healed, all are killed and resumed, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import is_installed
from torchft_job import check, job, undisturbed

import flowstone as fs

pytestmark = pytest.mark.skipif(
    not is_installed("torchft-nightly"), reason="`make test-integrations` installs torchft-nightly"
)


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a group ends with, where nothing happens: groups of one rank, and of two that share a model."""
    return undisturbed(tmp_path_factory.mktemp("torchft") / "whole", request.param)


def test_all_groups_are_killed_and_resume_to_the_last_bit(tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    with job(tmp_path / "killed", len(whole)) as disturbed:
        for number in range(2):
            disturbed.start(f"group_{number}", number, kill_at=6)
        codes = disturbed.end("group_0", "group_1")
        assert -signal.SIGKILL in codes, disturbed.said()
        disturbed.kill()
        for number in range(2):
            disturbed.start(f"group_{number}", number, other_weights=True)
        assert disturbed.end("group_0", "group_1") == [0, 0], disturbed.said()
        names = [(f"group_{number}", rank) for number in range(2) for rank in range(len(whole))]
        loaded = {disturbed.told(*name)["loaded"] for name in names}
        assert len(loaded) == 1
        assert loaded <= set(range(2, 7))
        notes = {disturbed.told("group_1", rank)["note"] for rank in range(len(whole))}
        assert notes == {"group_0" if len(whole) == 1 else "begun"}, "of the group that saves"
        check(disturbed, whole, "group_0", "group_1")


@pytest.mark.parametrize(("dies", "number", "comes_back_as"), [
    ("group_1", 1, "group_1"), ("group_0", 0, "group_0"), ("group_0", 0, "group_2"),
])
def test_a_group_is_killed_and_healed_while_the_other_waits(
    tmp_path: Path, whole: list[dict[str, Any]], dies: str, number: int, comes_back_as: str
) -> None:
    stays = "group_0" if dies == "group_1" else "group_1"
    with job(tmp_path / "healed", len(whole)) as disturbed:
        disturbed.start(dies, number, kill_at=6)
        disturbed.start(stays, 1 - number)
        assert disturbed.end(dies) == [-signal.SIGKILL], disturbed.said()
        disturbed.start(comes_back_as, number, other_weights=True)
        assert disturbed.end(comes_back_as, stays) == [0, 0], disturbed.said()
        check(disturbed, whole, comes_back_as, stays, lost=(5, 6) if dies == "group_0" else ())


def test_what_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torchft import Manager

    from flowstone.adapters.torchft import ReplicaCheckpointer, package

    manager: Any = object()  # what is refused is refused before the manager is asked for anything
    with pytest.raises(fs.ArgumentError, match="section 'torchft' is reserved for the manager"):
        ReplicaCheckpointer(tmp_path / "run", manager, {"torchft": 1})
    with pytest.raises(fs.ArgumentError, match="`every` must be a whole number of at least 1, got 0"):
        ReplicaCheckpointer(tmp_path / "run", manager, {}, every=0)
    monkeypatch.setattr(package, "_version", lambda: "9.9.9")
    with pytest.raises(fs.ArgumentError, match="`every` must be a whole number of at least 1, got 0"):
        ReplicaCheckpointer(tmp_path / "run", manager, {}, every=0)
    assert "Flowstone's adapter was not tested with torchft 9.9.9" in caplog.text
    monkeypatch.delattr(Manager, "participating_rank")
    with pytest.raises(fs.FrameworkError, match=r"participating_rank does not exist[\s\S]*torchft==2026\.10\.26"):
        ReplicaCheckpointer(tmp_path / "run", manager, {})
    assert not (tmp_path / "run").exists()
