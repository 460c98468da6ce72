"""Texts for the terminal and the page: the machine, the best settings, and remarks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from flowstone_study.planning import Plan
from flowstone_study.records import DIRECTIONS, Direction, Probe, Study
from flowstone_study.summary import Median, Summary, best, cell_label, size_label


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest cell for saves or for restores, and the base point of the study for comparison."""

    fastest: Median
    base: Median | None

    @property
    def lines(self) -> tuple[str, ...]:
        """Three lines of text: the settings, the range of the rates of their rounds, and the rate of the base point."""
        top = self.fastest
        rounds = f"{top.low:.2f} to {top.high:.2f} GB/s in {_rounds(top.rounds)}, {top.cpu_s_per_gb:.3f} CPU-s/GB"
        if self.base is None or self.base == top:
            return (cell_label(top.cell), rounds)
        cell = self.base.cell
        point = f"base point ({size_label(cell.request_bytes)} x {cell.queue_depth}): {self.base.gb_per_s:.2f} GB/s"
        return (cell_label(top.cell), rounds, point)


def best_of_each(study: Study, plan: Plan, summary: Summary) -> dict[Direction, Best]:
    """The best cell for saves and for restores, if there are measurements."""
    best_cells = {}
    for direction in DIRECTIONS:
        fastest = best(summary, direction, study.bytes)
        if fastest is not None:
            best_cells[direction] = Best(fastest, summary.measured.get(replace(plan.base, direction=direction)))
    return best_cells


def machine_line(study: Study) -> str:
    return "; ".join(f"{name} {value}" for name, value in study.machine.items())


def probe_lines(probe: Probe) -> tuple[str, ...]:
    """One line of text for each I/O method, which says whether it works."""
    limit = "none" if probe.memlock_bytes is None else size_label(probe.memlock_bytes)
    ring = "works" if probe.io_uring_error is None else f"refused: {probe.io_uring_error}"
    direct = f"works, alignment {probe.direct_alignment} bytes" if probe.direct_alignment else "refused"
    pinned = "can be pinned" if probe.registered_error is None else f"cannot be pinned: {probe.registered_error}"
    binds = f"limit on locked memory: {limit}; it applies without CAP_IPC_LOCK"
    return (
        f"io_uring: {ring}",
        f"O_DIRECT: {direct}",
        f"registered buffers: {size_label(probe.registered_bytes)} {pinned} ({binds})",
    )


def notes(study: Study, plan: Plan, summary: Summary) -> tuple[str, ...]:
    """Remarks on how far the numbers can be trusted."""
    restores = [sample for sample in study.samples if sample.cell.direction == "restore" and sample.error is None]
    proved, warm = (sum(sample.cold is state for sample in restores) for state in (True, False))
    scale = (
        f"Medians of at most {_rounds(study.rounds)}, {size_label(study.bytes)} in a cell unless it says otherwise; "
        f"{len(plan.cells)} cells, {len(study.samples)} samples in {study.seconds:.0f} s. Every time includes "
        "opening the files, fsync of files and directory, and closing them."
    )
    spread = (
        f"The rounds of one cell differ by {summary.spread:.0%} (median over all cells): a smaller difference "
        "between cells is noise. The fastest of many cells is partly luck."
    ) if study.rounds > 1 else "One round cannot show which differences are noise."
    cold = (
        f"{proved} of {len(restores)} restores started with no page of their files cached, by the kernel's own count"
        + (f"; {warm} did not, so their rates are rates of memory" if warm else "")
        + ". A cache in the device, or below a virtual machine, cannot be detected."
    )
    refusals = Counter(summary.refused.values()).most_common()
    refused = (f"{count} of {len(plan.cells)} cells not measured: {reason}." for reason, count in refusals)
    return (scale, spread, cold, *refused)


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"
