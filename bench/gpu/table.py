"""The table at the end of a session: results by stage, and the goals that have to be met."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.gpu.options import Row

CHECKS = 4
"""The first lines of the table are not about speed; this is their number."""
Stages = Mapping[str, Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Line:
    """A goal, its measurement (None: nothing measured), and whether it is met."""

    asked: str
    measured: float | None
    passed: bool


class Results:
    """The printed results of stages."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    def number(self, stage: str, metric: str) -> float | None:
        for row in self.stages.get(stage, ()):
            value = row["value"]
            if row["what"] == metric and isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return None

    def best(self, stage: str, begin: str) -> float | None:
        """The largest number among rows whose names begin with this."""
        numbers = [self.number(stage, str(row["what"])) for row in self.stages.get(stage, ())
                 if str(row["what"]).startswith(begin)]
        return max((number for number in numbers if number is not None), default=None)

    def ratio(self, numerator: float | None, other: float | None) -> float | None:
        return None if numerator is None or not other else numerator / other


def lines(stages: Stages) -> list[Line]:
    """The lines of a session, most important first."""
    results = Results(stages)
    pinned, back = results.best("ceilings", "D2H pinned"), results.best("ceilings", "H2D pinned")
    disk = [results.number("ceilings", f"disk {way}") for way in ("write", "read")]
    load_limit = min((rate for rate in (disk[1], back) if rate is not None), default=None)
    perceived = results.ratio(
        results.number("rivals", "flowstone: perceived"), results.number("rivals", "torch.save: perceived")
    )

    def line(asked: str, measured: float | None, enough: Callable[[float], bool]) -> Line:
        return Line(asked, measured, measured is not None and enough(measured))

    return [
        *_failures(stages),
        line("save, p95, under 10 ms", results.number("performance", "save, p95"), lambda ms: ms < 10),
        line("warm capture, relative to the pinned rate, 0.9 and more",
             results.ratio(results.number("performance", "capture, warm"), pinned), lambda share: share >= 0.9),
        line("durable, relative to the disk's rate, 0.9 and more",
             results.ratio(results.number("performance", "durable, later"), disk[0]), lambda share: share >= 0.9),
        line("cold load, relative to the lower of disk and H2D, 0.9 and more",
             results.ratio(results.number("performance", "load, cold"), load_limit), lambda share: share >= 0.9),
        line("step time lost outside of the fence, under 1 %",
             results.number("performance", "step time lost outside of the fence"), lambda percent: percent < 1),
        line("perceived throughput, relative to torch.save's, 48 and more", perceived, lambda times: times >= 48),
    ]


def _failures(stages: Stages) -> Iterator[Line]:
    """Tests and faults, counted; all comparisons bit by bit; and saves that failed without a change."""
    rows = [row for of in stages.values() for row in of]
    tests = [row["value"] for row in rows if str(row["what"]).startswith("tests, ")]
    failed = sum(test for test in tests if isinstance(test, int)) + sum(not isinstance(test, int) for test in tests)
    yield Line("tests that fail: none", float(failed) if tests else None, bool(tests) and failed == 0)
    faults = [row for row in rows if str(row["what"]).startswith("fault: ") and "passed" in row]
    bad = sum(not row["passed"] for row in faults)
    yield Line("faults that end badly: none", float(bad) if faults else None, bool(faults) and bad == 0)
    same = [row for row in rows if isinstance(row["value"], bool)]
    different = sum(not row["value"] for row in same)
    yield Line("loads of other bits: none", float(different) if same else None, bool(same) and different == 0)
    counts = [row["value"] for row in rows if str(row["what"]).startswith("saves, false alarms")]
    alarms = sum(count for count in counts if isinstance(count, int))
    yield Line("false alarms: none", float(alarms) if counts else None, bool(counts) and alarms == 0)


def text(stages: Stages, took: Mapping[str, str]) -> str:
    """Everything, for a terminal."""
    out = []
    for stage, rows in stages.items():
        out.append(f"\n{stage} ({took[stage]})")
        out += [f"  {row['what']!s:<58} {_shown(row['value'])} {row['unit']}".rstrip() for row in rows]
    out.append("\nasked")
    for line in lines(stages):
        measured = "not measured" if line.measured is None else f"{line.measured:.3g}"
        out.append(f"  {'pass' if line.passed else 'FAIL'}  {line.asked:<58} {measured}")
    return "\n".join(out)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
