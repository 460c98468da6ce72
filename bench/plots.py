"""Bar charts as SVG, readable on light and dark pages. One bar for each row of the programme that was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape

from bench import figures
from bench.figures import Spread
from bench.records import Run, SaveSample
from bench.rivals import ENTRIES, OURS, Entry

WIDTH, LABEL_WIDTH, VALUE_WIDTH = 860, 330, 130
BAR, GAP, TOP, BOTTOM = 16, 8, 64, 14
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 }
.small { fill: #59636e }
.bar { fill: #8c959f }
.ours { fill: #1a7f64 }
.line { stroke: #59636e; stroke-width: 1 }
.device { stroke: #bc4c00; stroke-width: 1.5; stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .small { fill: #9198a1 }
  .bar { fill: #656c76 }
  .ours { fill: #3fb996 }
  .line { stroke: #9198a1 }
  .device { stroke: #f0883e }
}
"""


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: Spread
    is_ours: bool


@dataclass(frozen=True, slots=True)
class Chart:
    """`device` is fio's median, drawn as a line; None where the chart shows no rate."""

    name: str
    title: str
    subtitle: str
    bars: tuple[Bar, ...]
    device: float | None
    digits: int

    def svg(self) -> str:
        """Bars of medians; whiskers from the lowest to the highest."""
        height = TOP + len(self.bars) * (BAR + GAP) + BOTTOM
        longest = max((self.device or 0.0, *(bar.value.high for bar in self.bars))) or 1.0
        scale = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) / longest
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
            f'<text class="title" x="10" y="24">{escape(self.title)}</text>',
            f'<text class="small" x="10" y="44">{escape(self.subtitle)}</text>',
        ]
        for at, bar in enumerate(self.bars):
            parts += _draw_bar(bar, TOP + at * (BAR + GAP), scale, self.digits)
        if self.device is not None:
            x = LABEL_WIDTH + self.device * scale
            parts.append(f'<line class="device" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - BOTTOM}"/>')
        return "\n".join((*parts, "</svg>")) + "\n"


def charts(run: Run) -> tuple[Chart, ...]:
    """Those that have bars. Later saves: what a training job mostly does."""
    line = " The dashed line is fio." if run.device is not None else ""
    found = (
        Chart(
            "durable-save", "Durable save, GB/s", f"Later saves of a process, fsync included; more is better.{line}",
            _save_bars(run, lambda s, payload: payload / s.durable_s / 1e9), _device(run, "write"), 2,
        ),
        Chart(
            "blocked", "Training blocked by a save, seconds", "Later saves of a process; less is better.",
            _save_bars(run, lambda s, _: s.blocked_s), None, 2,
        ),
        Chart(
            "cold-load", "Cold load into existing tensors, GB/s", f"In a fresh process; more is better.{line}",
            tuple(_load_bars(run)), _device(run, "read"), 2,
        ),
        Chart(
            "save-cpu", "CPU-seconds per GB saved",
            "Later saves of a process, all threads and children; less is better.",
            _save_bars(run, lambda s, payload: s.cpu_s / payload * 1e9), None, 2,
        ),
    )
    return tuple(chart for chart in found if chart.bars)


def _compared() -> Iterator[Entry]:
    yield from (entry for entry in ENTRIES if entry.name == OURS or not entry.is_ours)


def _save_bars(run: Run, value: Callable[[SaveSample, int], float]) -> tuple[Bar, ...]:
    bars = []
    for entry in _compared():
        payload = figures.payload_bytes(run, entry.name)
        series = figures.saves(run, entry.name, first=False)
        found = figures.spread(value(sample, payload) for samples in series.values() for sample in samples)
        if found is not None:
            bars.append(Bar(entry.title, found, entry.is_ours))
    return tuple(bars)


def _load_bars(run: Run) -> Iterator[Bar]:
    for entry in _compared():
        for how in entry.loads:
            found = figures.spread(figures.load_rates(run, entry.name, how).values())
            if found is not None:
                several = f", {how}" if len(entry.loads) > 1 else ""
                yield Bar(entry.title + several, found, entry.is_ours)


def _device(run: Run, direction: str) -> float | None:
    found = figures.spread(figures.device_rates(run, direction).values())
    return None if found is None else found.median


def _draw_bar(bar: Bar, y: int, scale: float, digits: int) -> Iterator[str]:
    kind = "ours" if bar.is_ours else "bar"
    middle, low, high = y + BAR / 2, *(LABEL_WIDTH + end * scale for end in (bar.value.low, bar.value.high))
    yield f'<text x="{LABEL_WIDTH - 8}" y="{y + 13}" text-anchor="end">{escape(bar.label)}</text>'
    width = f"{bar.value.median * scale:.1f}"
    yield f'<rect class="{kind}" x="{LABEL_WIDTH}" y="{y}" width="{width}" height="{BAR}" rx="2"/>'
    yield f'<line class="line" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>'
    yield f'<text x="{high + 8:.1f}" y="{y + 13}">{bar.value.median:.{digits}f}</text>'
