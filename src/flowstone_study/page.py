"""Write a study as one HTML page, which needs no other files, no scripts and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from flowstone_study.export import COLUMNS, row
from flowstone_study.figures import DIRECTION_LABELS, Figure, figures
from flowstone_study.planning import Plan
from flowstone_study.records import Sample, Study
from flowstone_study.report import best_of_each, machine_line, notes, probe_lines
from flowstone_study.summary import Summary
from flowstone_study.svg import draw, number

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def to_html(study: Study, plan: Plan, summary: Summary) -> str:
    """The HTML page of a study, from its plan and its summary."""
    title = f"I/O study of {study.path}"
    where = f"{machine_line(study)}; Flowstone {study.flowstone}; {study.started}"
    remarks = _list(notes(study, plan, summary))
    works = _list(probe_lines(study.probe))
    body = [
        f'<header><h1>{escape(title)}</h1><p class="machine">{escape(where)}</p></header>',
        _best(study, plan, summary),
        f"<section><h2>Before you read on</h2>{remarks}<h3>Supported I/O methods</h3>{works}</section>",
        *(_figure(figure) for figure in figures(plan, summary)),
        _samples(study.samples),
    ]
    style = (files("flowstone_study") / "page.css").read_text(encoding="utf-8")
    return _PAGE.format(title=escape(title), style=style, body="\n".join(body))


def _best(study: Study, plan: Plan, summary: Summary) -> str:
    cards = [
        f'<div class="card"><h3>{escape(DIRECTION_LABELS[direction].split(":")[0])}</h3>'
        f'<p class="rate">{number(best.fastest.gb_per_s)} <span>GB/s</span></p>'
        f"{''.join(f'<p>{escape(line)}</p>' for line in best.lines)}</div>"
        for direction, best in best_of_each(study, plan, summary).items()
    ]
    return f'<section><h2>Best settings found</h2><div class="cards">{"".join(cards)}</div></section>'


def _figure(figure: Figure) -> str:
    legend = "" if figure.kind == "heat map" else "".join(
        f'<li><svg viewBox="0 0 12 12" aria-hidden="true"><rect class="s{index}" width="12" height="12" rx="2"/></svg>'
        f"{escape(name)}</li>"
        for index, name in enumerate(figure.series)
    )
    medians = [e.median for panel in figure.panels for group in panel.groups for e in group.entries if e.median]
    if legend and figure.unit == "GB/s" and any(median.rounds > 1 for median in medians):
        legend += "<li>thin line: slowest to fastest round</li>"
    panels = "".join(
        f'<div class="panel"><h3>{escape(panel.title)}, {figure.unit}</h3>{drawing}</div>'
        for panel, drawing in zip(figure.panels, draw(figure), strict=True)
    )
    return (
        f"<section><h2>{escape(figure.title)}</h2>{_list(figure.results)}"
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + f'<div class="panels">{panels}</div><p class="about">{escape(figure.about)}</p></section>'
    )


def _samples(samples: Sequence[Sample]) -> str:
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in COLUMNS)
    body = "".join(f"<tr>{''.join(_field(value) for value in row(sample))}</tr>\n" for sample in samples)
    return (
        f"<section><h2>Samples</h2><details><summary>All {len(samples)}, in the order in which they were taken"
        f'</summary><div class="wide"><table id="samples"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'
        "</div></details></section>"
    )


def _field(value: object) -> str:
    """A cell of a table. The value is written as in JSON, so that page, CSV and JSON can be compared; empty if it was
    not measured.
    """
    if value is None:
        return "<td></td>"
    if isinstance(value, bool):
        return f"<td>{str(value).lower()}</td>"
    if isinstance(value, float):
        return f'<td class="n"><data value="{value!r}">{value:.4g}</data></td>'
    return f'<td class="n">{value}</td>' if isinstance(value, int) else f"<td>{escape(str(value))}</td>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
