"""docs/PERFORMANCE.md has only figures from the pages of the benchmarks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench import front_page
from bench.front_page import FOLDER, MissingGoalError, Page

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    shutil.copytree(DOCS / FOLDER, tmp_path / FOLDER)
    (tmp_path / "PERFORMANCE.md").write_text("old")
    return tmp_path


def test_our_own_front_page_is_what_its_pages_say() -> None:
    assert (DOCS / "PERFORMANCE.md").read_text() == front_page.front_page(DOCS / FOLDER)


def test_every_goal_line_of_a_page_is_read() -> None:
    for path in (DOCS / FOLDER).glob("*.md"):
        lines = [line for line in path.read_text().splitlines() if line.startswith(("- pass  ", "- miss  "))]
        goals = Page.read(path).goals
        assert len(goals) == len(lines), path.name
        assert sum(goal.is_met for goal in goals) == sum(line.startswith("- pass") for line in lines)


def test_a_page_that_a_benchmark_updates_renews_the_front_page(docs: Path) -> None:
    page = docs / FOLDER / "training.md"
    text = page.read_text()
    line = next(line for line in text.splitlines() if "blocked in total" in line)
    page.write_text(text.replace(line, "- miss  blocked in total (made up), ms: 31.5 (30.0-33.0), goal at most 20.0"))
    front_page.renew(page)
    made = (docs / "PERFORMANCE.md").read_text()
    assert "a save every 5 steps blocks training | 31.5 (30.0-33.0) | at most 20.0 | **no** |" in made
    assert "- blocked in total (made up), ms: 31.5 (30.0-33.0), goal at most 20.0 ([Beside training]" in made


def test_a_goal_that_no_page_tells_about_any_more_is_an_error(docs: Path) -> None:
    page = docs / FOLDER / "ranks.md"
    page.write_text(page.read_text().replace("one job of four ranks, cold load", "another name"))
    with pytest.raises(MissingGoalError, match=r"ranks\.md has no goal that begins with 'one job of four ranks, cold"):
        front_page.renew(page)
    assert (docs / "PERFORMANCE.md").read_text() == "old"


def test_a_page_elsewhere_renews_nothing(tmp_path: Path) -> None:
    (tmp_path / "PERFORMANCE.md").write_text("old")
    (tmp_path / "tables.md").write_text("- pass  a: 1, goal at least 1\n")
    front_page.renew(tmp_path / "tables.md")
    assert (tmp_path / "PERFORMANCE.md").read_text() == "old"
