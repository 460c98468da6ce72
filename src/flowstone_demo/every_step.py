"""Act five: a checkpoint of every step. Kill at random instants, start again, until the run is complete."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from flowstone_demo.child_process import ChildProcess, DiedError
from flowstone_demo.kill_loop import LISTEN_S, Trigger
from flowstone_demo.kill_schedule import PlannedKill
from flowstone_demo.messages import Began, Finished, Order
from flowstone_demo.run_log import RunLog
from flowstone_demo.sizes import DemoSize

FIRST_KILL_STEP = 4  # of a run whose first step is saved whole: until that is durable, no later step is


@dataclass(frozen=True, slots=True)
class Restart:
    """One start of a training process.

    returned  the highest step whose `save` had returned, in the processes before; 0 for none
    promised  the highest step reported durable by then; 0 for none
    found     the step from which the process says that it continues; 0 for a fresh start
    """

    returned: int
    promised: int
    found: int

    @property
    def lost(self) -> int:
        """Number of steps that were saved, and have to be done again: more than one is a broken promise."""
        return max(0, self.returned - self.found)

    @property
    def right(self) -> bool:
        return self.lost <= 1 and self.found >= self.promised


@dataclass(slots=True)
class EveryStepRun:
    """The history of act five. `reloaded`: what one more process found, which loaded the end and trained nothing."""

    run_log: RunLog = field(default_factory=RunLog)
    kills: int = 0
    restarts: list[Restart] = field(default_factory=list)
    reloaded: Finished | None = None

    def line(self, steps: int) -> str:
        """The progress, for a person."""
        return f"{self.run_log.line(steps)}   kills {self.kills}"


def run_every_step(order: Order, log: Path, show: Callable[[EveryStepRun], None]) -> EveryStepRun:
    """Run `order` to its end through all kills of its form, then load the end in one more process.

    show    called whenever something has changed
    raises  DiedError if a process ends without having been killed
    """
    found, kills = EveryStepRun(), plan_kills(order.form, order.seed)
    while found.run_log.finished is None:
        step_s = median(_step_times(found.run_log) or [0.0])
        kill = kills[found.kills] if found.kills < len(kills) else None
        trigger = None if kill is None else Trigger(kill, lambda: False, save_s=0.0, step_s=step_s)
        with ChildProcess(order, log) as process:
            found.kills += _supervise(process, trigger, found, show)
    again = EveryStepRun()
    with ChildProcess(order, log) as process:
        _supervise(process, None, again, lambda _: None)
    found.reloaded = again.run_log.finished
    return found


def _supervise(
    process: ChildProcess, trigger: Trigger | None, found: EveryStepRun, show: Callable[[EveryStepRun], None]
) -> bool:
    """Read one process's messages until it ends or is killed. Returns whether it was killed."""
    run_log = found.run_log
    returned, promised = run_log.last_returned, run_log.promised
    while not process.over:
        messages = process.hear(LISTEN_S if trigger is None else trigger.patience_s(time.monotonic()))
        for message in messages:
            run_log.enter(message)
            if isinstance(message, Began):
                found.restarts.append(Restart(returned, promised, message.resumed_step or 0))
            if trigger is not None and run_log.promised:
                trigger.hear(message, time.monotonic())
        if messages:
            show(found)
        if trigger is not None and trigger.due(time.monotonic()):
            for message in process.kill():
                run_log.enter(message)
            return process.killed
    process.end()
    if run_log.finished is None:
        raise DiedError("a training process ended without an error, but before its last step")
    return False


def plan_kills(form: DemoSize, seed: int) -> tuple[PlannedKill, ...]:
    """`form.journal_kills` kills, one in each equal part of the run, each at some instant of a step. Pure."""
    chance = random.Random(f"every step {seed}")
    kills, steps = form.journal_kills, form.steps - 1 - FIRST_KILL_STEP
    parts = [FIRST_KILL_STEP + steps * part // kills for part in range(kills + 1)]
    return tuple(PlannedKill(chance.randrange(low, high), False, chance.random()) for low, high in pairwise(parts))


def _step_times(run_log: RunLog) -> list[float]:
    return [step.seconds for step in run_log.steps if step.seconds]
