"""torchft's replica groups over gloo: one is killed and healed, all are killed and resumed, to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobs import HERE, is_installed

import flowstone as fs

pytestmark = pytest.mark.skipif(
    not is_installed("torchft-nightly"), reason="`make test-integrations` installs torchft-nightly"
)
STEPS = 10


class Job:
    """Replica groups on one lighthouse, each a process."""

    def __init__(self, folder: Path, lighthouse: str) -> None:
        self.folder, self.lighthouse, self.runs = folder, lighthouse, folder / "runs"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, number: int, **told: Any) -> None:
        told |= {
            "lighthouse": self.lighthouse, "name": name, "number": number, "runs": str(self.runs),
            "out": str(self.folder / f"{name}.json"),
        }
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.txt").open("a") as said:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(HERE / "torchft_act.py"), json.dumps(told)], stdout=said, stderr=said,
                env=environment,
            )

    def end(self, *names: str) -> list[int]:
        """Exit codes; a group that failed ends the wait for the others."""
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline:
            codes = [self.processes[name].poll() for name in names]
            if None not in codes or not {0, None} >= set(codes):
                break
            time.sleep(0.05)
        return [-99 if code is None else code for code in codes]

    def said(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.folder.glob("*.txt")))

    def told(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return found


@contextmanager
def job(folder: Path) -> Iterator[Job]:
    from torchft.coordination import LighthouseServer

    folder.mkdir()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=200, quorum_tick_ms=50)
    port = lighthouse.address().rpartition(":")[2]
    made = Job(folder, f"http://127.0.0.1:{port}")
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()
        lighthouse.shutdown()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an undisturbed job ends with."""
    with job(tmp_path_factory.mktemp("torchft") / "whole") as calm:
        calm.start("group_0", 0)
        calm.start("group_1", 1)
        assert calm.end("group_0", "group_1") == [0, 0], calm.said()
        first, second = calm.told("group_0"), calm.told("group_1")
    assert first["parts"] == second["parts"]
    assert first["loaded"] is None
    assert first["manager"]["step"] == STEPS
    return first


def check(job: Job, whole: dict[str, Any], *names: str, lost: tuple[int, ...] = ()) -> None:
    """The groups ended as those that were not disturbed, and every step of them is whole in the store.

    lost  steps of which the save may have died with the group that saved
    """
    for name in names:
        assert job.told(name)["parts"] == whole["parts"], job.said()
        assert job.told(name)["manager"] == whole["manager"]
    for step in range(1, STEPS + 1):
        if step in lost and not (job.runs / f"step-{step:08d}").exists():
            continue
        saved = fs.open(job.runs, step)
        assert saved.verify().sound
        assert saved.objects["torchft"]["step"] == step


def test_all_groups_are_killed_and_resume_to_the_last_bit(tmp_path: Path, whole: dict[str, Any]) -> None:
    with job(tmp_path / "killed") as disturbed:
        for number in range(2):
            disturbed.start(f"group_{number}", number, kill_at=6)
        codes = disturbed.end("group_0", "group_1")
        assert -signal.SIGKILL in codes, disturbed.said()
        for process in disturbed.processes.values():
            process.kill()
            process.wait()
        for number in range(2):
            disturbed.start(f"group_{number}", number, other_weights=True)
        assert disturbed.end("group_0", "group_1") == [0, 0], disturbed.said()
        assert disturbed.told("group_0")["loaded"] == disturbed.told("group_1")["loaded"]
        assert disturbed.told("group_0")["loaded"] in range(2, 7)
        assert disturbed.told("group_1")["note"] == "group_0", "of the group that saves"
        check(disturbed, whole, "group_0", "group_1")


@pytest.mark.parametrize(("dies", "number", "comes_back_as"), [
    ("group_1", 1, "group_1"), ("group_0", 0, "group_0"), ("group_0", 0, "group_2"),
])
def test_a_group_is_killed_and_healed_while_the_other_waits(
    tmp_path: Path, whole: dict[str, Any], dies: str, number: int, comes_back_as: str
) -> None:
    stays = "group_0" if dies == "group_1" else "group_1"
    with job(tmp_path / "healed") as disturbed:
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
    with pytest.raises(fs.ArgumentError, match="section 'torchft' is the manager's own"):
        ReplicaCheckpointer(tmp_path / "run", manager, {"torchft": 1})
    with pytest.raises(fs.ArgumentError, match="every=0"):
        ReplicaCheckpointer(tmp_path / "run", manager, {}, every=0)
    monkeypatch.setattr(package, "_version", lambda: "9.9.9")
    with pytest.raises(fs.ArgumentError, match="every=0"):
        ReplicaCheckpointer(tmp_path / "run", manager, {}, every=0)
    assert "torchft 9.9.9 is not a version that Flowstone's adapter was tested with" in caplog.text
    monkeypatch.delattr(Manager, "participating_rank")
    with pytest.raises(fs.FrameworkError, match=r"participating_rank is gone[\s\S]*torchft==2026\.10\.26"):
        ReplicaCheckpointer(tmp_path / "run", manager, {})
    assert not (tmp_path / "run").exists()
