"""The section of docs/PERFORMANCE.md that the benchmark writes, between two markers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bench import plots
from bench.goals import goals
from bench.records import Run
from bench.table import Table, conditions, machine_line, notes, tables

BEGIN, END = "<!-- bench:start -->", "<!-- bench:end -->"


class MarkerError(Exception):
    """The document does not hold the two markers, in order, once each."""


def section(run: Run, figures: str | None = None) -> str:
    """Markers included. `figures` is where the plots lie, as the document says it; None: there are none."""
    parts = [BEGIN, f"`{run.command}`, {run.started_utc}", machine_line(run.machine) + ".", conditions(run)]
    parts.append("**Goals**\n\n" + "\n".join(f"- {goal}" for goal in goals(run)))
    if figures is not None:
        parts += [f"![{chart.title}]({figures}/{chart.name}.svg)" for chart in plots.charts(run)]
    parts += [f"**{table.title}**\n\n{markdown(table)}" for table in tables(run)]
    parts.append("\n".join(f"- {note}" for note in notes(run)))
    return "\n\n".join((*filter(None, parts), END)) + "\n"


def update(path: Path, run: Run, figures: Path | None) -> None:
    """Replace the section in place; the rest of the document stays as it is."""
    replace(path, BEGIN, END, section(run, as_linked(figures, path)))


def as_linked(figures: Path | None, path: Path) -> str | None:
    """Where the plots lie, as the document at `path` says it."""
    return None if figures is None else Path(os.path.relpath(figures, path.parent)).as_posix()


def replace(path: Path, begin: str, end: str, section: str) -> None:
    """Put `section`, which holds the markers `begin` and `end`, in the place of what lies between them."""
    before, begun, rest = path.read_text().partition(begin)
    old, ended, after = rest.partition(end)
    if not begun or not ended or begin in old + after or end in before + after:
        raise MarkerError(f"{path} needs the lines {begin} and {end}, in this order, once each")
    path.write_text(before + section.rstrip("\n") + after)


def markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"

    rule = "|---" + "|---:" * (len(table.columns) - 1) + "|"
    return "\n".join((line(table.columns), rule, *map(line, table.rows)))
