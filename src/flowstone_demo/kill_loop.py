"""Act two: train, kill, check the store, and start again, until the run is complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import flowstone as fs
from flowstone.commit.entries import EntryKind, parse_entry
from flowstone_demo.child_process import ChildProcess, DiedError
from flowstone_demo.kill_schedule import PlannedKill, one_more, plan_kills
from flowstone_demo.messages import Began, Message, Order, Stepped
from flowstone_demo.run_log import RunLog

SAVE_S_UNKNOWN = 0.1  # seconds; a guess, until the saves before the first kill give the real time
WATCH_S = 0.001  # seconds between two looks at the store; a save of 300 MB takes a hundred times as long
LISTEN_S = 0.25


@dataclass(frozen=True, slots=True)
class TornSave:
    """A save that a kill has interrupted: the name of its directory, and the size of each file in it."""

    name: str
    files: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        return sum(length for _, length in self.files)


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL, and the store after it. `torn`: the saves that this kill interrupted. `newest`: the newest committed
    step.
    """

    number: int
    pid: int
    aimed: bool
    during_step: int  # the last step that was reported
    torn: tuple[TornSave, ...]
    newest: int | None


@dataclass(frozen=True, slots=True)
class Resume:
    """One start of a training process.

    newest    the newest committed step on disk just before the start
    promised  the highest step that was reported as committed; 0: none
    step      the step from which the process reports that it continues; None: from the beginning
    """

    newest: int | None
    promised: int
    step: int | None

    @property
    def right(self) -> bool:
        return self.step == self.newest and (self.step or 0) >= self.promised


@dataclass(slots=True)
class KilledRun:
    """What happened in act two."""

    run_log: RunLog = field(default_factory=RunLog)
    kills: list[Kill] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)

    @property
    def torn(self) -> list[TornSave]:
        return [torn for kill in self.kills for torn in kill.torn]


class Trigger:
    """Decides when a planned kill is due.

    begun   whether a save has begun in this process
    save_s  the shortest duration of a save
    step_s  an estimate of a step's duration, used until two steps were measured

    The duration of a step is measured from the last two steps, since other work on the machine may make steps ten times
    slower.
    """

    def __init__(
        self, kill: PlannedKill, begun: Callable[[], bool], *, save_s: float, step_s: float = 0.0
    ) -> None:
        self._kill, self._begun, self._save_s = kill, begun, save_s
        self._armed = False
        self._stepped_at: float | None = None
        self._step_s = step_s
        self._due_at: float | None = None

    def observe(self, message: Message, now: float) -> None:
        if not isinstance(message, Stepped):
            return
        if self._stepped_at is not None:
            self._step_s = now - self._stepped_at
        self._stepped_at = now
        self._armed |= message.step >= self._kill.after_step

    def due(self, now: float) -> bool:
        if not self._armed:
            return False
        if self._due_at is None and (not self._kill.aimed or self._begun()):
            self._due_at = now + self._kill.share * (self._save_s if self._kill.aimed else self._step_s)
        return self._due_at is not None and now >= self._due_at

    def patience_s(self, now: float) -> float:
        """How many seconds to wait for a message before the next call of `due`."""
        if not self._armed:
            return LISTEN_S
        return WATCH_S if self._due_at is None else min(LISTEN_S, max(0.0, self._due_at - now))


def kill_loop(order: Order, log: Path, show: Callable[[KilledRun], None]) -> KilledRun:
    """Train as `order` says, with all planned kills, to the end.

    show    called after each change of the history
    raises  DiedError  a process has ended without being killed
    """
    history, store = KilledRun(), Path(order.store)
    while history.run_log.finished is None:
        kill = _next_kill(order, history)
        left_before = {torn.name for torn in torn_saves(store)}
        newest, promised, processes = newest_step(store), history.run_log.promised, len(history.run_log.began)
        trigger = None
        if kill is not None:
            save_s = history.run_log.shortest_save_s(SAVE_S_UNKNOWN)
            trigger = Trigger(kill, partial(_begun, store, left_before), save_s=save_s)
        with ChildProcess(order, log) as process:
            killed = _supervise(process, trigger, history, show, Resume(newest, promised, None))
        if len(history.run_log.began) == processes:
            raise DiedError("a training process ended before it began to train")
        if killed and kill is not None:
            torn = tuple(torn for torn in torn_saves(store) if torn.name not in left_before)
            during = history.run_log.steps[-1].step
            number = len(history.kills) + 1
            history.kills.append(Kill(number, process.pid, kill.aimed, during, torn, newest_step(store)))
            show(history)
    return history


def _supervise(
    process: ChildProcess, trigger: Trigger | None, history: KilledRun, show: Callable[[KilledRun], None], start: Resume
) -> bool:
    """Read the messages of one process until it ends or is killed. Returns whether it was killed."""
    while not process.over:
        messages = process.receive(LISTEN_S if trigger is None else trigger.patience_s(time.monotonic()))
        for message in messages:
            history.run_log.enter(message)
            if isinstance(message, Began):
                history.resumes.append(Resume(start.newest, start.promised, message.resumed_step))
            if trigger is not None:
                trigger.observe(message, time.monotonic())
        if messages:
            show(history)
        if trigger is not None and trigger.due(time.monotonic()):
            for message in process.kill():
                history.run_log.enter(message)
            return process.killed
    process.end()
    if history.run_log.finished is None:
        raise DiedError("a training process ended without an error, but before its last step")
    return False


def _next_kill(order: Order, history: KilledRun) -> PlannedKill | None:
    """The next planned kill. After these, one more kill at a time as long as too few saves were interrupted. Then None,
    so that the run may end.
    """
    planned, number = plan_kills(order.form, order.seed), len(history.kills)
    if number < len(planned):
        return planned[number]
    if len(history.torn) < order.form.torn and number < order.form.kills_max:
        return one_more(order.form, order.seed, number)
    return None


def newest_step(store: Path) -> int | None:
    """The newest committed step in a store, according to Flowstone's reader. None if there is none."""
    try:
        return fs.open(store).step
    except fs.NoCheckpointError:
        return None


def torn_saves(store: Path) -> tuple[TornSave, ...]:
    """All uncommitted saves in `store`. Call this only while no process writes to the store."""
    return tuple(
        TornSave(name, tuple(sorted((file.name, file.stat().st_size) for file in (store / name).iterdir())))
        for name in _saving(store)
    )


def _begun(store: Path, left_before: set[str]) -> bool:
    """Whether `store` has an uncommitted save that is not among `left_before`."""
    return any(name not in left_before for name in _saving(store))


def _saving(store: Path) -> list[str]:
    if not store.exists():
        return []
    entries = (parse_entry(path.name) for path in store.iterdir())
    return sorted(entry.name for entry in entries if entry is not None and entry.kind is EntryKind.SAVING)
