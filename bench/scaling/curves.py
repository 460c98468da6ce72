"""Growth curves as SVG: both axes by powers, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 78, 220, 64, 52
COLOURS = (("#1a7f64", "#3fb996"), ("#bc4c00", "#f0883e"), ("#0969da", "#58a6ff"), ("#8250df", "#bc8cff"),
           ("#9a6700", "#d29922"), ("#59636e", "#9198a1"))
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 }
.small { fill: #59636e }
.grid { stroke: #d1d9e0; stroke-width: 1 }
.goal { stroke: #59636e; stroke-width: 1.5; stroke-dasharray: 5 4 }
path { fill: none; stroke-width: 2 }
"""
DARK = """  text { fill: #e6edf3 }
  .small { fill: #9198a1 }
  .grid { stroke: #3d444d }
  .goal { stroke: #9198a1 }
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """`points`: (ranks, value), ascending, all above 0."""

    label: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Growth:
    """`goal`: a dashed line; None where there is none."""

    name: str
    title: str
    subtitle: str
    curves: tuple[Curve, ...]
    goal: float | None = None

    def svg(self) -> str:
        found = [point for curve in self.curves for point in curve.points]
        ranks = sorted({x for x, _ in found})
        values = [y for _, y in found] + ([self.goal] if self.goal else [])
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
        high = max(high, low + 1)

        def x_of(x: float) -> float:
            span = math.log2(ranks[-1] / ranks[0]) or 1.0
            return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(x / ranks[0]) / span

        def y_of(y: float) -> float:
            return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(y) - low) / (high - low)

        dark = DARK + "".join(f"  .c{at} {{ stroke: {dark} }}\n" for at, (_, dark) in enumerate(COLOURS))
        light = "".join(f".c{at} {{ stroke: {light} }}\n" for at, (light, _) in enumerate(COLOURS))
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{STYLE}{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n</style>",
            f'<text class="title" x="10" y="24">{escape(self.title)}</text>',
            f'<text class="small" x="10" y="44">{escape(self.subtitle)}</text>',
        ]
        for power in range(low, high + 1):
            y = y_of(10.0**power)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
        for x in ranks:
            at = f'x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 20}"'
            parts.append(f'<text class="small" {at} text-anchor="middle">{x:,}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="small" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">ranks</text>')
        if self.goal is not None:
            y = y_of(self.goal)
            parts.append(f'<line class="goal" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        ends = _apart([y_of(curve.points[-1][1]) for curve in self.curves])
        for at, (curve, end) in enumerate(zip(self.curves, ends, strict=True)):
            line = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in curve.points)
            parts.append(f'<path class="c{at % len(COLOURS)}" d="M{line}"><title>{escape(curve.label)}</title></path>')
            parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{end + 4:.1f}">{escape(curve.label)}</text>')
            key = f'x1="{WIDTH - RIGHT + 2}" x2="{WIDTH - RIGHT + 8}" y1="{end:.1f}" y2="{end:.1f}"'
            parts.append(f'<line class="c{at % len(COLOURS)}" stroke-width="2" {key}/>')
        return "\n".join((*parts, "</svg>")) + "\n"


def _apart(heights: Sequence[float], line: float = 17.0) -> list[float]:
    """Heights for labels, in the same order from top to bottom, none on another."""
    placed = dict(_stacked(sorted(range(len(heights)), key=heights.__getitem__), heights, line))
    return [placed[at] for at in range(len(heights))]


def _stacked(order: Sequence[int], heights: Sequence[float], line: float) -> Iterator[tuple[int, float]]:
    free = -math.inf
    over = max(0.0, len(order) * line - (HEIGHT - BOTTOM - min(heights, default=0.0)))
    for at in order:
        free = max(heights[at] - over, free + line)
        yield at, free
