"""A replica of a training's state follows the journal, and saves the newest step in full when training is killed.

Trainings and replicas are processes of their own (tests/support/replica_job.py), in this user's directory for one test.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flowstone as fs
from flowstone.commit import catalog
from flowstone.replica.replica_link import ReplicaLink
from flowstone.replica.replica_wire import Farewell, ReplicaStatus, await_end, decode_order, replica_status
from flowstone.store.local import LocalStore
from flowstone.store.memory.local_sockets import DIRECTORY_VARIABLE
from journaled import Training, adamw, bits, momentum, same
from warm_start import warm_start

JOB = Path(__file__).parents[1] / "support" / "replica_job.py"


class Job:
    """A training; `until` and the like read what it prints."""

    def __init__(self, root: Path, last: int, *more: str) -> None:
        self.root = root
        with warm_start(str(JOB)):
            self.process = subprocess.Popen(
                [sys.executable, str(JOB), str(root), str(last), *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True,
            )

    def told(self, key: str, value: object) -> dict[str, object]:
        """What it says once it says that."""
        assert self.process.stdout is not None, "a pipe"
        for line in self.process.stdout:
            record: dict[str, object] = json.loads(line)
            if record.get(key) == value:
                return record
        raise AssertionError(f"it ended, and has not said {key}: {value}")

    def status(self, fits: Callable[[ReplicaStatus], bool]) -> ReplicaStatus:
        """The replica's, once it is so."""
        while True:
            assert self.process.poll() is None, "training goes on"
            status = replica_status(str(self.root))
            if status is not None and fits(status):
                return status
            select.select([], [], [], 0.01)

    def proceed(self) -> None:
        """From where it holds."""
        assert self.process.stdin is not None, "a pipe"
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def finish(self) -> str:
        """Have it close its Checkpointer, and end. Returns what it still said."""
        outputs, _ = self.process.communicate("\n", timeout=60)
        assert self.process.returncode == 0
        return outputs


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory where replicas listen. Nothing is left there."""
    directory = tmp_path / "agents"
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory))
    yield directory
    assert not directory.exists()


def expected_at(step: int, make: Callable[..., object] = adamw) -> dict[str, object]:
    """Of a training that nothing has disturbed, with as many threads as the job's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        training = Training(make)  # type: ignore[arg-type]
        for number in range(1, step + 1):
            training.train_step(number)
        return dict(bits(training))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("build", ["build", "build_momentum"])
def test_the_newest_step_of_a_killed_training_is_saved_whole_bit_for_bit(
    tmp_path: Path, agents: Path, build: str
) -> None:
    root, last = tmp_path / "run", random.Random(build).randrange(12, 30)
    make = momentum if build == "build_momentum" else adamw
    job = Job(root, 40, build)
    job.told("step", last)
    job.status(lambda status: status.step > 1)  # it has begun to follow; what it lacks, it makes after the death
    job.kill()
    with fs.Checkpointer(root, every_step=True) as checkpointer:  # waits for the replica
        training = Training(make, seed=5)
        report = checkpointer.load(training.state())
    assert report.replay is None, "a checkpoint, and no replay"
    assert last <= report.step <= 40
    assert list(catalog.steps(LocalStore(root))) == [1, report.step]
    assert same(bits(training), expected_at(report.step, make))
    fs.open(root).verify()
    assert not [name for name in os.listdir(root) if name.startswith((".", "journal"))]


def test_a_training_that_starts_again_goes_on_from_there_with_a_replica_of_its_own(
    tmp_path: Path, agents: Path
) -> None:
    root = tmp_path / "run"
    job = Job(root, 9)
    job.told("step", 9)
    job.status(lambda status: status.step == 9)
    job.kill()
    again = Job(root, 15)
    assert again.told("first", 10)
    again.told("step", 15)
    status = again.status(lambda status: status.step == 15)
    assert (status.exactness, status.newest) == ("exact", 15)
    again.kill()
    assert await_end(str(root), 60.0)
    training = Training(seed=5)
    with fs.Checkpointer(root) as checkpointer:
        report = checkpointer.load(training.state())
    assert (report.step, report.replay) == (15, None)
    assert same(bits(training), expected_at(15))


def test_a_replica_with_another_arithmetic_is_of_class_tolerance_told_and_saves_nothing(
    tmp_path: Path, agents: Path
) -> None:
    root = tmp_path / "run"
    job = Job(root, 9, "build_otherwise")
    job.told("step", 9)
    status = job.status(lambda status: status.step == 9)
    assert (status.exactness, status.differs_from) == ("tolerance", 2)
    job.kill()
    assert await_end(str(root), 60.0)
    assert list(catalog.steps(LocalStore(root))) == [1]
    training = Training(seed=5)
    with fs.Checkpointer(root) as checkpointer:
        report = checkpointer.load(training.state())
    assert report.replay is not None
    assert (report.step, report.replay.exactness) == (9, "exact"), "the journal is whole"
    assert same(bits(training), expected_at(9))


