"""The medians of a study, and names of cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from flowstone.config import KIB
from flowstone_study.records import ENGINE_LABELS, LAYOUT_LABELS, Cell, Direction, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Median:
    """The median of a cell's rounds. `low` and `high`: the rates of the slowest and the fastest round."""

    cell: Cell
    rounds: int
    gb_per_s: float
    low: float
    high: float
    cpu_s_per_gb: float
    seconds: float
    cold: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The medians of a study. `measured`: cells with at least one successful sample. `refused`: the other cells -> why
    they could not be measured.
    """

    measured: Mapping[Cell, Median]
    refused: Mapping[Cell, str]

    def rate(self, cell: Cell) -> float | None:
        """The median rate of a cell in GB/s. None if the cell was not measured."""
        median_of_cell = self.measured.get(cell)
        return median_of_cell.gb_per_s if median_of_cell else None

    @property
    def spread(self) -> float:
        """How much the rounds of a cell usually differ: the median over all cells of (high - low) / median. 0 with one
        round.
        """
        shares = [(m.high - m.low) / m.gb_per_s for m in self.measured.values()]
        return median(shares) if shares else 0.0


def summarise(samples: Iterable[Sample]) -> Summary:
    by_cell: dict[Cell, list[Sample]] = {}
    refused: dict[Cell, str] = {}
    for sample in samples:
        if sample.error is not None:
            refused.setdefault(sample.cell, sample.error)
        else:
            by_cell.setdefault(sample.cell, []).append(sample)
    measured = {cell: _median(cell, cell_samples) for cell, cell_samples in by_cell.items()}
    refused = {cell: reason for cell, reason in refused.items() if cell not in measured}
    return Summary(measured=measured, refused=refused)


def best(summary: Summary, direction: Direction, bytes: int) -> Median | None:
    """The fastest cell that moved at least `bytes`. None if none was measured.

    Smaller cells are left out, as a size that fits into a device's own cache says little about a checkpoint.
    """
    of_size = [m for cell, m in summary.measured.items() if cell.direction == direction and cell.bytes == bytes]
    return max(of_size, key=lambda m: m.gb_per_s, default=None)


def size_label(count: int) -> str:
    """A size in bytes as text, in binary units, such as 4 KiB, 1 MiB or 1.5 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < KIB:
            return f"{size:.3g} {unit}"
        size /= KIB
    return f"{size:.3g} GiB"


def cell_label(cell: Cell) -> str:
    """All settings of a cell except its direction, as one line of text."""
    depth = "" if cell.engine == "sync" else f" x {cell.queue_depth}"
    words = [
        LAYOUT_LABELS[cell.layout], "coalesced" if cell.coalesced else "not coalesced",
        "direct" if cell.direct else "buffered", ENGINE_LABELS[cell.engine],
        f"{size_label(cell.request_bytes)}{depth}",
        f"{cell.memory} memory on {'huge' if cell.huge_pages else 'small'} pages",
        *(() if cell.reserved else ("blocks not reserved",)),
        "1 process" if cell.processes == 1 else f"{cell.processes} processes",
        f"{cell.mix}, {size_label(cell.bytes)}",
    ]
    return ", ".join(words)


def _median(cell: Cell, samples: list[Sample]) -> Median:
    rates = [s.gb_per_s for s in samples if s.gb_per_s is not None]
    cold = {s.cold for s in samples}
    return Median(
        cell=cell, rounds=len(samples), gb_per_s=median(rates), low=min(rates), high=max(rates),
        cpu_s_per_gb=median(s.cpu_s_per_gb for s in samples if s.cpu_s_per_gb is not None),
        seconds=median(s.seconds for s in samples if s.seconds is not None),
        cold=False if False in cold else None if None in cold else True,
    )
