"""docs/PERFORMANCE.md, the page that a person reads first: made of what the pages of the benchmarks say.

    PYTHONPATH=src python -m bench.front_page docs/PERFORMANCE.md

Every figure on it stands, with its spread, on the page that a benchmark has written; this makes no measurement.
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

# These pages tell of their goals in words.
IN_WORDS = ("codecs", "deltas", "every-step", "compressed-gradients", "objects", "memory-tier", "striped")

# The questions that a choice depends on, each answered by the goal of a page that begins with these words.
QUESTIONS = (
    ("Durable saves, of the rate at which fio writes", "rivals", "durable save, later saves, of fio's write rate"),
    ("... the first of a process", "rivals", "durable save, first save of a process, of fio's write rate"),
    ("Cold load in a fresh process, of the rate at which fio reads", "rivals", "cold load into existing tensors"),
    ("Durable saves, times as fast as torch.save", "rivals", "durable save, later saves, times the rate of torch.save"),
    ("... as DCP async", "rivals", "durable save, later saves, times the rate of DCP async"),
    ("... as TorchSnapshot", "rivals", "durable save, later saves, times the rate of TorchSnapshot take"),
    ("Processor seconds for each GB saved", "rivals", "CPU-seconds per GB, save through the arena"),
    ("One job of four ranks, saves, of four fio jobs", "ranks", "one job of four ranks, later saves"),
    ("... cold load", "ranks", "one job of four ranks, cold load"),
    ("dcp.save with Flowstone's writer, times as fast as with DCP's own", "dcp",
     "dcp.save through Flowstone, later saves, times the rate of DCP, 1 thread"),
    ("Blocked by dcp.async_save, of what it blocks with DCP's own writer", "dcp", "dcp.async_save through Flowstone"),
    ("Import of a foreign checkpoint, of fio that reads and writes at once", "conversion", "import, of the slower"),
    ("Training time with a save every 5 steps, of none", "training", "training time, a save every 5 steps"),
    ("Milliseconds for which training waits for such a save", "training", "blocked in total"),
    ("Milliseconds inside `save` of 5 GB in 1,800 tensors", "training", "`save` of 1,800 tensors of 5 GB blocks, plan"),
    ("Processor seconds to plan 405B on 8,192 ranks", "scale", "Llama-3 405B, FSDP over all, 8,192 ranks"),
)


class MissingGoalError(Exception):
    """A page does not tell about a goal that the front page quotes."""


@dataclass(frozen=True, slots=True)
class GoalLine:
    """One line of a page. `reached`: the median, with the spread in parentheses; `wanted`: with "at least"."""

    is_met: bool
    text: str
    reached: str
    wanted: str


@dataclass(frozen=True, slots=True)
class Page:
    """What the page of a benchmark says. `command` and `date` are empty for what no benchmark has written."""

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
        f"| {question} | {goal.reached} | {goal.wanted} | {'yes' if goal.is_met else '**no**'} |"
        for question, page, words in QUESTIONS for goal in [pages[page].goal(words)]
    ]
    missed = [
        f"- {goal.text}: {goal.reached}, goal {goal.wanted} ([{page.title}]({FOLDER}/{page.name}.md))"
        for page in pages.values() for goal in page.goals if not goal.is_met
    ]
    rows = map(_row, pages.values())
    *first, last = (f"[{pages[name].title}]({FOLDER}/{name}.md)" for name in IN_WORDS)
    in_words = "; ".join(first) + f"; and {last} tell of their goals in words: some of these were missed, too."
    return _TEXT.format(
        answers="\n".join(answers), pages="\n".join(rows), missed="\n".join(map(_filled, missed)),
        in_words=_filled(in_words),
    )


def _filled(text: str) -> str:
    """A paragraph, or an item of a list, in lines of 120 columns."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def renew(updated: Path) -> None:
    """Make the front page anew, where the page that was `updated` is one of those that it is made of."""
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

Every figure comes from a command, which stands beside it; those of a table from one run, unless it says otherwise.
Machines are noisy: read the ratios, which are medians over interleaved rounds, and the spread in parentheses. Durable
means that files and directories were synced inside the timer, for every system. All machines were virtual ones of two
cores and one disk, and nothing here was measured on a GPU.

| | median (lowest-highest) | goal | reached |
|---|---|---|---|
{answers}

![Durable save, GB/s](figures/durable-save.svg)

![Cold load into existing tensors, GB/s](figures/cold-load.svg)

![Training time, of no saves](figures/interference-total.svg)

## Every measurement

`make bench` measures your own disk in a quarter of an hour. The pages hold every rival and every row, how it was
measured, and why goals were missed. `make bench-pairs AGAINST=COMMIT` measures what a change costs or gains: this tree
against another commit, in pairs ([TESTING](TESTING.md#what-a-change-costs)).

| page | goals reached | command | measured |
|---|---|---|---|
{pages}

## Goals that were missed

{missed}

{in_words}
"""


def main() -> int:
    page = Path(sys.argv[1])
    page.write_text(front_page(page.parent / FOLDER))
    return 0


if __name__ == "__main__":
    sys.exit(main())
