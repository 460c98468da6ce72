"""Act five: a checkpoint of every step. The training is killed at random moments, and started again, until it is
complete.
"""

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

FIRST_KILL_STEP = 4  # the first step is a full checkpoint, and no later step is durable before it


@dataclass(frozen=True, slots=True)
class Restart:
    """One start of a training process.

    returned  the highest step whose `save` had returned in earlier processes; 0: none
    promised  the highest step that was reported durable before; 0: none
    step      the step from which the process reports that it continues; 0: it starts from the beginning
    """

    returned: int
    promised: int
    step: int

    @property
    def lost(self) -> int:
        """How many saved steps have to be repeated. At most one is allowed."""
        return max(0, self.returned - self.step)

    @property
    def right(self) -> bool:
        return self.lost <= 1 and self.step >= self.promised


@dataclass(slots=True)
class EveryStepRun:
    """What happened in act five. `reloaded`: the state of a last process, which only loaded the last step."""

    run_log: RunLog = field(default_factory=RunLog)
    kills: int = 0
    restarts: list[Restart] = field(default_factory=list)
    reloaded: Finished | None = None

    def line(self, steps: int) -> str:
        """The progress, as a line of text."""
        return f"{self.run_log.line(steps)}   kills {self.kills}"


def run_every_step(order: Order, log: Path, show: Callable[[EveryStepRun], None]) -> EveryStepRun:
    """Train as `order` says, with all kills, to the end. Then load the last step in one more process.

    show    called after each change of the history
    raises  DiedError  a process has ended without being killed
    """
    history, kills = EveryStepRun(), plan_kills(order.form, order.seed)
    while history.run_log.finished is None:
        step_s = median(_step_times(history.run_log) or [0.0])
        kill = kills[history.kills] if history.kills < len(kills) else None
        trigger = None if kill is None else Trigger(kill, lambda: False, save_s=0.0, step_s=step_s)
        with ChildProcess(order, log) as process:
            history.kills += _supervise(process, trigger, history, show)
    again = EveryStepRun()
    with ChildProcess(order, log) as process:
        _supervise(process, None, again, lambda _: None)
    history.reloaded = again.run_log.finished
    return history


def _supervise(
    process: ChildProcess, trigger: Trigger | None, history: EveryStepRun, show: Callable[[EveryStepRun], None]
) -> bool:
    """Read the messages of one process until it ends or is killed. Returns whether it was killed."""
    run_log = history.run_log
    returned, promised = run_log.last_returned, run_log.promised
    while not process.over:
        messages = process.receive(LISTEN_S if trigger is None else trigger.patience_s(time.monotonic()))
        for message in messages:
            run_log.enter(message)
            if isinstance(message, Began):
                history.restarts.append(Restart(returned, promised, message.resumed_step or 0))
            if trigger is not None and run_log.promised:
                trigger.observe(message, time.monotonic())
        if messages:
            show(history)
        if trigger is not None and trigger.due(time.monotonic()):
            for message in process.kill():
                run_log.enter(message)
            return process.killed
    process.end()
    if run_log.finished is None:
        raise DiedError("a training process ended without an error, but before its last step")
    return False


def plan_kills(form: DemoSize, seed: int) -> tuple[PlannedKill, ...]:
    """Plan `form.journal_kills` kills. The run is divided into as many equal parts; each has one kill, at a random
    moment of a step.
    """
    chance = random.Random(f"every step {seed}")
    kills, steps = form.journal_kills, form.steps - 1 - FIRST_KILL_STEP
    parts = [FIRST_KILL_STEP + steps * part // kills for part in range(kills + 1)]
    return tuple(PlannedKill(chance.randrange(low, high), False, chance.random()) for low, high in pairwise(parts))


def _step_times(run_log: RunLog) -> list[float]:
    return [step.seconds for step in run_log.steps if step.seconds]
