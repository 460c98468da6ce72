"""The report of a benchmark, and its two forms: on a console, and as a section of a document, with charts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table as RichTable

from bench.goals import Goal

CONSOLE_WIDTH = 190  # if there is no terminal


class MarkerError(Exception):
    """The document does not contain the two markers once each, in order."""


class Drawing(Protocol):
    """A chart; `name` is its file's."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    def svg(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text. The first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything in the order in which it is shown.

    name        of the benchmark, in the markers of its section
    command     repeats the measurement
    conditions  of the measurement; may be empty
    goals       empty if a benchmark only compares
    """

    name: str
    command: str
    started_utc: str
    machine: Mapping[str, str]
    conditions: str
    goals: Sequence[Goal]
    charts: Sequence[Drawing]
    tables: Sequence[Table]
    notes: Sequence[str]

    @property
    def machine_line(self) -> str:
        return ", ".join(f"{name} {value}" if name != "CPU" else value for name, value in self.machine.items())


def markers(name: str) -> tuple[str, str]:
    """The markers around the section of benchmark `name`."""
    return f"<!-- {name}:start -->", f"<!-- {name}:end -->"


def section(report: Report, figures: str | None = None) -> str:
    """With markers. `figures` is the path of the charts from the document; None: there are none."""
    begin, end = markers(report.name)
    parts = [begin, f"`{report.command}`, {report.started_utc}", f"{report.machine_line}.", report.conditions]
    if report.goals:
        parts.append("**Goals**\n\n" + "\n".join(f"- {goal}" for goal in report.goals))
    if figures is not None:
        parts += [f"![{chart.title}]({figures}/{chart.name}.svg)" for chart in report.charts]
    parts += [f"**{table.title}**\n\n{markdown(table)}" for table in report.tables]
    parts.append("\n".join(f"- {note}" for note in report.notes))
    return "\n\n".join((*filter(None, parts), end)) + "\n"


def update(path: Path, report: Report, figures: Path | None) -> None:
    """Replace the report's section of the document; the rest does not change. `figures`: the folder of the charts."""
    linked = None if figures is None else Path(os.path.relpath(figures, path.parent)).as_posix()
    begin, end = markers(report.name)
    before, begun, rest = path.read_text().partition(begin)
    old, ended, after = rest.partition(end)
    if not begun or not ended or begin in old + after or end in before + after:
        raise MarkerError(f"{path} needs the lines {begin} and {end}, in this order, once each")
    path.write_text(before + section(report, linked).rstrip("\n") + after)


def markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"

    rule = "|---" + "|---:" * (len(table.columns) - 1) + "|"
    return "\n".join((line(table.columns), rule, *map(line, table.rows)))


def draw(charts: Sequence[Drawing], directory: Path) -> None:
    """Write a file for each."""
    directory.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        (directory / f"{chart.name}.svg").write_text(chart.svg())


def show(report: Report) -> None:
    """Print to standard output."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=CONSOLE_WIDTH)
    for text in filter(None, (report.machine_line, report.conditions)):
        console.print(text, style="dim")
    for table in report.tables:
        console.print(_for_console(table))
    for note in report.notes:
        console.print(note, style="dim", markup=False)
    for goal in report.goals:
        console.print(str(goal), style="green" if goal.is_met else "red", markup=False)


def _for_console(table: Table) -> RichTable:
    rendered = RichTable(title=table.title, title_justify="left")
    for position, column in enumerate(table.columns):
        rendered.add_column(column, justify="right" if position else "left", overflow="fold")
    for row in table.rows:
        rendered.add_row(*row)
    return rendered
