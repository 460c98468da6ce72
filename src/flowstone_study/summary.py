"""Medians of a study, and names of cells. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from flowstone.config import KIB
from flowstone_study.records import ENGINE_LABELS, LAYOUT_LABELS, Cell, Direction, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Median:
    """A cell over its rounds. `low` and `high` are the slowest and the fastest round."""

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
    """measured: cells with at least one good sample; refused: cells with none, and the reason."""

    measured: Mapping[Cell, Median]
    refused: Mapping[Cell, str]

    def rate(self, cell: Cell) -> float | None:
        """The median in GB/s; None if the cell was not measured."""
        found = self.measured.get(cell)
        return found.gb_per_s if found else None

    @property
    def spread(self) -> float:
        """The median over all cells of (high - low) / median of a cell's rounds. 0 for one round."""
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
    measured = {cell: _median(cell, found) for cell, found in by_cell.items()}
    return Summary(measured=measured, refused={cell: told for cell, told in refused.items() if cell not in measured})


def best(summary: Summary, direction: Direction, bytes: int) -> Median | None:
    """The fastest cell that moved all of `bytes`; None if none was measured.

    Small cells are left out: a size that fits into a device's own cache says little about a checkpoint.
    """
    of_size = [m for cell, m in summary.measured.items() if cell.direction == direction and cell.bytes == bytes]
    return max(of_size, key=lambda m: m.gb_per_s, default=None)


def size_label(count: int) -> str:
    """4 KiB, 1 MiB, 1.5 GiB: for request sizes, which are powers of two."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < KIB:
            return f"{size:.3g} {unit}"
        size /= KIB
    return f"{size:.3g} GiB"


def cell_label(cell: Cell) -> str:
    """The whole cell except its direction, as one line of text."""
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
