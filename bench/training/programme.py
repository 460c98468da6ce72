"""The runs: each saver's trainings, and Flowstone's drills. `FULL` measures the goals, `QUICK` checks that it works."""

from __future__ import annotations

from dataclasses import dataclass

from bench.rivals import OURS, Entry, entry
from bench.training.records import DrillTask, Leg, Shape, Window
from flowstone.config import MIB

PARTICIPANTS: tuple[Entry, ...] = tuple(
    entry(name) for name in (OURS, "torch", "dcp-async", "torchsnapshot-async")
)
GOAL_EVERY = 5  # the interval of the goals


@dataclass(frozen=True, slots=True)
class Drill:
    """A row without a training, see DrillTask. `rounds`: at most so many."""

    name: str
    title: str
    tensors: int
    state_bytes: int
    saves: int
    budget_bytes: int | None = None
    stepping: bool = False
    rounds: int | None = None

    def task(self, directory: str, settle_s: float) -> DrillTask:
        return DrillTask(
            self.tensors, self.state_bytes, self.saves, self.budget_bytes, self.stepping, directory, settle_s,
        )


@dataclass(frozen=True, slots=True)
class Programme:
    """The legs of each system in each round.

    window      of a step; None: calibrated, so that a step takes about `target_s`
    ours, others  the legs of Flowstone and of each rival, in this order
    settle_s    rest between blocks
    """

    name: str
    shape: Shape
    window: Window | None
    target_s: float
    ours: tuple[Leg, ...]
    others: tuple[Leg, ...]
    drills: tuple[Drill, ...]
    rounds: int
    settle_s: float

    def legs(self, rival: str) -> tuple[Leg, ...]:
        return self.ours if rival == OURS else self.others

    def drill(self, name: str) -> Drill:
        return next(drill for drill in self.drills if drill.name == name)


MANY, FLAT = "many", "flat"
_TENTH = 64 * MIB

FULL = Programme(
    name="full",
    shape=Shape(vocabulary=50_257, context=1024, width=768, depth=12, heads=12),  # 124 million parameters
    window=None,
    target_s=2.0,
    # 200 steps with a save every 5 in two rounds; each block of them beside one without saves.
    ours=(Leg(5, 20), Leg(1, 20), Leg(5, 20), Leg(20, 40), Leg(5, 20), Leg(5, 20), Leg(5, 20)),
    others=(Leg(5, 20), Leg(1, 10), Leg(20, 40), Leg(5, 20)),
    drills=(
        Drill(MANY, "1,800 tensors of 5 GB", 1800, int(5e9), 10),
        Drill(FLAT, "a state of ten times the budget", 240, 10 * _TENTH, 200, _TENTH, stepping=True, rounds=1),
    ),
    rounds=2,
    settle_s=1.0,
)

QUICK = Programme(
    name="quick",
    shape=Shape(vocabulary=2048, context=64, width=128, depth=4, heads=4),
    window=Window(4, 16),
    target_s=0.0,
    ours=(Leg(5, 20), Leg(1, 5)),
    others=(Leg(5, 10), Leg(1, 3)),
    drills=(
        Drill(MANY, "180 tensors of 50 MB", 180, int(50e6), 3),
        Drill(FLAT, "a state of ten times the budget", 30, 320 * MIB, 6, 32 * MIB, stepping=True, rounds=1),
    ),
    rounds=1,
    settle_s=0.0,
)

PROGRAMMES = {programme.name: programme for programme in (FULL, QUICK)}
