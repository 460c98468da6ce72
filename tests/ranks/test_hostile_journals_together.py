"""Files of ranks that contradict each other, or damage on one rank: all ranks end at the same step, which all have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import run

from flowstone.journal import journals
from flowstone.store.local import LocalStore
from journal_forgery import forge

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


def loads(root: Path, rows: list[list[str]], *, fallback: bool = False) -> list[Any]:
    """On each rank the step that it loads, whose bits are what they were; or the name of the error."""
    collected: list[Any] = []
    for rank, row in enumerate(run(2, "journal_acts", "load", str(root), "ddp", None, fallback)):
        assert isinstance(row, dict)
        if "error" in row:
            collected.append(row["error"])
            continue
        assert row["bits"] == rows[rank][row["step"] - 1], f"step {row['step']} is not what it was"
        collected.append(row["step"])
    return collected


def test_a_tail_that_is_torn_on_one_rank_is_cut_on_both(copied: tuple[Path, Path, list[list[str]]]) -> None:
    root, path, position = copied
    store = LocalStore(root)
    (journal,) = journals.list_journals(store)
    last = journals.complete_frames(store, journal, 1)[-1]
    with path.open("r+b") as file:
        file.truncate(last.offset + last.frame.frame_bytes - 4096)
    assert loads(root, position) == [LAST - 1] * 2
    path.unlink()
    assert loads(root, position) == [1, 1], "without a file of one rank there is no step"


def test_damage_in_the_file_of_one_rank_ends_both_alike(copied: tuple[Path, Path, list[list[str]]]) -> None:
    root, path, position = copied
    store = LocalStore(root)
    (journal,) = journals.list_journals(store)
    place = journals.complete_frames(store, journal, 1)[2]  # of step 4
    content = bytearray(path.read_bytes())
    content[place.offset + place.frame.payload_offset + 4096] ^= 1
    path.write_bytes(content)
    assert set(loads(root, position)) <= {"DamagedError", "RankError"}
    assert loads(root, position, fallback=True) == [3, 3]


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
    root, path, position = copied
    forge(path, 0, change)
    actual = loads(root, position)
    assert actual == [1, 1] or not any(isinstance(entry, int) for entry in actual), actual
