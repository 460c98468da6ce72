"""Files of ranks that contradict each other, or are damaged on one: both end alike, at a step that all have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from journal_forgery import forge
from processes import run

from flowstone.commit import journals
from flowstone.store.local import LocalStore

LAST = 5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """A store with the journals of two ranks, and what each step was on each rank."""
    root = tmp_path_factory.mktemp("together") / "run"
    run(2, "journal_acts", "train", str(root), "ddp", LAST)
    return root, run(2, "journal_acts", "undisturbed", "ddp", LAST)  # type: ignore[return-value]


@pytest.fixture
def copied(saved: tuple[Path, list[list[str]]], tmp_path: Path) -> tuple[Path, Path, list[list[str]]]:
    """A copy, the file of rank 1 in it, and what each step was."""
    shutil.copytree(saved[0], tmp_path / "run")
    (path,) = (tmp_path / "run").glob("journal-*/rank-00001.journal")
    return tmp_path / "run", path, saved[1]


def loads(root: Path, at: list[list[str]], *, fallback: bool = False) -> list[Any]:
    """On each rank the step that it loads, whose bits are what they were; or the name of the error."""
    found: list[Any] = []
    for rank, one in enumerate(run(2, "journal_acts", "load", str(root), "ddp", None, fallback)):
        assert isinstance(one, dict)
        if "error" in one:
            found.append(one["error"])
            continue
        assert one["bits"] == at[rank][one["step"] - 1], f"step {one['step']} is not what it was"
        found.append(one["step"])
    return found


def test_a_tail_that_is_torn_on_one_rank_is_cut_on_both(copied: tuple[Path, Path, list[list[str]]]) -> None:
    root, path, at = copied
    store = LocalStore(root)
    (journal,) = journals.listed(store)
    last = journals.frames(store, journal, 1)[-1]
    with path.open("r+b") as file:
        file.truncate(last.offset + last.frame.frame_bytes - 4096)
    assert loads(root, at) == [LAST - 1] * 2
    path.unlink()
    assert loads(root, at) == [1, 1], "without a file of one rank there is no step"


def test_damage_in_the_file_of_one_rank_ends_both_alike(copied: tuple[Path, Path, list[list[str]]]) -> None:
    root, path, at = copied
    store = LocalStore(root)
    (journal,) = journals.listed(store)
    place = journals.frames(store, journal, 1)[2]  # of step 4
    content = bytearray(path.read_bytes())
    content[place.offset + place.frame.payload_offset + 4096] ^= 1
    path.write_bytes(content)
    assert set(loads(root, at)) <= {"DamagedError", "RankError"}
    assert loads(root, at, fallback=True) == [3, 3]


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "is of another rank": lambda row: row.update(rank=0),
    "claims another number of ranks": lambda row: row.update(ranks=1 << 40),
    "begins with another checkpoint": lambda row: row.update(checkpoint="x"),
    "has an owner that is no rank": lambda row: row["owners"][0].__setitem__(0, 7),
    "has owners of too few parameters": lambda row: row["owners"][0].pop(),
    "claims to have all gradients": lambda row: row.update(owners=[[1] * len(row["owners"][0])]),
    "has other optimizers": lambda row: row["optimizers"][0].update(kind="SGD"),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_opening_of_one_rank_ends_both_with_an_error_or_at_the_checkpoint(
    copied: tuple[Path, Path, list[list[str]]], change: Callable[[dict[str, Any]], object]
) -> None:
    root, path, at = copied
    forge(path, 0, change)
    found = loads(root, at)
    assert found == [1, 1] or not any(isinstance(one, int) for one in found), found
