"""Bar charts and growth curves as SVG, drawn by matplotlib, readable on light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.figures import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THEME = {  # on a light page: on a dark one
    "#1f2328": "#e6edf3", "#59636e": "#9198a1", "#d1d9e0": "#3d444d", "#8c959f": "#656c76", "#1a7f64": "#3fb996",
    "#bc4c00": "#f0883e", "#0969da": "#58a6ff", "#8250df": "#bc8cff", "#9a6700": "#d29922",
}
TEXT, MUTED, GRID, OTHERS, OURS, DEVICE, *_ = THEME
CURVES = (OURS, DEVICE, "#0969da", "#8250df", "#9a6700", MUTED)
DOTS_PER_INCH = 72  # of matplotlib's SVG: the sizes below are in its pixels
WIDTH, TOP, BOTTOM = 860, 64, 14


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: Spread
    is_ours: bool


@dataclass(frozen=True, slots=True)
class BarChart:
    """Horizontal bars of medians, with whiskers from the lowest to the highest value.

    device  fio's median, drawn as a dashed line; None if the chart shows no rate
    digits  of the numbers at the bars' ends
    """

    name: str
    title: str
    subtitle: str
    bars: tuple[Bar, ...]
    device: float | None
    digits: int

    def svg(self) -> str:
        axes = _axes(self.title, self.subtitle, height=TOP + 24 * len(self.bars) + BOTTOM, left=330, right=130)
        rows = range(len(self.bars))
        medians = [bar.value.median for bar in self.bars]
        beyond = ([bar.value.median - bar.value.low for bar in self.bars],
                  [bar.value.high - bar.value.median for bar in self.bars])
        colors = [OURS if bar.is_ours else OTHERS for bar in self.bars]
        axes.barh(rows, medians, 2 / 3, xerr=beyond, ecolor=MUTED, color=colors)
        for row, bar in enumerate(self.bars):
            number = f"{bar.value.median:.{self.digits}f}"
            axes.annotate(number, (bar.value.high, row), (8, 0), textcoords="offset points", va="center", color=TEXT)
        if self.device is not None:
            axes.axvline(self.device, color=DEVICE, linestyle="dashed")
        axes.set(yticks=rows, yticklabels=[bar.label for bar in self.bars], ylim=(len(self.bars) - 0.5, -0.5), xlim=0)
        axes.tick_params(bottom=False, labelbottom=False, left=False, labelcolor=TEXT)
        axes.spines[:].set_visible(False)
        return _svg(axes.figure, self.title)


@dataclass(frozen=True, slots=True)
class Curve:
    """`points`: (ranks, value), ascending, all above 0."""

    label: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class GrowthChart:
    """Values over numbers of ranks, both on logarithmic axes. `goal`: a dashed line; None if there is none."""

    name: str
    title: str
    subtitle: str
    curves: tuple[Curve, ...]
    goal: float | None = None

    def svg(self) -> str:
        axes = _axes(self.title, self.subtitle, height=420, left=78, right=220, bottom=52)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,g}")
        ranks = sorted({x for curve in self.curves for x, _ in curve.points})
        axes.set_xticks(ranks, [f"{x:,}" for x in ranks], minor=False)
        axes.minorticks_off()
        axes.grid(axis="y", color=GRID)
        axes.set_xlabel("ranks", color=MUTED)
        axes.tick_params(length=0, labelcolor=MUTED)
        axes.spines[:].set_visible(False)
        if self.goal is not None:
            axes.axhline(self.goal, color=MUTED, linestyle="dashed")
        for curve, color in zip(self.curves, _cycle(len(self.curves)), strict=True):
            axes.plot(*zip(*curve.points, strict=True), color=color, linewidth=2)
        axes.autoscale_view()  # matplotlib would do so when it draws
        ends = [axes.transData.transform(curve.points[-1])[1] for curve in self.curves]
        for curve, color, height in zip(self.curves, _cycle(len(self.curves)), _spread_labels(ends), strict=True):
            axes.annotate(curve.label, (WIDTH - 212, height), xycoords="figure pixels", va="center", color=color)
        return _svg(axes.figure, self.title)


def _cycle(count: int) -> Iterator[str]:
    return (CURVES[row % len(CURVES)] for row in range(count))


def _axes(title: str, subtitle: str, *, height: int, left: int, right: int, bottom: int = BOTTOM) -> Axes:
    """Axes with these margins, in pixels, below a title and a subtitle."""
    from matplotlib.figure import Figure  # here, since most runs of a benchmark draw nothing

    figure = Figure(figsize=(WIDTH / DOTS_PER_INCH, height / DOTS_PER_INCH), dpi=DOTS_PER_INCH)
    figure.text(10 / WIDTH, 1 - 24 / height, title, size=16, weight="bold", color=TEXT)
    figure.text(10 / WIDTH, 1 - 44 / height, subtitle, color=MUTED)
    return figure.add_axes((left / WIDTH, bottom / height, 1 - (left + right) / WIDTH, 1 - (TOP + bottom) / height))


def _svg(figure: Figure, title: str) -> str:
    """The same bytes for the same figure. Each colour is a variable with a value for dark pages."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flowstone"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Title": title, "Date": None, "Creator": None})
    start = file.getvalue().index("<svg")
    text = file.getvalue()[start:]
    for number, color in enumerate(THEME):
        text = text.replace(color, f"var(--c{number})")
    variables = [
        " ".join(f"--c{number}: {color};" for number, color in enumerate(colors)) for colors in (THEME, THEME.values())
    ]
    head, end, rest = text.partition(">")
    return (
        f"{head}{end}\n<style>svg {{ {variables[0]} }}\n"
        f"@media (prefers-color-scheme: dark) {{ svg {{ {variables[1]} }} }}</style>{rest}"
    )


def _spread_labels(heights: Sequence[float], line: float = 17.0) -> list[float]:
    """Heights for labels, in the order of `heights`, at least `line` from each other and as near as that allows."""
    order = sorted(range(len(heights)), key=heights.__getitem__, reverse=True)
    placed, free = dict[int, float](), float("inf")
    lift = max(0.0, len(order) * line - (max(heights, default=0.0) - 20))
    for row in order:
        placed[row] = free = min(heights[row] + lift, free - line)
    return [placed[row] for row in range(len(heights))]
