"""A durable checkpoint of every step by several ranks: each logs a part, and a load takes the steps that all have."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from processes import Ranks, run

from flowstone.commit import catalog
from flowstone.journal import journals
from flowstone.store.local import LocalStore

STEPS = 12


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def undisturbed(request: pytest.FixtureRequest) -> tuple[str, list[list[str]]]:
    """How the ranks train; and for each rank what each step is."""
    return request.param, run(2, "journal_acts", "undisturbed", request.param, STEPS)  # type: ignore[return-value]


def told(results: list[object], name: str) -> list[Any]:
    return [result[name] for result in results]  # type: ignore[index]


def test_every_step_is_durable_and_loads_bit_for_bit(
    tmp_path: Path, undisturbed: tuple[str, list[list[str]]]
) -> None:
    how, position = undisturbed
    path = str(tmp_path / "run")
    first = run(2, "journal_acts", "train", path, how, 6)
    assert told(first, "whole") == [[1], [1]]
    assert told(first, "journaled") == [[2, 3, 4, 5, 6]] * 2
    assert told(first, "bits") == [item[5] for item in position]
    own = told(first, "bytes")
    assert max(own) < 1.5 * min(own), "each rank logs its part"
    if how == "ddp":
        assert sum(own) < 1.5 * 5 * 4 * (96 * 192 + 192 + 192 * 96 + 96 + 96 * 8 + 8), "replicas are logged once"
    assert told(run(2, "journal_acts", "load", path, how, 4), "bits") == [item[3] for item in position]
    again = run(2, "journal_acts", "train", path, how, 9)
    assert told(again, "done") == [6, 6]
    assert told(again, "loaded") == [item[5] for item in position]
    assert told(again, "bits") == [item[8] for item in position]
    assert told(again, "whole") == [[], []], "the journal goes on"
    assert told(run(2, "journal_acts", "load", path, how), "bits") == [item[8] for item in position]


@pytest.mark.parametrize(("lag_steps", "sync_s"), [(1, 0.0), (3, 0.03)])
def test_killed_at_any_instant_the_ranks_lose_no_more_steps_than_was_said_and_the_one_in_progress(
    tmp_path: Path, undisturbed: tuple[str, list[list[str]]], lag_steps: int, sync_s: float
) -> None:
    how, position = undisturbed
    path, chance = str(tmp_path / "run"), random.Random(len(how))

    def noted(kind: str) -> list[int]:
        files = [Path(f"{path}.{kind}.{rank}") for rank in range(2)]
        return [int(file.read_text() or 0) if file.exists() else 0 for file in files]

    for kill in range(3):
        before = max(noted("begun"))
        if before == STEPS:
            break  # this process was late to kill: nothing is left to be done, or to be lost
        ranks = Ranks(2, "journal_acts", "train", path, how, STEPS, 60.0 if kill else 1e-9, lag_steps, sync_s)
        expected, deadline = min(before + chance.randint(1, 3), STEPS), time.monotonic() + 60
        while max(noted("begun")) < expected and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.02)
        first = chance.randrange(2)
        ranks.kill(first, signal.SIGKILL)
        time.sleep(chance.random() * 0.1)  # what launches a job ends the other ranks then
        ranks.kill(1 - first, signal.SIGKILL)
        ranks.end()
        if before:
            assert min(noted("loaded")) >= before - lag_steps, f"step {before} was begun, so this one was durable"
    begun = max(noted("begun"))
    last = run(2, "journal_acts", "train", path, how, STEPS)
    assert min(told(last, "done")) >= begun - lag_steps
    assert told(last, "bits") == [item[-1] for item in position]
    assert told(run(2, "journal_acts", "load", path, how), "bits") == [item[-1] for item in position]


def test_ranks_save_the_same_steps_whole_and_older_journals_go_with_all_files(tmp_path: Path) -> None:
    path = tmp_path / "run"
    results = run(2, "journal_acts", "train", str(path), "ddp", STEPS, 1e-9)
    whole = told(results, "whole")
    assert whole[0] == whole[1]
    assert len(whole[0]) > 2
    assert not any(told(results, "not_journaled"))
    store = LocalStore(path)
    assert catalog.steps(store) == tuple(whole[0][-2:])
    assert all(journal.header.after >= whole[0][-1] for journal in journals.list_journals(store))
    assert not list(path.glob(".deleting-*"))


@pytest.mark.parametrize(
    ("kind", "outcome", "others"),
    [
        ("changes", "ReplayError", "ReplayError"), ("full", "StorageError", "RankError"),
        ("steps", "RankError", "RankError"),
    ],
)
def test_a_step_that_one_rank_cannot_log_is_given_up_by_all_and_the_next_one_is_whole(
    tmp_path: Path, kind: str, outcome: str, others: str
) -> None:
    results = run(2, "journal_acts", "upset", str(tmp_path / "run"), kind)
    outcomes = told(results, "outcomes")
    assert [of[2] for of in outcomes] == [others, outcome], "of step 4"
    assert [of[:2] + of[3:] for of in outcomes] == [["NoneType"] * 6] * 2
    assert told(results, "whole") == [[1, 5], [1, 5]]
    if kind == "changes":
        assert all("rank 1: parameter 0 of AdamW was changed" in of[0][1] for of in told(results, "not_journaled"))
    loaded = run(2, "journal_acts", "load", str(tmp_path / "run"), "ddp")
    assert told(loaded, "step") == [8, 8]
    assert told(loaded, "bits") == told(results, "bits")


def test_ranks_that_may_lag_sync_for_several_steps_at_once_and_save_the_same_steps_whole(
    tmp_path: Path, undisturbed: tuple[str, list[list[str]]]
) -> None:
    how, position = undisturbed
    path = str(tmp_path / "run")
    # the ranks agree on the lag with the first step of the journal, the second of all
    first = run(2, "journal_acts", "train", path, how, 9, 60.0, 4, 0.0, 5)
    assert told(first, "journaled") == [list(range(2, 10))] * 2
    assert min(told(first, "synced")) > 1
    assert told(first, "bits") == [item[8] for item in position]
    assert told(run(2, "journal_acts", "load", path, how, 6), "bits") == [item[5] for item in position]
    again = run(2, "journal_acts", "train", path, how, STEPS, 1e-9, 4, 0.05)
    whole = told(again, "whole")
    assert whole[0] == whole[1]
    assert whole[0]
    assert not any(told(again, "not_journaled"))
    assert told(run(2, "journal_acts", "load", path, how), "bits") == [item[-1] for item in position]


@pytest.mark.parametrize("kind", ["changes", "full"])
def test_a_step_that_one_of_lagging_ranks_cannot_log_takes_those_behind_it_along_and_a_whole_one_follows(
    tmp_path: Path, kind: str
) -> None:
    results = run(2, "journal_acts", "upset", str(tmp_path / "run"), kind, 3, 0.03)
    outcomes = told(results, "outcomes")
    lost = [[step for step, of in enumerate(outcome, 2) if of != "NoneType"] for outcome in outcomes]
    assert lost[0] == lost[1]
    assert lost[0][0] == 4
    assert lost[0] == list(range(4, 4 + len(lost[0])))
    assert len(lost[0]) <= 3
    assert told(results, "whole") == [[1, lost[0][-1] + 1]] * 2
    loaded = run(2, "journal_acts", "load", str(tmp_path / "run"), "ddp")
    assert told(loaded, "step") == [14, 14]
    assert told(loaded, "bits") == told(results, "bits")


def test_ranks_with_different_lags_are_told_so_and_every_other_step_is_whole(tmp_path: Path) -> None:
    results = run(2, "journal_acts", "differ", str(tmp_path / "run"))
    for told_whys in told(results, "not_journaled"):
        assert told_whys
        assert all("rank 1 has lag_steps=1, but rank 0 has 4" in why for _, why in told_whys)
    assert told(results, "whole")[0] == told(results, "whole")[1]
    assert told(results, "whole")[0][:2] == [1, 3]


def test_another_number_of_ranks_loads_the_checkpoint_and_says_what_is_missing(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run(2, "journal_acts", "train", path, "ddp", 5)
    for ranks in (1, 3):
        loaded = run(ranks, "journal_acts", "load", path, "ddp")
        assert told(loaded, "step") == [1] * ranks
        assert told(loaded, "newest") == [5] * ranks
        assert told(loaded, "reason") == [f"the journal was written by 2 ranks, but this job has {ranks}"] * ranks
