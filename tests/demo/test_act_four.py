"""Each check of act four can fail, and its ranks are real. The act itself runs with the others in test_demo.py."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flowstone_demo import acts, claims_of_ranks
from flowstone_demo.across import kills, told
from flowstone_demo.child_process import DiedError
from flowstone_demo.curves import explained, spread, sums_explain, usual_change
from flowstone_demo.messages import Began, Finished, Held, Lost, RankOrder, SaveCommitted, Saving, Stepped, Undisturbed
from flowstone_demo.rank_processes import RankKill, RankRun, run_ranks
from flowstone_demo.sizes import FULL_RANKS, SMALL_RANKS
from flowstone_demo.train import is_saved
from warm_start import warm_start

SOURCE = Path(acts.__file__).parents[2]
FORM = SMALL_RANKS


@pytest.fixture(autouse=True)
def _children_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]))


# The curves


def test_nothing_is_explained_before_the_first_change_and_each_change_adds_the_same() -> None:
    calm = [{1: 5.0, 2: 4.0, 3: 3.0}, {1: 5.0, 2: 4.5, 3: 3.0}]
    assert explained(calm, 0, 64) == {1: 0.0, 2: 0.0, 3: 0.0}
    once, twice = explained(calm, 1, 64), explained(calm, 2, 64)
    assert [twice[step] - once[step] for step in (1, 2, 3)] == pytest.approx([0.0, 0.5, 0.5])


def test_the_largest_spread_so_far_counts_and_the_loss_itself_is_a_sum() -> None:
    calm = [{1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}, {1: 5.0, 2: 4.5, 3: 3.25, 4: 2.0}, {1: 5.0, 2: 4.0, 3: 2.5, 4: 2.0}]
    assert spread(calm) == {1: 0.0, 2: 0.5, 3: 0.75, 4: 0.0}
    own = [2 * 2 * 2.0**-24 * loss for loss in (5.0, 4.0, 3.0, 2.0)]  # three terms: two additions, in two orders
    assert list(explained(calm, 1, 3).values()) == [own[0], 0.5 + own[1], 0.75 + own[2], 0.75 + own[3]]


def test_sums_in_any_order_lie_within_the_bound_and_other_numbers_do_not() -> None:
    chance = random.Random(7)
    losses = np.array([chance.uniform(4, 7) for _ in range(256)], np.float32)
    bound = sums_explain(float(losses.mean(dtype=np.float64)), len(losses))
    means = []
    for _ in range(50):
        total = np.float32(0)
        for loss in chance.sample(losses.tolist(), len(losses)):
            total += np.float32(loss)
        means.append(float(total) / len(losses))
    assert 0 < max(means) - min(means) <= bound
    assert abs(float(losses[:128].mean()) - float(losses.mean())) > bound


def test_the_usual_change_is_the_median_step() -> None:
    assert usual_change({3: 1.0, 1: 5.0, 2: 4.0, 4: 0.5}) == 1.0


# The claims


def fill(run: RankRun, steps: range, off: float = 0.0, calm: float = 0.0) -> RankRun:
    """A run of ranks that goes through all steps undisturbed, then through these, as processes report it."""
    for rank in range(run.ranks):
        for step in range(1, FORM.steps + 1):
            run.enter(rank, Undisturbed(step, 6.0 - step / 10 + calm))
        run.enter(rank, Began(run.newest, 10, 0.0))
        if run.newest is not None:
            hold(run, rank, run.newest, loaded=True)
        for step in steps:
            run.enter(rank, Stepped(step, 6.0 - step / 10 + off))
            if is_saved(step, FORM.steps, FORM.save_every):
                hold(run, rank, step, loaded=False)
                run.enter(rank, Saving(step))
    return run


def hold(run: RankRun, rank: int, step: int, *, loaded: bool) -> None:
    for name in ("weight", "weight exp_avg", "weight exp_avg_sq"):
        run.enter(rank, Held(step, loaded, name, f"{name} at {step}", 40))


def made_up() -> list[RankRun]:
    """As it is to be: the runs are a last bit apart, and what is saved is what is loaded."""
    first = fill(RankRun(4), range(1, FORM.killed_saving + 1))
    first.killed = (FORM.victim,)
    for rank in {0, 1, 2, 3} - {FORM.victim}:
        first.enter(rank, SaveCommitted(2, 1, 0.1))
        first.enter(rank, Lost(f"nothing heard from rank {FORM.victim} for 5 s"))
    second = fill(RankRun(2, 2), range(3, FORM.killed_at + 1), 2.0**-21, 2.0**-21)
    second.killed = (0, 1)
    second.enter(0, SaveCommitted(6, 1, 0.1))
    third = fill(RankRun(1, 6), range(7, FORM.steps + 1), 2.0**-20, -(2.0**-21))
    third.enter(0, Finished(FORM.steps, "", 0))
    return [first, second, third]


def failing(spoil: Callable[[list[RankRun]], object]) -> list[int]:
    runs = made_up()
    spoil(runs)
    result = claims_of_ranks.of_ranks(FORM, runs)
    assert len(result) == 5
    return [index for index, claim in enumerate(result) if not claim.held]


SAME, NAMED, STARTS, BITS, CURVE = range(5)


def test_what_is_as_it_should_be_is_believed() -> None:
    assert failing(lambda runs: None) == []


def test_a_run_that_did_not_learn_or_is_another_training_explains_nothing() -> None:
    assert SAME in failing(lambda runs: runs[1].calm[0].popitem())
    assert failing(lambda runs: runs[2].calm[0].update({1: 5.9 + 1e-3})) == [SAME]
    assert failing(lambda runs: runs[2].calm[0].update({9: 5.1 + 1e-2})) == [SAME]
    assert SAME in failing(lambda runs: runs[0].calm[0].update({FORM.steps: 6.5}))


def test_an_error_that_names_nobody_another_or_too_many_is_no_name() -> None:
    for words in ("connection closed", "nothing heard from rank 3 for 5 s", "no word from rank 2, rank 3 for 5 s"):
        assert failing(lambda runs, words=words: runs[0].lost.update({0: words})) == [NAMED]
    assert failing(lambda runs: runs[0].lost.pop(1)) == [NAMED]


def test_a_start_from_elsewhere_or_below_a_promise_is_wrong() -> None:
    assert failing(lambda runs: runs[1].resumed.update({1: 4})) == [STARTS]
    assert STARTS in failing(lambda runs: runs[0].committed.add(4))
    assert STARTS in failing(lambda runs: setattr(runs[2], "newest", None))


def test_one_tensor_that_differs_or_is_missing_on_one_rank_is_found() -> None:
    other = Held(2, True, "weight", "other", 40)
    assert failing(lambda runs: runs[1].loaded[1].update(weight=other)) == [BITS]
    assert failing(lambda runs: runs[1].loaded[0].pop("weight exp_avg")) == [BITS]
    assert failing(lambda runs: runs[0].saved[2][3].update(weight=other)) == [BITS]
    assert failing(lambda runs: [side.pop("weight") for run in runs for s in run.saved for side in run.saved[s]]
                   and [side.pop("weight", None) for run in runs for side in run.loaded]) == [BITS]


def test_a_loss_that_orders_of_sums_do_not_explain_is_found() -> None:
    assert failing(lambda runs: runs[0].losses[3].update({1: 5.9 + 2.0**-21})) == [CURVE]
    assert failing(lambda runs: runs[1].losses[1].update({5: 5.5 + 1e-4})) == [CURVE]
    assert failing(lambda runs: runs[2].losses[0].update({9: float("nan")})) == [CURVE]
    assert failing(lambda runs: runs[2].losses[0].pop(9)) == [CURVE]


# The ranks


@pytest.mark.parametrize("form", [FULL_RANKS, SMALL_RANKS])
def test_forms_can_be_carried_out(form: object) -> None:
    assert isinstance(form, type(SMALL_RANKS))
    assert all(form.batch % ranks == 0 for ranks in form.ranks)
    assert form.dropout == 0, "masks would be each rank's own"
    first, second, third = kills(form)
    assert third is None
    assert first.saving
    assert form.victim < form.ranks[0]
    assert form.killed_saving % form.save_every == 0
    assert form.save_every < form.killed_saving < form.killed_at < form.steps
    assert second.victims == tuple(range(form.ranks[1]))


def test_a_blow_falls_once_its_first_victim_says_so() -> None:
    kill = RankKill(4, (2,), saving=True)
    assert kill.falls(2, Saving(4))
    assert not kill.falls(1, Saving(4))
    assert not kill.falls(2, Saving(2))
    assert not kill.falls(2, Stepped(4, 1.0))
    assert RankKill(4, (0, 1), saving=False).falls(0, Stepped(4, 1.0))


def test_ranks_that_die_by_themselves_are_told_with_a_log(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, not a directory")
    order = RankOrder(form=FORM, seed=1, store=str(tmp_path / "store"))
    with warm_start("flowstone_demo.rank"), pytest.raises(DiedError, match="Error"):
        run_ranks(order, tmp_path / "log", RankRun(1), None, lambda line: None)


def test_a_blow_that_never_falls_is_told(tmp_path: Path) -> None:
    order = RankOrder(form=FORM, seed=1, store=str(tmp_path / "store"))
    with warm_start("flowstone_demo.rank"), pytest.raises(DiedError, match="before step 99"):
        run_ranks(order, tmp_path / "log", RankRun(1), RankKill(99, (0,), saving=False), lambda line: None)


def test_legs_are_told_in_one_line() -> None:
    runs = made_up()
    lines = [told(run, FORM) for run in runs]
    assert lines[0].startswith("4 ranks, fresh: rank 2 killed as it began to save step 4")
    assert lines[0].endswith("the others: nothing heard from rank 2 for 5 s")
    assert lines[1:] == ["2 ranks, from step 2: all killed after step 7", "1 rank, from step 6: finished at step 12"]
