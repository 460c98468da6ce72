"""Replicas of the state of several ranks: together they follow the journal.

They save its newest step when all trainers have ended. Trainings and replicas are real processes, which are really
killed: an ordinary run has some of the cases, and `make soak` all.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from journal_acts import Training
from processes import Ranks, run

import flowstone as fs
from flowstone.commit import catalog
from flowstone.replica import rounds
from flowstone.replica.following import JournalFollower, Load, Make
from flowstone.replica.replica_wire import ReplicaStatus, replica_status
from flowstone.replica.rounds import ReplicaCoordinator
from flowstone.store.local import LocalStore
from flowstone.store.memory.local_sockets import DIRECTORY_VARIABLE

STEPS, PATIENCE_S = 7, 60.0


class Job:
    """A training of two ranks, with a replica each, unless it is told otherwise."""

    def __init__(self, path: Path, agents: Path, build: str, steps: int = STEPS, **options: object) -> None:
        self.path = path
        names = ("how", "hold", "on_ranks", "tolerance", "recovery_s")
        defaults: dict[str, object] = {
            "how": "", "hold": steps, "on_ranks": 2, "tolerance": False, "recovery_s": 60.0
        }
        record = {**defaults, **options}
        self.ranks = Ranks(
            2, "following_acts", "train", str(path), str(agents), build, steps, *[record[name] for name in names]
        )

    def status(self, rank: int, fits: Callable[[ReplicaStatus], bool]) -> ReplicaStatus:
        """Of a replica, once it is so."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            status = replica_status(str(self.path), rank)
            if status is not None and fits(status):
                return status
            time.sleep(0.01)
        raise AssertionError(f"rank {rank}: {replica_status(str(self.path), rank)}\n{self.ranks.said(rank)}")

    def await_step(self, step: int) -> list[ReplicaStatus]:
        """Until the replicas of both ranks have it."""
        return [self.status(rank, lambda status: status.step >= step) for rank in range(2)]

    def events(self, rank: int) -> list[list[str]]:
        path = Path(f"{self.path}.events.{rank}")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def proceed(self) -> None:
        """From where it holds."""
        Path(f"{self.path}.go").touch()

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks.kill(rank)
            self.ranks.processes[rank].wait(PATIENCE_S)

    def end(self) -> None:
        """Those that still run are killed."""
        self.kill(0, 1)
        self.ranks.end()


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory where replicas listen. Nothing is left there."""
    directory = tmp_path / "agents"
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory))
    yield directory
    left = {path.name: path.read_text() if path.suffix == ".log" else "" for path in directory.glob("*")}
    assert not directory.exists(), left


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[list[str]]]:
    """For each way of training: of each rank, what each step is."""
    return {how: run(2, "journal_acts", "undisturbed", how, 2 * STEPS) for how in ("ddp", "fsdp")}  # type: ignore[misc]


def await_gone(pid: int) -> None:
    try:
        gone = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([gone], [], [], PATIENCE_S)[0], f"process {pid} has not ended"
    finally:
        os.close(gone)


def resume(path: Path, agents: Path, how: str) -> list[dict[str, Any]]:
    return run(2, "following_acts", "resume", str(path), str(agents), how)  # type: ignore[return-value]


def told(results: list[dict[str, Any]], name: str) -> list[Any]:
    return [result[name] for result in results]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_the_newest_step_of_killed_ranks_is_saved_by_their_replicas_bit_for_bit(
    tmp_path: Path, agents: Path, undisturbed: dict[str, list[list[str]]], how: str
) -> None:
    path = tmp_path / "run"
    job = Job(path, agents, f"build_{how}")
    actual = job.await_step(STEPS)
    assert [(entry.exactness, entry.rank) for entry in actual] == [("exact", 0), ("exact", 1)]
    job.end()
    results = resume(path, agents, how)  # waits for the replicas
    assert told(results, "step") == [STEPS] * 2
    assert told(results, "replayed") == [0, 0], "a checkpoint, and no replay"
    assert told(results, "bits") == [result[STEPS - 1] for result in undisturbed[how]]
    assert list(catalog.steps(LocalStore(path))) == [1, STEPS]
    fs.open(path).verify()
    assert not [name for name in os.listdir(path) if name.startswith((".", "journal"))]


@pytest.mark.soak
def test_replicas_go_along_with_whole_checkpoints_and_the_next_job_has_replicas_of_its_own(
    tmp_path: Path, agents: Path, undisturbed: dict[str, list[list[str]]]
) -> None:
    path = tmp_path / "run"
    job = Job(path, agents, "build_fsdp", recovery_s=1e-9)  # whole ones as often as they come to an end
    job.await_step(STEPS)
    assert len(catalog.steps(LocalStore(path))) > 1 or not list(path.glob("journal*"))
    job.end()
    again = Job(path, agents, "build_fsdp", 2 * STEPS)
    again.await_step(2 * STEPS)
    again.end()
    results = resume(path, agents, "fsdp")
    assert told(results, "step") == [2 * STEPS] * 2
    assert told(results, "replayed") == [0, 0]
    assert told(results, "bits") == [result[2 * STEPS - 1] for result in undisturbed["fsdp"]]


@pytest.mark.parametrize("how", [
    "lives on for a while", pytest.param("ends with an exception", marks=pytest.mark.soak),
])
def test_nothing_is_saved_while_one_rank_lives_and_the_newest_step_once_it_is_gone_too(
    tmp_path: Path, agents: Path, undisturbed: dict[str, list[list[str]]], how: str
) -> None:
    path = tmp_path / "run"
    job = Job(path, agents, "build_ddp", 2 * STEPS, hold=STEPS)
    job.await_step(STEPS)
    job.kill(1)
    job.status(1, lambda status: status.is_orphaned)
    time.sleep(2.5)  # some rounds of the replicas
    assert not job.status(0, lambda _: True).is_orphaned
    assert list(catalog.steps(LocalStore(path))) == [1]
    if how == "ends with an exception":
        job.proceed()  # to a gradient that it cannot exchange: the Checkpointer is closed in order
        assert job.ranks.processes[0].wait(PATIENCE_S) == 1
        assert "ReplicaLost" not in dict(job.events(0))
    job.end()
    results = resume(path, agents, "ddp")
    assert told(results, "step") == [STEPS] * 2
    assert told(results, "replayed") == [0, 0]
    assert told(results, "bits") == [result[STEPS - 1] for result in undisturbed["ddp"]]


def test_training_goes_on_when_one_replica_was_killed_and_all_ranks_are_told(
    tmp_path: Path, agents: Path, undisturbed: dict[str, list[list[str]]]
) -> None:
    path = tmp_path / "run"
    job = Job(path, agents, "build_ddp", 2 * STEPS, hold=STEPS)
    replicas = [process.pid for process in job.await_step(STEPS)]
    os.kill(replicas[1], signal.SIGKILL)
    for pid in replicas:
        await_gone(pid)
    job.proceed()
    assert job.ranks.results() == [result[-1] for result in undisturbed["ddp"]]
    for rank in range(2):
        assert [name for name, _ in job.events(rank)].count("ReplicaLost") == 1
    assert "the replica of rank 1 has ended" in dict(job.events(0))["ReplicaLost"]
    results = resume(path, agents, "ddp")
    assert told(results, "step") == [2 * STEPS] * 2
    assert told(results, "bits") == [result[-1] for result in undisturbed["ddp"]]


@pytest.mark.parametrize("delay_s", [
    pytest.param(0.0, marks=pytest.mark.soak), 0.3, pytest.param(0.6, marks=pytest.mark.soak),
])
def test_a_replica_that_is_killed_while_the_last_step_is_saved_leaves_the_journal_or_the_checkpoint(
    tmp_path: Path, agents: Path, undisturbed: dict[str, list[list[str]]], delay_s: float
) -> None:
    path = tmp_path / "run"
    job = Job(path, agents, "build_fsdp")
    replicas = [process.pid for process in job.await_step(STEPS)]
    job.end()
    time.sleep(delay_s)
    for pid in replicas[: 1 + (delay_s > 0)][-1:]:
        with suppress(ProcessLookupError):  # it was faster
            os.kill(pid, signal.SIGKILL)
    results = resume(path, agents, "fsdp")
    assert told(results, "step") == [STEPS] * 2
    assert set(told(results, "exactness")) <= {"", "exact"}
    assert told(results, "bits") == [result[STEPS - 1] for result in undisturbed["fsdp"]]
    for pid in replicas:
        await_gone(pid)
    for left in agents.glob("*"):  # of the one that was killed; and why the other one has saved nothing
        is_killed = left.stem.endswith("-1") == (delay_s > 0)
        assert is_killed or "nothing was saved" in left.read_text() or "Error" in left.read_text()
        left.unlink()
    if agents.exists():
        agents.rmdir()


def test_an_ended_training_leaves_no_replica_of_any_rank(tmp_path: Path, agents: Path) -> None:
    path = tmp_path / "run"
    job = Job(path, agents, "build_fsdp")
    replicas = [process.pid for process in job.await_step(STEPS)]
    job.proceed()
    job.ranks.results()
    for pid in replicas:
        assert not Path(f"/proc/{pid}").exists()
    assert not agents.exists()
    assert list(catalog.steps(LocalStore(path))) == [1]
    assert not [name for rank in range(2) for name, _ in job.events(rank) if name == "ReplicaLost"]


def test_a_builder_that_fails_on_one_rank_is_told_on_all_with_its_reason(tmp_path: Path, agents: Path) -> None:
    path = tmp_path / "run"
    job = Job(path, agents, "build_on_rank_0", 2 * STEPS, how="ddp", hold=STEPS)
    logs = [agents / f"{name}.log" for name in sorted({path.stem for path in agents.glob("*")})]
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and (not logs or any(replica_status(str(path), rank) for rank in range(2))):
        logs = list(agents.glob("*.log"))
        time.sleep(0.05)
    job.proceed()
    job.ranks.results()
    for rank in range(2):
        assert "no memory for a second model" in dict(job.events(rank))["ReplicaLost"]
    (log,) = agents.iterdir()
    assert log.name.endswith("-1.log")
    assert "no memory for a second model" in log.read_text()
    log.unlink()
    agents.rmdir()


@pytest.mark.soak
def test_one_rank_that_differs_makes_all_replicas_of_class_tolerance_which_save_nothing(
    tmp_path: Path, agents: Path, undisturbed: dict[str, list[list[str]]]
) -> None:
    path = tmp_path / "run"
    job = Job(path, agents, "build_otherwise_on_rank_1", how="fsdp")
    actual = job.await_step(STEPS)
    assert [(entry.exactness, entry.differs_from) for entry in actual] == [("tolerance", 2)] * 2
    job.end()
    results = resume(path, agents, "fsdp")
    assert list(catalog.steps(LocalStore(path))) == [1]
    assert told(results, "step") == [STEPS] * 2
    assert told(results, "replayed") == [STEPS - 1] * 2
    assert told(results, "exactness") == ["exact"] * 2
    assert told(results, "bits") == [result[STEPS - 1] for result in undisturbed["fsdp"]]


def test_ranks_that_do_not_all_have_a_replica_have_none_and_are_told(tmp_path: Path, agents: Path) -> None:
    job = Job(tmp_path / "run", agents, "build_ddp", 3, hold=0, on_ranks=1)
    job.ranks.results()
    assert "rank 1 has no replica" in dict(job.events(0))["ReplicaLost"]


class Alone:
    """A replica of rank 0 of two, in this process, which says for both what each says."""

    def __init__(self, path: Path) -> None:
        self.training = Training("plain", 0)
        state, store = self.training.state(), LocalStore(path)

        def load(step: int) -> fs.LoadReport:
            with fs.Checkpointer(path) as checkpointer:
                return checkpointer.load(state, step=step)

        self.following = JournalFollower(store, state, load, fs.EngineOptions(), rank=0, ranks=2)
        self.link: Any = SimpleNamespace(status=SimpleNamespace(newest=STEPS), journal="", training="lives")
        self.rounds = ReplicaCoordinator(self.following, self.link, None, tolerance=False)  # type: ignore[arg-type]

    def order(self, *steps: int, training: tuple[str, str] = ("lives", "lives")) -> Any:
        messages = [
            rounds._ReplicaReport(how, step, "exact", None)  # type: ignore[arg-type]
            for how, step in zip(training, steps, strict=True)
        ]
        decision = self.rounds._decide([msgspec.msgpack.encode(line) for line in messages])
        return msgspec.msgpack.decode(decision.common, type=rounds._ReplicaOrder)


@pytest.fixture
def alone(tmp_path: Path) -> Alone:
    run(2, "journal_acts", "train", str(tmp_path / "run"), "ddp", STEPS)
    return Alone(tmp_path / "run")


def test_a_rank_that_could_not_make_the_last_move_has_all_load_the_newest_checkpoint_again(alone: Alone) -> None:
    following = alone.following
    threads = torch.get_num_threads()
    for move in (Load, Make):
        order = alone.order(following.step, following.step)
        assert type(order.move) is move
        assert following.make(order.move)
    assert (following.step, following.exactness, torch.get_num_threads()) == (STEPS, "exact", threads)
    assert alone.order(STEPS, STEPS).does == "wait"
    order = alone.order(STEPS, -1)
    assert isinstance(order.move, Load)
    assert order.move.step == 1
    assert following.make(order.move)
    assert following.make(alone.order(1, 1).move)
    assert (following.step, following.loads) == (STEPS, 2)
    assert not following.make(Make("journal-00000007-none", STEPS + 1)), "training has removed it"


def test_replicas_go_no_further_than_what_training_has_told_durable_until_all_of_it_is_gone(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    following, link = alone.following, alone.link
    link.status.newest = 4
    for _ in range(2):
        assert following.make(alone.order(following.step, following.step).move)
    assert following.step == 4
    now = time.monotonic()
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: now))
    assert alone.order(4, 4, training=("lives", "died")).does == "wait"
    now += 61.0
    assert "rank 0 is still alive" in alone.order(4, 4, training=("lives", "died")).why
    assert alone.order(4, 4, training=("ended", "ended")).does == "end"
    order = alone.order(4, 4, training=("ended", "died"))
    assert order.move.until == STEPS
    assert following.make(order.move)
    assert alone.order(STEPS, STEPS, training=("ended", "died")).does == "save"
