"""Draw the panels of a figure as SVG, for the HTML page.

Colors are CSS classes, which the page's style defines for light and dark mode. Every bar and tile has a title, which is
shown under the pointer, with the settings of the cell and its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10

from flowstone_study.figures import Entry, Figure, Panel, Unit
from flowstone_study.summary import cell_label

WIDTH = 560  # width of every drawing, in its own units; text is 12 units high
_LABELS_WIDTH = 152  # space for the longest name of a group
_VALUE_WIDTH = 58  # space for the number after the longest bar
_BAR, _BAR_GAP, _GROUP_GAP = 13, 2, 11
_ROW, _TOP, _BOTTOM = 27, 8, 34
_DARK_FROM = 0.55  # from this fraction of the best rate on, the text on a tile must have another color to be readable


def draw(figure: Figure) -> tuple[str, ...]:
    """A drawing of each panel. All have the same scale."""
    entries = [entry for panel in figure.panels for group in panel.groups for entry in group.entries]
    top = max((_high(entry, figure.unit) for entry in entries), default=0.0) or 1.0
    drawing = _heat_map if figure.kind == "heat map" else _bars
    return tuple(drawing(figure, panel, top) for panel in figure.panels)


def number(value: float) -> str:
    """A number as text, with at most three significant digits."""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _heat_map(figure: Figure, panel: Panel, top: float) -> str:
    left = 88
    step = (WIDTH - left) / len(figure.series)
    values = [v for group in panel.groups for entry in group.entries if (v := entry.value(figure.unit)) is not None]
    best = max(values, default=0.0)
    marks = []
    for row, group in enumerate(panel.groups):
        y = _TOP + row * _ROW
        marks.append(_text(left - 8, y + 17, group.label, "label end"))
        marks += [_tile(left + n * step, y, step, entry, top, best=best) for n, entry in enumerate(group.entries)]
    foot = _TOP + len(panel.groups) * _ROW
    marks += [_text(left + (n + 0.5) * step, foot + 14, name, "label mid") for n, name in enumerate(figure.series)]
    marks.append(_text(left + (WIDTH - left) / 2, foot + 30, figure.series_title, "axis mid"))
    marks.append(_text(left - 8, foot + 14, figure.group_title, "axis end"))
    return _svg(foot + _BOTTOM, marks, f"{figure.title}. {panel.title}, {figure.unit}")


def _tile(x: float, y: float, width: float, entry: Entry, top: float, *, best: float) -> str:
    box = f'x="{x + 1:.1f}" y="{y}" width="{width - 2:.1f}" height="{_ROW - 3}" rx="3"'
    if entry.median is None:
        if entry.cell is None:
            return ""
        return f'<g>{_title(entry)}<rect class="void" {box}/>{_text(x + width / 2, y + 16, "n/a", "quiet mid")}</g>'
    value = entry.median.gb_per_s
    share = min(1.0, value / top)
    shade = "tile best" if value == best else "tile"
    ink = "onto mid" if share > _DARK_FROM else "value mid"
    return (
        f'<g>{_title(entry)}<rect class="{shade}" {box} fill-opacity="{0.08 + 0.92 * share:.2f}"/>'
        f"{_text(x + width / 2, y + 16, number(value), ink)}</g>"
    )


def _bars(figure: Figure, panel: Panel, top: float) -> str:
    span = WIDTH - _LABELS_WIDTH - _VALUE_WIDTH
    ticks = _ticks(top)
    scale = span / ticks[-1]
    drawn, y = [], float(_TOP)
    for group in panel.groups:
        shown = [(index, entry) for index, entry in enumerate(group.entries) if entry.cell is not None]
        height = len(shown) * (_BAR + _BAR_GAP)
        drawn.append(_text(_LABELS_WIDTH - 8, y + height / 2 + 3, group.label, "label end"))
        for index, entry in shown:
            drawn.append(_bar(y, index, entry, scale, figure.unit))
            y += _BAR + _BAR_GAP
        y += _GROUP_GAP
    foot = y - _GROUP_GAP + 4
    grid = []
    for tick in ticks:
        x = _LABELS_WIDTH + tick * scale
        grid.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{foot:.1f}"/>')
        grid.append(_text(x, foot + 14, f"{tick:g}", "label mid"))
    grid.append(_text(_LABELS_WIDTH + span / 2, foot + 30, figure.unit, "axis mid"))
    return _svg(foot + _BOTTOM, [*grid, *drawn], f"{figure.title}. {panel.title}, {figure.unit}")


def _bar(y: float, series: int, entry: Entry, scale: float, unit: Unit) -> str:
    value = entry.value(unit)
    if value is None or entry.median is None:
        return f"<g>{_title(entry)}{_text(_LABELS_WIDTH + 5, y + 10, 'not measured', 'quiet')}</g>"
    mark = f'<rect class="s{series}" x="{_LABELS_WIDTH}" y="{y}" width="{value * scale:.1f}" height="{_BAR}" rx="2"/>'
    whisker, end = "", _LABELS_WIDTH + value * scale
    if unit == "GB/s" and entry.median.rounds > 1:
        low, end = (_LABELS_WIDTH + rate * scale for rate in (entry.median.low, entry.median.high))
        middle = y + _BAR / 2
        ends = f"M{low:.1f} {middle - 3}v6M{end:.1f} {middle - 3}v6"
        whisker = f'<path class="whisker" d="M{low:.1f} {middle}H{end:.1f}{ends}"/>'
    return f"<g>{_title(entry)}{mark}{whisker}{_text(end + 5, y + 10, number(value), 'value')}</g>"


def _high(entry: Entry, unit: Unit) -> float:
    if entry.median is None:
        return 0.0
    return entry.median.high if unit == "GB/s" else entry.median.cpu_s_per_gb


def _ticks(top: float) -> list[float]:
    """Round numbers for an axis, from 0 to just above `top`: four to eight of them."""
    rough = top / 5
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    count = -int(-top // step)
    return [round(step * number, 10) for number in range(count + 1)]


def _title(entry: Entry) -> str:
    if entry.cell is None:
        return ""
    median = entry.median
    if median is None:
        return f"<title>{escape(cell_label(entry.cell))}: not measured, see the refusals</title>"
    text = f"{number(median.gb_per_s)} GB/s ({number(median.low)} to {number(median.high)} in {median.rounds} round(s))"
    return f"<title>{escape(cell_label(entry.cell))}: {text}, {median.cpu_s_per_gb:.3f} CPU-s/GB</title>"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(height: float, marks: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">' + "".join(marks) + "</svg>"
    )
