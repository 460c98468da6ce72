"""A study as tables for a terminal. Returns objects that rich prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flowstone_study.figures import DIRECTION_LABELS, Figure, Panel, figures
from flowstone_study.planning import Plan
from flowstone_study.records import Study
from flowstone_study.report import best_of_each, machine_line, notes
from flowstone_study.summary import Summary
from flowstone_study.svg import number


def renderables(study: Study, plan: Plan, summary: Summary) -> Iterator[RenderableType]:
    """The figures as tables, each with its result; then remarks; and at last the best settings."""
    for figure in figures(plan, summary):
        yield Text(f"\n{figure.title}, {figure.unit}", style="bold")
        yield from (Text(f"  {line}", style="dim") for line in figure.results)
        for panel in figure.panels:
            yield _table(figure, panel)
    yield Text("")
    yield from (Text(line, style="dim") for line in (machine_line(study), *notes(study, plan, summary)))
    yield Text("\nBest settings found", style="bold")
    for direction, best in best_of_each(study, plan, summary).items():
        rate = f"{number(best.fastest.gb_per_s)} GB/s"
        yield Text(f"  {DIRECTION_LABELS[direction].split(':')[0]:<8} {rate}", style="bold green")
        yield from (Text(f"           {line}") for line in best.lines)


def _table(figure: Figure, panel: Panel) -> Table:
    """A table with a row for each group and a column for each series. The best value is highlighted."""
    title = f"{panel.title}; across: {figure.series_title}" if figure.series_title else panel.title
    table = Table(title=escape(title), title_justify="left", title_style="")
    table.add_column(figure.group_title)
    for name in figure.series:
        table.add_column(name, justify="right")
    values = [v for group in panel.groups for entry in group.entries if (v := entry.value(figure.unit)) is not None]
    top = (max if figure.unit == "GB/s" else min)(values, default=None)
    for group in panel.groups:
        cells = []
        for entry in group.entries:
            value = entry.value(figure.unit)
            if value is None:
                cells.append("n/a" if entry.cell else "")
            else:
                cells.append(f"[bold green]{number(value)}[/]" if value == top else number(value))
        table.add_row(escape(group.label), *cells)
    return table
