"""Make docs/PERFORMANCE.md, the first page to read, from the pages of the benchmarks.

    PYTHONPATH=src python -m bench.front_page docs/PERFORMANCE.md

Each of its figures is also, with its range, on the page that a benchmark has written. This program measures nothing.
"""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

FOLDER = "performance"  # beside the page
PAGES = ("rivals", "ranks", "dcp", "training", "watching", "tracing", "in-place", "codecs", "deltas", "derived",
         "every-step", "compressed-gradients", "quantized", "objects", "memory-tier", "peers", "striped", "devices",
         "conversion", "scale", "pairs")
_GOAL = re.compile(r"^- (pass|miss)  (.+): ([^:]+), goal (.+)$", re.MULTILINE)
_COMMAND = re.compile(r"^`([^`]+)`, (\d{4}-\d\d-\d\d)$", re.MULTILINE)

# These pages describe their goals in the text.
IN_WORDS = ("codecs", "deltas", "every-step", "compressed-gradients", "objects", "memory-tier", "striped")

# The questions for a choice of a system. The goal of a page that begins with these words answers each.
QUESTIONS = (
    ("Durable saves, relative to fio's write rate", "rivals", "durable save, later saves, relative to fio"),
    ("Durable saves that are the first of a process, relative to fio's write rate", "rivals",
     "durable save, first save of a process, relative to fio"),
    ("Cold load in a new process, relative to fio's read rate", "rivals", "cold load into existing tensors"),
    ("Durable saves, rate relative to torch.save", "rivals", "durable save, later saves, rate relative to torch.save"),
    ("Durable saves, rate relative to DCP async", "rivals", "durable save, later saves, rate relative to DCP async"),
    ("Durable saves, rate relative to TorchSnapshot", "rivals",
     "durable save, later saves, rate relative to TorchSnapshot take"),
    ("Processor seconds for each GB saved", "rivals", "CPU-seconds per GB, save through the arena"),
    ("One job of four ranks, saves, relative to four fio jobs", "ranks", "one job of four ranks, later saves"),
    ("One job of four ranks, cold load, relative to four fio jobs", "ranks", "one job of four ranks, cold load"),
    ("dcp.save with Flowstone's writer, rate relative to DCP's own writer", "dcp",
     "dcp.save through Flowstone, later saves, rate relative to DCP, 1 thread"),
    ("Time for which dcp.async_save blocks, relative to DCP's own writer", "dcp", "dcp.async_save through Flowstone"),
    ("Rate of an import, relative to fio that reads and writes at the same time", "conversion", "import, relative to"),
    ("Training time with a save every 5 steps, relative to no saves", "training", "training time, a save every 5"),
    ("Milliseconds for which a save every 5 steps blocks training", "training", "blocked in total"),
    ("Milliseconds inside `save` of 5 GB in 1,800 tensors", "training",
     "time for which `save` blocks training, 1,800 tensors of 5 GB in all, later"),
    ("Processor seconds to plan the first save of Llama-3 405B on 8,192 ranks", "scale",
     "Llama-3 405B, FSDP over all, 8,192 ranks"),
)


class MissingGoalError(Exception):
    """A page does not have a goal that the front page quotes."""


@dataclass(frozen=True, slots=True)
class GoalLine:
    """A goal's line in a page. `reached` is the median with the range in parentheses; `target` begins "at least"."""

    is_met: bool
    text: str
    reached: str
    target: str


@dataclass(frozen=True, slots=True)
class Page:
    """The page of a benchmark. `command` and `date` are empty if no benchmark has written it."""

    name: str
    title: str
    command: str
    date: str
    goals: tuple[GoalLine, ...]

    @classmethod
    def read(cls, path: Path) -> Page:
        text = path.read_text()
        made = _COMMAND.search(text)
        goals = [GoalLine(verdict == "pass", *rest) for verdict, *rest in _GOAL.findall(text)]
        title = text.partition("\n")[0].removeprefix("# ")
        return cls(path.stem, title, *(made.groups() if made else ("", "")), tuple(goals))

    def goal(self, words: str) -> GoalLine:
        """Raises MissingGoalError."""
        for goal in self.goals:
            if goal.text.startswith(words):
                return goal
        raise MissingGoalError(f"{self.name}.md has no goal that begins with {words!r}")


def front_page(folder: Path) -> str:
    """The page, from the pages in `folder`."""
    pages = {name: Page.read(folder / f"{name}.md") for name in PAGES}
    answers = [
        f"| {question} | {goal.reached} | {goal.target} | {'yes' if goal.is_met else '**no**'} |"
        for question, page, words in QUESTIONS for goal in [pages[page].goal(words)]
    ]
    missed = [
        f"- {goal.text}: {goal.reached}, goal {goal.target} ([{page.title}]({FOLDER}/{page.name}.md))"
        for page in pages.values() for goal in page.goals if not goal.is_met
    ]
    rows = map(_row, pages.values())
    *first, last = (f"[{pages[name].title}]({FOLDER}/{name}.md)" for name in IN_WORDS)
    missed_too = "describe their goals in the text. Some of these goals were missed, too."
    in_words = "; ".join(first) + f"; and {last} {missed_too}"
    return _TEXT.format(
        answers="\n".join(answers), pages="\n".join(rows), missed="\n".join(map(_filled, missed)),
        in_words=_filled(in_words),
    )


def _filled(text: str) -> str:
    """A paragraph, or an item of a list, in lines of 120 columns."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def renew(updated: Path) -> None:
    """Make the front page again if it is made from the page that was `updated`."""
    page = updated.parent.parent / "PERFORMANCE.md"
    if updated.parent.name == FOLDER and page.exists():
        page.write_text(front_page(updated.parent))


def _row(page: Page) -> str:
    in_words = "see there" if page.name in IN_WORDS else ""
    met = f"{sum(goal.is_met for goal in page.goals)} of {len(page.goals)}" if page.goals else in_words
    command = f"`{page.command}`" if page.command else "see there"
    return f"| [{page.title}]({FOLDER}/{page.name}.md) | {met} | {command} | {page.date} |"


_TEXT = """\
# Performance

Every figure was measured by the command that is named with it, and the figures of a table come from one run, unless the
text says otherwise. Absolute times differ from run to run, so compare ratios, which are medians over several rounds,
and the ranges in parentheses. fio is a program that measures a disk's own rate. *Durable* means for every system that
files and directories were synced before the timer stopped. "(0.90 is tolerated)" means that a missed goal is still
acceptable down to 0.90. All machines were virtual, with two cores and one disk. Nothing was measured on a GPU.

| | median (lowest-highest) | goal | reached |
|---|---|---|---|
{answers}

![Durable save, GB/s](figures/durable-save.svg)

![Cold load into existing tensors, GB/s](figures/cold-load.svg)

![Training time, relative to no saves](figures/interference-total.svg)

## Every measurement

`make bench` measures your own disk in a quarter of an hour. Each page below has all results of one benchmark, and says
how they were measured, and why goals were missed. `make bench-pairs AGAINST=COMMIT` measures what a change of the code
costs or gains: it compares this source tree with another commit ([TESTING](TESTING.md#what-a-change-costs)).

| page | goals reached | command | measured |
|---|---|---|---|
{pages}

## Goals that were missed

Some of the lines below give the least value that is possible (over all ways to divide the bytes between the ranks that
write). Where this value is above the goal, the goal cannot be reached.

{missed}

{in_words}
"""


def main() -> int:
    page = Path(sys.argv[1])
    page.write_text(front_page(page.parent / FOLDER))
    return 0


if __name__ == "__main__":
    sys.exit(main())