def test_a_class_tolerance_is_saved_where_that_is_allowed(tmp_path: Path, agents: Path) -> None:
    root = tmp_path / "run"
    job = Job(root, 5, "build_otherwise", '{"tolerance": true}')
    job.told("step", 5)
    job.status(lambda status: status.step == 5)
    job.kill()
    assert await_end(str(root), 60.0)
    assert list(catalog.steps(LocalStore(root))) == [1, 5]


def test_training_goes_on_without_a_replica_that_was_killed_and_nothing_is_left(
    tmp_path: Path, agents: Path
) -> None:
    root = tmp_path / "run"
    job = Job(root, 20, "build", '{"hold": 4}')
    job.told("step", 4)
    pid = job.status(lambda status: status.step > 0).pid
    gone = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([gone], [], [], 60.0)[0]
    os.close(gone)
    job.proceed()
    assert job.told("event", "ReplicaLost")
    job.told("step", 20)
    assert "ReplicaLost" not in job.finish(), "told once"
    training = Training(seed=5)
    with fs.Checkpointer(root) as checkpointer:
        assert checkpointer.load(training.state()).step == 20
    assert same(bits(training), expected_at(20))


def test_a_replica_that_cannot_hold_the_state_is_told_with_its_reason(tmp_path: Path, agents: Path) -> None:
    job = Job(tmp_path / "run", 6, "build_nothing", '{"hold": 3}')
    job.told("step", 3)
    while not any(log.stat().st_size for log in agents.glob("*.log")) or replica_status(str(job.root)) is not None:
        select.select([], [], [], 0.01)
    job.proceed()
    result = job.told("event", "ReplicaLost")
    assert "no memory for a second model" in str(result["text"])
    job.finish()
    (log,) = agents.iterdir()
    assert "no memory for a second model" in log.read_text()
    log.unlink()
    agents.rmdir()


def test_an_ended_training_leaves_no_replica(tmp_path: Path, agents: Path) -> None:
    job = Job(tmp_path / "run", 5)
    job.told("step", 5)
    pid = job.status(lambda status: status.step == 5).pid
    job.finish()
    assert not Path(f"/proc/{pid}").exists()
    assert list(catalog.steps(LocalStore(tmp_path / "run"))) == [1]


@pytest.mark.parametrize("build", ["train", "train:", ":build", "a b:c", "__main__:build", 3])
def test_a_builder_that_another_process_cannot_import_is_refused(build: object) -> None:
    with pytest.raises(fs.ArgumentError, match="Replica"):
        fs.Replica(build)  # type: ignore[arg-type]


def test_only_a_directory_has_a_replica() -> None:
    from flowstone.store.memory import MemoryStore

    with pytest.raises(fs.ArgumentError, match="every_step"):
        fs.Checkpointer(MemoryStore(), every_step=fs.Replica("replica_job:build"))


def test_a_replica_that_is_busy_hears_the_farewell_behind_all_that_it_was_told(tmp_path: Path) -> None:
    """Else it would take training for dead, and save its last step whole."""
    shared: Any = SimpleNamespace(
        group=SimpleNamespace(rank=0, size=1), store=LocalStore(tmp_path / "run"), emit=None, options=fs.EngineOptions()
    )
    link, steps = ReplicaLink(shared, fs.Replica("replica_job:build")), 20_000
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.setblocking(False)
    link._link = own
    for step in range(steps):
        link.notify(step, "a journal")
    ending = threading.Thread(target=link.end)
    ending.start()
    ending.join(0.1)
    heard = []
    with theirs:
        while data := theirs.recv(1 << 16):
            heard.append(decode_order(data))
    ending.join()
    assert 0 < len(heard) < steps, "it was too busy to hear all"
    assert heard[-1] == Farewell()


def test_replicas_of_several_ranks_are_invited_where_each_rank_has_one_and_all_are_on_one_node(tmp_path: Path) -> None:
    reported: list[object] = []
    shared: Any = SimpleNamespace(
        group=SimpleNamespace(rank=0, size=2), store=LocalStore(tmp_path / "run"), emit=reported.append,
        options=fs.EngineOptions(),
    )
    link = ReplicaLink(shared, fs.Replica("replica_job:build"))
    port, why = link.invite([link.node, link.node])
    try:
        assert port
        assert not why
        assert link.invite([link.node, link.node]) == (port, ""), "the journal after that one"
        with socket.create_connection(("127.0.0.1", port), 10.0):
            pass
    finally:
        link.end()
    lost = ReplicaLink(shared, fs.Replica("replica_job:build"))
    for nodes, expected in ((["a", ""], "rank 1 has no replica"), (["a", "b"], "several nodes")):
        port, why = lost.invite(nodes)
        assert not port
        assert expected in why
        lost.set_meeting_port(port, why)
    lost.notify(2, "a journal")
    assert [type(event) for event in reported] == [fs.ReplicaLost], "told once"
