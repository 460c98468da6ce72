"""A rank that is killed, freezes or fails at any point of a save or a load: all others report that, in time.

After that the next save succeeds: of the same job if all its ranks live, or else of the next job.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest
from processes import Ranks, run
from trouble_acts import DEADLINE_S, DECIDING, LOADS, POINTS, PUBLISHING

import flowstone as fs

RANKS = 3
AT_ONCE = 8  # jobs that wait side by side
FAILING = ("capture", "sync", *PUBLISHING, *LOADS)  # where something can be refused
Blow = tuple[int, str, str]  # which rank, at what point, how

EVERY: list[Blow] = [
    (victim, point, how) for point in POINTS for how in ("killed", "frozen") for victim in range(RANKS)
    if victim == 0 or point not in PUBLISHING
]
# Each point; each fate, of rank 0 and of another.
SOME: list[Blow] = [
    (1, "first", "frozen"), (1, "save", "killed"), (2, "save", "frozen"), (0, "save", "frozen"),
    (1, "plan", "killed"), (0, "plan", "frozen"), (0, "capture", "killed"), (2, "write", "frozen"),
    (2, "commit", "killed"), (0, "manifest", "killed"), (0, "rename", "frozen"), (0, "renamed", "killed"),
    (1, "compare", "frozen"), (0, "read", "killed"), (2, "read", "frozen"), (1, "finish", "killed"),
]


class Struck:
    """A job of which one rank is struck."""

    def __init__(self, path: Path, blow: Blow) -> None:
        self.path, self.blow = path, blow
        self.victim, self.point, self.how = blow
        self.others = [rank for rank in range(RANKS) if rank != self.victim]
        self._ranks = Ranks(RANKS, "trouble_acts", "one_is_struck", str(path), *blow)
        self._thawed = False

    def ended(self) -> bool:
        """Whether all have. A frozen rank goes on once the others have been told."""
        reported = all(Path(f"{self.path}.told-{rank}").exists() for rank in self.others)
        if reported and self.how == "frozen" and not self._thawed:
            self._ranks.kill(self.victim, signal.SIGCONT)
            Path(f"{self.path}.on").touch()
            self._thawed = True
        return all(process.poll() is not None for process in self._ranks.processes)

    def check(self) -> None:
        ended = self._ranks.end(1)
        words = f"{self.blow}\n" + "\n".join(f"--- rank {rank}\n{process.said}" for rank, process in enumerate(ended))
        lived = self.others if self.how == "killed" else range(RANKS)
        assert all(ended[rank].code == 0 for rank in lived), words
        assert self.how == "frozen" or ended[self.victim].code == -signal.SIGKILL, words
        results = [ended[rank].result for rank in self.others]
        for row in results:
            assert isinstance(row, dict)
            assert (row["kind"], row["rank"]) == ("RankError", self.victim), f"{words}\n{row}"
            assert f"rank {self.victim}" in str(row["said"])
            assert float(row["waited_s"]) < 4 * DEADLINE_S, f"{self.blow}: {row}"
            assert row["undecided"] == (self.point in PUBLISHING), f"{self.blow}: {row}"
            if self.point not in ("read", "finish"):
                assert row["untouched"]


def _play(folder: Path, blows: Sequence[Blow]) -> None:
    """A few jobs at a time, as they mostly wait; then one job that goes on where those were killed."""
    waiting: Iterator[Blow] = iter(blows)
    running: list[Struck] = []
    begun: list[Struck] = []
    deadline = time.monotonic() + 60 + 10 * len(blows)
    while True:
        for blow in islice(waiting, AT_ONCE - len(running)):
            running.append(Struck(folder / f"run{len(begun)}", blow))
            begun.append(running[-1])
        if not running:
            break
        ended = [job for job in running if job.ended()]
        running = [job for job in running if job not in ended]
        for job in ended:
            job.check()
        if time.monotonic() > deadline:
            for job in running:
                job.check()
        time.sleep(0.02)
    paths = [str(job.path) for job in begun if job.how == "killed"]
    results = run(RANKS, "trouble_acts", "begin_again", paths)
    assert results[1:] == results[:-1]
    for job in begun:
        newest = fs.open(job.path)
        newest.verify()
        assert not list(job.path.glob(".saving-*")), job.blow
        if job.how == "frozen":
            assert newest.step == 3
    assert isinstance(results[0], list)
    for job, step in zip((job for job in begun if job.how == "killed"), results[0], strict=True):
        assert step == {"first": 0, "renamed": 2}.get(job.point, 1), job.blow


def test_a_rank_that_is_killed_or_freezes_is_told_of_and_the_next_save_succeeds(tmp_path: Path) -> None:
    _play(tmp_path, SOME)


@pytest.mark.soak
def test_a_rank_that_is_killed_or_freezes_anywhere(tmp_path: Path) -> None:
    _play(tmp_path, EVERY)


def test_a_step_is_saved_again_where_nobody_knows_what_became_of_it(tmp_path: Path) -> None:
    """Rank 0 goes on publishing, or fails to, while the others try once more: one of both tries is what is there."""
    tries = [(point, how) for point in (*DECIDING, "manifest", "renamed") for how in ("frozen", "spoilt")]
    jobs = {
        (point, how): Ranks(RANKS, "trouble_acts", "the_same_step_again", str(tmp_path / f"{point}-{how}"), point, how)
        for point, how in tries
    }
    waiting = dict(jobs)
    deadline = time.monotonic() + 240
    while waiting and time.monotonic() < deadline:
        for (point, how), job in list(waiting.items()):
            path = tmp_path / f"{point}-{how}"
            if all(Path(f"{path}.told-{rank}").exists() for rank in range(1, RANKS)):
                Path(f"{path}.on").touch()
                job.kill(0, signal.SIGCONT)
                del waiting[point, how]
        time.sleep(0.01)
    published = {("manifest", "frozen"), ("renamed", "frozen"), ("renamed", "spoilt")}  # the last has its name
    for this, job in jobs.items():
        for rank, result in enumerate(job.results()):
            assert isinstance(result, dict)
            first, second = result["told"]
            assert rank == 0 or first == ["RankError", True], (this, rank, result)
            right = ("StepExistsError", 2) if this in published else ("NoneType", 3)
            assert (second, result["value"], result["left"]) == ([right[0], False], right[1], []), (this, rank, result)
        fs.open(tmp_path / "-".join(this)).verify()


def test_a_commit_is_known_to_ranks_that_read_of_it_after_rank_0_has_ended(tmp_path: Path) -> None:
    """As in a script that ends with `wait`, where rank 0's process has the job's key-value store."""
    ranks = Ranks(2, "trouble_acts", "rank_zero_ends_first", str(tmp_path / "run"))
    assert ranks.processes[0].wait(60) == 0
    del ranks._store
    Path(f"{tmp_path / 'run'}.gone").touch()
    assert ranks.results() == [1, 1]


@pytest.mark.parametrize("victim", [0, 2])
def test_what_fails_on_one_rank_at_any_point_is_told_to_all_by_its_cause(tmp_path: Path, victim: int) -> None:
    points = [point for point in FAILING if victim == 0 or point not in PUBLISHING]
    told = run(RANKS, "trouble_acts", "one_after_the_other", str(tmp_path / "run"), victim, points)
    own = told.pop(victim)
    assert isinstance(own, list)
    assert told[0] == told[1], "every other rank is told the same"
    for point, (kind, rank, code, said), (own_kind, *_, own_said) in zip(points, told[0], own, strict=True):  # type: ignore[arg-type]
        assert (kind, rank, code) == ("RankError", victim, 5), f"{point}: {said}"
        assert (own_kind, "made up" in own_said or "EIO" in own_said) == ("StorageError", True), f"{point}: {own_said}"
        assert f"rank {victim} failed: " in said
    assert not list((tmp_path / "run").glob(".saving-*"))
    newest = 2 * len(points) - 1
    assert fs.open(tmp_path / "run").step == newest
    assert fs.open(tmp_path / "run").objects["step"] == newest
