"""The table at the end of a session: results by stage, and the lines that have to be passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.gpu.options import Row

CHECKS = 4
"""So many lines, the first, are not about speed."""
Stages = Mapping[str, Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Line:
    """What is asked, what was measured (None: nothing), and whether that is enough."""

    asked: str
    measured: float | None
    passed: bool


class Results:
    """What stages have printed."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    def number(self, stage: str, what: str) -> float | None:
        for row in self.stages.get(stage, ()):
            value = row["value"]
            if row["what"] == what and isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return None

    def best(self, stage: str, begin: str) -> float | None:
        """The largest number among rows whose names begin so."""
        found = [self.number(stage, str(row["what"])) for row in self.stages.get(stage, ())
                 if str(row["what"]).startswith(begin)]
        return max((one for one in found if one is not None), default=None)

    def ratio(self, one: float | None, other: float | None) -> float | None:
        return None if one is None or not other else one / other


def lines(stages: Stages) -> list[Line]:
    """The lines of a session, in the order of what they are worth."""
    found = Results(stages)
    pinned, back = found.best("ceilings", "D2H pinned"), found.best("ceilings", "H2D pinned")
    disk = [found.number("ceilings", f"disk {way}") for way in ("write", "read")]
    load_limit = min((rate for rate in (disk[1], back) if rate is not None), default=None)
    perceived = found.ratio(
        found.number("rivals", "flowstone: perceived"), found.number("rivals", "torch.save: perceived")
    )

    def line(asked: str, measured: float | None, enough: Callable[[float], bool]) -> Line:
        return Line(asked, measured, measured is not None and enough(measured))

    return [
        *_failures(stages),
        line("save, p95, under 10 ms", found.number("performance", "save, p95"), lambda ms: ms < 10),
        line("warm capture, of the pinned rate, 0.9 and more",
             found.ratio(found.number("performance", "capture, warm"), pinned), lambda share: share >= 0.9),
        line("durable, of the disk's rate, 0.9 and more",
             found.ratio(found.number("performance", "durable, later"), disk[0]), lambda share: share >= 0.9),
        line("cold load, of the lower of disk and H2D, 0.9 and more",
             found.ratio(found.number("performance", "load, cold"), load_limit), lambda share: share >= 0.9),
        line("step time lost outside of the fence, under 1 %",
             found.number("performance", "step time lost outside of the fence"), lambda percent: percent < 1),
        line("perceived throughput, of torch.save's, 48 and more", perceived, lambda times: times >= 48),
    ]


def _failures(stages: Stages) -> Iterator[Line]:
    """Tests and faults, counted; whatever was compared bit by bit; and saves that failed though nothing was changed."""
    rows = [row for of in stages.values() for row in of]
    tests = [row["value"] for row in rows if str(row["what"]).startswith("tests, ")]
    failed = sum(one for one in tests if isinstance(one, int)) + sum(not isinstance(one, int) for one in tests)
    yield Line("tests that fail: none", float(failed) if tests else None, bool(tests) and failed == 0)
    faults = [row for row in rows if str(row["what"]).startswith("fault: ") and "passed" in row]
    bad = sum(not row["passed"] for row in faults)
    yield Line("faults that end badly: none", float(bad) if faults else None, bool(faults) and bad == 0)
    same = [row for row in rows if isinstance(row["value"], bool)]
    different = sum(not row["value"] for row in same)
    yield Line("loads of other bits: none", float(different) if same else None, bool(same) and different == 0)
    counts = [row["value"] for row in rows if str(row["what"]).startswith("saves, false alarms")]
    alarms = sum(one for one in counts if isinstance(one, int))
    yield Line("false alarms: none", float(alarms) if counts else None, bool(counts) and alarms == 0)


def text(stages: Stages, took: Mapping[str, str]) -> str:
    """Everything, for a terminal."""
    out = []
    for stage, rows in stages.items():
        out.append(f"\n{stage} ({took[stage]})")
        out += [f"  {row['what']!s:<58} {_shown(row['value'])} {row['unit']}".rstrip() for row in rows]
    out.append("\nasked")
    for one in lines(stages):
        measured = "not measured" if one.measured is None else f"{one.measured:.3g}"
        out.append(f"  {'pass' if one.passed else 'FAIL'}  {one.asked:<58} {measured}")
    return "\n".join(out)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
