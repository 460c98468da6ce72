"""The calls of a save to its coordinator while the writer's thread is busy with another one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import run
from threads import Job

import flowstone as fs
from flowstone.coordination.messages import PlanTerms, Proposal, WriterShare, pack, unpack
from flowstone.coordination.rank_zero import RankZero
from flowstone.coordination.save_coordinator import SaveCoordinator
from flowstone.errors import RankError
from flowstone.ranks import Agreement
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.pieces import Layout, Piece, Pieces
from interrupts import Struck, struck


class _Held(dict[int, int]):
    """A dictionary of tries, in which another thread comes between a look and what follows from it."""

    def __init__(self, between: threading.Thread) -> None:
        super().__init__()
        self._between = between

    def get(self, key: int, default: int = 0) -> int:  # type: ignore[override]
        result = super().get(key, default)
        if not self._between.ident:
            self._between.start()
            self._between.join()
        return result


@pytest.mark.parametrize("size", [1, 2])
def test_each_attribute_is_set_by_one_thread_whatever_becomes_of_the_saves(tmp_path: Path, size: int) -> None:
    for owners in run(size, "owner_acts", "saves_of_all_kinds", str(tmp_path / "run")):
        assert all(len(threads) == 1 for threads in owners.values()), owners
        assert owners["_highest"] == ["MainThread"]
        assert owners["_everything" if size == 1 else "_mine"] == ["MainThread" if size == 1 else "flowstone-commit"]


@pytest.mark.parametrize("heard", [2, 3, 5])
@pytest.mark.parametrize("tried", [[], [7], [7, 7]])
def test_no_two_tries_of_a_step_have_one_name_whichever_thread_counts(tried: Sequence[int], heard: int) -> None:
    """The writer's thread learns how often others have tried, just as the caller begins another try."""
    coordinator = SaveCoordinator(Agreement(None, 0, 1), "host")
    names = [coordinator.begin_attempt(step) for step in (7, *tried)]
    held = _Held(threading.Thread(target=lambda: coordinator._count_on(7, heard)))
    held.update(coordinator._tries)
    coordinator._tries = held
    names += [coordinator.begin_attempt(7), coordinator.begin_attempt(7)]
    assert len({*names}) == len(names), names
    assert names[-1].number > heard, "nor the name of what another rank has tried"


def test_a_call_that_is_interrupted_at_any_line_leaves_nothing_locked_that_another_needs() -> None:
    """A lock would stay locked where the interrupt comes between the last line of a `with` and its end."""
    coordinator = SaveCoordinator(Agreement(None, 0, 1), "host")
    names = [coordinator.begin_attempt(7)]
    for line in range(1, 20):
        with contextlib.suppress(Struck):
            struck(lambda: coordinator.begin_attempt(7), line, of=("save_coordinator.py",))
        coordinator._count_on(7, line)
        names.append(coordinator.begin_attempt(7))
    assert len({*names}) == len(names), names


def test_a_layout_that_changes_on_one_rank_fails_no_save_that_another_has_begun(tmp_path: Path) -> None:
    assert run(2, "drift_acts", "one_has_more_under_way", str(tmp_path / "run")) == [["None"] * 3] * 2
    for step in (2, 3, 4):
        checkpoint = fs.open(tmp_path / "run", step)
        assert checkpoint.verify().sound
        assert set(checkpoint.tensors) == {f"stages.{n}.{name}" for n in (0, 1) for name in ("weight", "bias")}


def test_who_has_begun_several_saves_by_an_older_plan_writes_all_of_them_by_the_newest() -> None:
    """The second of them finds everybody begun: the one rank by the old plan, the other by what it has since become."""
    def layout(*names: str) -> Layout:
        pieces = [Piece(name, DTYPES["float32"], (8,), Box.whole((8,))) for name in names]
        return Layout(Pieces.of(pieces), (), ())

    job, old, new = Job(2), layout("w"), layout("v", "w")
    teams = [SaveCoordinator(rank, "host") for rank in job.ranks]

    def act(rank: Agreement) -> list[str]:
        coordinator = teams[rank.rank]
        first = coordinator.assign(1, old)
        if rank.rank == 0:  # has begun 2 and 3 before it hears of the other's
            plans = [coordinator.assign(step, old, begun=first) for step in (2, 3)]
        else:
            plans = [coordinator.assign(2, new)]
            plans.append(coordinator.assign(3, new, begun=plans[0]))
        known = coordinator.assignment(plans[-1].layout)
        assert known is not None
        assert known.compared is not None
        return [plan.plan for plan in (*plans, known)]

    first, other = job.run(act)
    assert first == other, "by different plans nothing is committed, now and ever after"


def test_a_plan_that_cannot_be_leaves_the_one_before_it_as_it_was() -> None:
    """One rank's state makes no whole with the others': they go on by what they have begun, and it comes back."""
    def layout(length: int) -> Layout:
        return Layout(Pieces.of([Piece("w", DTYPES["float32"], (length,), Box.whole((length,)))]), (), ())

    rank_zero = RankZero(2)
    fits, does_not = pack(layout(8)), pack(layout(9))
    first = rank_zero.assign([Proposal(1, "a", None, fits), Proposal(1, "a", None, fits)])
    plan = unpack(first.common, PlanTerms).plan
    with pytest.raises(fs.CollisionError):
        rank_zero.assign([Proposal(2, "a", plan, None), Proposal(2, "a", None, does_not)])
    both = rank_zero.assign([Proposal(3, "a", plan, None), Proposal(3, "a", plan, None)])
    assert unpack(both.common, PlanTerms).plan == plan
    again = rank_zero.assign([Proposal(4, "a", plan, None), Proposal(4, "a", None, fits)])
    newer = unpack(again.common, PlanTerms).plan
    assert newer != plan
    assert unpack(again.each[0], WriterShare).positions is None
    assert unpack(
        rank_zero.assign([Proposal(5, "a", plan, None), Proposal(5, "a", newer, None)]).common, PlanTerms
    ).plan == newer
    with pytest.raises(RankError, match="rank 1 began to save with an older plan"):
        rank_zero.assign([Proposal(6, "a", plan, None), Proposal(6, "a", plan, None)])
