"""The demo's output. On a terminal, the last line changes; in a pipe, lines are printed at intervals instead."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from flowstone_demo.claims import Claim
from flowstone_demo.kill_loop import TornSave
from flowstone_demo.messages import TorchSaved
from flowstone_demo.run_log import RunLog, SaveTime

PIPED_EVERY_S = 10.0


class Screen:
    """The demo's output. Not thread-safe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._told_at = time.monotonic()

    def act(self, title: str, about: str) -> None:
        self.still()
        self._console.print()
        self._console.print(Text(title, style="bold"))
        if about:
            self._console.print(Text(about, style="dim"), soft_wrap=True)

    def live(self, line: str) -> None:
        """Replace the line that changes. If the output is not a terminal, print the line if the last one was long ago.
        """
        if not self._console.is_terminal:
            if time.monotonic() - self._told_at >= PIPED_EVERY_S:
                self.say(line)
            return
        if self._status is None:
            self._status = self._console.status(Text(line))
            self._status.start()
        self._status.update(Text(line))

    def still(self) -> None:
        """End the line that changes, so that it stays."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def say(self, line: str) -> None:
        self._told_at = time.monotonic()
        self._console.print(Text("  " + line), soft_wrap=True)

    def verbatim(self, text: str) -> None:
        self._console.print(Text(text.rstrip("\n")), soft_wrap=True)

    def claim(self, claim: Claim) -> None:
        """Print a claim on one line, with a tick if it held, else with a cross."""
        self.still()
        drawn = self._console.encoding.lower().startswith("utf")
        mark = ("✓" if drawn else "held  ") if claim.held else ("✗" if drawn else "FAILED")
        style = "green" if claim.held else "bold red"
        line = Text.assemble((f"{mark} {claim.text}", style), f": {claim.observed}")
        self._console.print(line, soft_wrap=True)

    def table(self, table: Table) -> None:
        self.still()
        self._console.print(table)

    @property
    def width(self) -> int:
        return self._console.width


def saves_table(saves: Sequence[SaveTime], torch_saves: Sequence[TorchSaved]) -> Table:
    """A table with the first, the median and the slowest save, the median of torch.save, and the ratio of these."""
    table = Table(title=f"{len(saves)} committed saves while training went on", title_justify="left")
    for heading in ("save", "MB", "blocked", "to durable", "GB/s"):
        table.add_column(heading, justify="left" if heading == "save" else "right", no_wrap=True)
    slowest = max(saves, key=lambda save: save.durable_s)
    typical = _median_save(saves)
    _add(table, f"first (step {saves[0].step})", saves[0])
    _add(table, "median", typical)
    _add(table, f"slowest (step {slowest.step})", slowest)
    theirs = median(save.seconds for save in torch_saves)
    table.add_section()
    label = f"torch.save + fsync, median of {len(torch_saves)}"
    _add(table, label, SaveTime(0, torch_saves[0].bytes, theirs, theirs))
    waited, durable = theirs / typical.blocked_s, theirs / typical.durable_s
    table.add_row("torch.save / median", "", f"{waited:.1f} x", f"{durable:.1f} x", "")
    return table


def every_step_table(without: RunLog, seen: RunLog) -> Table:
    """A table with the medians and 95th percentiles of a step, with and without a durable checkpoint of each step; and
    the bytes written.
    """
    table = Table(title="A step, with and without a durable checkpoint of it", title_justify="left")
    for heading in ("step", "median", "p95", "blocked", "MB", "to durable"):
        table.add_column(heading, justify="left" if heading == "step" else "right", no_wrap=True)
    plain, journaled = _step_times(without), _step_times(seen)
    table.add_row("without (act one)", *_ms(plain), "", "", "")
    megabytes = median(step.bytes for step in seen.journaled) / 1e6
    table.add_row(
        "each step durable", *_ms(journaled), f"{median(save.blocked_s for save in seen.returned) * 1e3:.1f} ms",
        f"{megabytes:.1f}", f"{median(step.seconds for step in seen.journaled) * 1e3:.0f} ms",
    )
    ratios = (ours / bare for ours, bare in zip(_typical(journaled), _typical(plain), strict=True))
    table.add_row("with / without", *(f"{ratio:.2f} x" for ratio in ratios))
    return table


def _step_times(seen: RunLog) -> list[float]:
    return [step.seconds for step in seen.steps if step.seconds]


def _typical(seconds: list[float]) -> tuple[float, float]:
    """The median and the 95th percentile."""
    return median(seconds), sorted(seconds)[len(seconds) * 95 // 100]


def _ms(seconds: list[float]) -> tuple[str, ...]:
    return tuple(f"{value * 1e3:.0f} ms" for value in _typical(seconds))


def torn_line(torn: TornSave) -> str:
    """The directory and the files of an interrupted save, as text."""
    files = ", ".join(f"{name} {length / 1e6:.1f} MB" for name, length in torn.files) or "empty"
    return f"torn: {torn.name}  {len(torn.files)} file(s), {torn.bytes:,} bytes ({files})"


def _median_save(saves: Sequence[SaveTime]) -> SaveTime:
    return SaveTime(
        0, saves[0].bytes, median(save.blocked_s for save in saves), median(save.durable_s for save in saves)
    )


def _add(table: Table, label: str, save: SaveTime) -> None:
    waited, durable = f"{save.blocked_s * 1e3:.0f} ms", f"{save.durable_s * 1e3:.0f} ms"
    table.add_row(label, f"{save.bytes / 1e6:.0f}", waited, durable, f"{save.bytes / 1e9 / save.durable_s:.2f}")
