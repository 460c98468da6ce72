"""One loop: makes the drawn moves, and then checks what must hold after any moves.

Each checkpoint contains the state at its `save`, or it does not exist and its save failed by name. A save that nothing
escaped from is committed. The next save succeeds. Nothing stays open.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar
from unittest import mock

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flowstone as fs
from flowstone.events.phases import Event
from flowstone.save.pacing import Captures
from hostile.draw import LoopPlan
from hostile.moves import MOVES, Effect
from hostile.oracle import Contents, contents_of, contents_on_disk, differences
from hostile.states import OPTIMIZERS, Job, make_job
from interrupts import Struck

_Result = TypeVar("_Result")
LETS_GO_S = 20.0  # the longest time until threads that have ended a save release their objects
ENDS_S = 60.0  # the longest time for a save, once a thread waits


@dataclass(slots=True, eq=False)
class Try:
    """A requested save.

    wanted   the expected contents of its checkpoint
    save     None if the call did not return
    escaped  moves that may have changed bytes of it before they were captured
    excused  the reason why it may fail although nothing escaped
    gone     it was set aside, or removed
    """

    step: int
    wanted: Contents
    note: object
    fence: str
    kind: str  # of the optimizer
    optimizers: tuple[object, ...]
    save: fs.Save | None = None
    escaped: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)
    gone: bool = False
    seen: bool = False  # on disk, and correct

    @property
    def open(self) -> bool:
        """Whether its capture is running."""
        return self.save is not None and not self.save.captured.done()

    @property
    def failure(self) -> BaseException | None:
        """The reason why it ended without a checkpoint; None if it has one, or has not ended."""
        done = self.save is not None and self.save.committed.done()
        return self.save.committed.exception() if done else None  # type: ignore[union-attr]


@dataclass(slots=True)
class Verdict:
    """The result of a loop: its problems, and counts of its events."""

    seed: int
    problems: list[str]
    moves: list[str]
    counts: Counter[str]


class Trainer:
    """A running loop. Moves are functions of it."""

    def __init__(self, drawn: LoopPlan, root: Path) -> None:
        self.drawn, self.setup, self.root = drawn, drawn.setup, root
        self.job: Job = make_job(
            Random(self.setup.job_seed), kind=self.setup.kind, extras=self.setup.extras, contiguous=self.setup.exact
        )
        self.tries: list[Try] = []
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.events: list[Event] = []
        self.moves: list[str] = []
        self.mapped: list[Any] = []  # memory of parameters that moves have mapped
        self.at_the_end: list[Callable[[], object]] = []
        self.on_event: Callable[[Event], None] | None = None
        self.inconsistent = False  # a load was interrupted, and may have changed half of the state
        self.torn = False  # it has changed half of it
        self.newest = 0  # the highest requested step since the last rewind
        self.checkpointer = self.opened()

    @property
    def state(self) -> dict[str, Any]:
        self.job.state["step"] = self.newest
        return self.job.state

    def opened(self) -> fs.Checkpointer:
        setup = self.setup
        return fs.Checkpointer(
            self.root, keep=setup.keep, budget_bytes=setup.budget_bytes, on_error=setup.on_error,  # type: ignore[arg-type]
            engine=setup.engine(), saves_in_flight=setup.saves_in_flight, on_event=self._told,
        )

    def _told(self, event: Event) -> None:
        self.events.append(event)
        if self.on_event is not None:
            self.on_event(event)

    def problem(self, words: str) -> None:
        self.problems.append(words)

    # Verbs

    def call(self, verb: str, act: Callable[[], _Result]) -> _Result | None:
        """The result of a verb; None if it raises. It may raise an earlier save's failure; other errors are bugs."""
        try:
            return act()
        except fs.SaveFailedError as failure:
            self._due(failure)
        except Exception as error:
            self.problem(f"{verb} raised {short(error)}")
        return None

    def _due(self, error: fs.SaveFailedError) -> None:
        """Check that a reported failure exists: of a save whose future was lost by an exception, or of another one."""
        if not any(attempt.save is None or attempt.failure is not None for attempt in self.tries):
            self.problem(f"told of a save that did not fail: {short(error)}")

    def save(
        self, fence: Literal["auto", "manual"] = "auto", around: Callable[..., Any] | None = None,
        by: Callable[[int, dict[str, Any]], fs.Save] | None = None,
    ) -> Try | None:
        """Save the present state. `around` makes the call, and may do something to it; `by` is another verb."""
        self.newest += 1
        state = self.state
        one = Try(self.newest, contents_of(state), state["step"], fence, self.job.kind, tuple(self.job.optimizers))
        self.tries.append(one)
        self.counts["saves"] += 1
        for _ in range(self.setup.saves_in_flight + 2):
            try:
                begin = lambda: by(one.step, state) if by else self.checkpointer.save(one.step, state, fence=fence)  # noqa: E731
                one.save = around(begin) if around else begin()
                if self.torn:
                    self.problem(f"step {one.step} is saved, from a state that a load has left half changed")
            except fs.SaveFailedError as failure:
                self._due(failure)
                continue  # the failure of another save: this one was not tried
            except fs.DamagedError as error:
                if not self.inconsistent:
                    self.problem(f"step {one.step} was refused: {short(error)}")
                one.excused.append("the state was inconsistent")
            except fs.FlowstoneError as error:
                one.excused.append(short(error))
                if around is None:
                    self.problem(f"step {one.step} was refused: {short(error)}")
            except Struck:
                self.counts["saves struck"] += 1
                one.excused.append("struck")
            except Exception as error:
                one.excused.append(short(error))
                self.problem(f"save of step {one.step} raised {short(error)}")
            return one
        self.problem(f"step {one.step} was refused again and again, for earlier saves")
        return None

    # Running captures

    @property
    def open_tries(self) -> list[Try]:
        return [attempt for attempt in self.tries if attempt.open]

    def escapes(self, name: str, which: Callable[[Try], bool] = lambda _: True) -> None:
        """From here on `name` changes data that saves have not captured yet."""
        for attempt in self.open_tries:
            if which(attempt):
                attempt.escaped.append(name)

    def train(self) -> None:
        """Forward, backward, step. The step waits for all saves that know its optimizer and require the wait."""
        steps = {id(optimizer) for optimizer in self.job.optimizers}
        self.job.backward()
        self.escapes("step", lambda value: value.fence == "manual" or steps.isdisjoint(map(id, value.optimizers)))
        self.job.step()
        self.job.zero_grad()

    def restructured(self) -> None:
        """The model was replaced, so its average is, too."""
        if self.job.average is None:
            return
        try:
            self.job.average = AveragedModel(self.job.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            self.job.state["average"] = self.job.average
        except RuntimeError:  # weights that are computed from others cannot be copied
            self.job.average = None
            del self.job.state["average"]

    def settle(self) -> None:
        """Wait until every save so far has ended, and every failure was reported."""
        for _ in range(len(self.tries) + 1):
            try:
                self.checkpointer.wait()
                return
            except fs.SaveFailedError as failure:
                self._due(failure)
        self.problem("wait() goes on telling of failures")

    # The complete loop

    def run(self) -> Verdict:
        for number, (name, seed) in enumerate(self.drawn.moves):
            self.make(name, Random(seed), number)
            if self.problems:
                break
        self._guarded("the end", self._end)
        self._guarded("closing", self._closed_for_good)
        return Verdict(self.drawn.seed, self.problems, self.moves, self.counts)

    def make(self, name: str, chance: Random, number: int) -> None:
        move = MOVES[name]
        opened = self.open_tries
        self.moves.append(name)
        if move.effect is Effect.ESCAPES:
            self.escapes(name)
        made = self._guarded(f"{number} {name}", lambda: move.act(self, chance))
        if made is False:
            self.moves[-1] += " (nothing)"
            return
        self.counts[f"made {name}"] += 1
        if opened:
            self.counts[f"met {name}"] += 1
            self.moves[-1] += f" (while {', '.join(str(save.step) for save in opened)} is captured)"

    def _guarded(self, where: str, act: Callable[[], _Result]) -> _Result | None:
        try:
            return act()
        except Exception:
            self.problem(f"{where}: {traceback.format_exc()}")
        except Struck:
            self.problem(f"{where}: struck out of turn: {traceback.format_exc()}")
        return None

    def look(self) -> None:
        """Check that every existing checkpoint is correct."""
        known = {attempt.step: attempt for attempt in self.tries if not attempt.gone}
        for directory in sorted(self.root.glob("step-*")):
            step = int(directory.name.removeprefix("step-"))
            if step not in known:
                self.problem(f"step {step} is there, and was never to be")
                continue
            entry = known[step]
            if entry.seen:
                continue
            try:
                result, replicated = contents_on_disk(directory)
            except FileNotFoundError:
                if self.setup.keep is None or directory.exists():
                    raise
                continue  # retention has removed it meanwhile
            wrong = differences(entry.wanted, result)
            if replicated.get("step") != entry.note:
                wrong.append(f"step is {replicated.get('step')}, not {entry.note}")
            if wrong:
                self.counts["wrong"] += 1
                self.problem(f"step {step} WAS COMMITTED WRONG: {', '.join(wrong[:4])}; escaped: {entry.escaped}")
            entry.seen = True

    def _end(self) -> None:
        """Must succeed after any moves: a save, and a load of it."""
        self.on_event = None
        self.settle()
        self.look()
        if self.inconsistent:
            self._made_sound()
        save = self.save()
        if save is None or save.save is None:
            return
        self.checkpointer.fence()
        error = save.save.committed.exception(ENDS_S)
        if error is not None:
            self.problem(f"the save after all failed: {short(error)}")
            return
        self.look()
        for tensor in self.job.tensors():
            if not tensor.is_inference():
                tensor.detach().view(-1).zero_() if tensor.is_contiguous() else tensor.detach().zero_()
        report = self.checkpointer.load(self.state)
        wrong = differences(save.wanted, contents_of(self.state))
        if report.step != save.step or wrong:
            self.problem(f"step {save.step} was loaded as {report.step}, with {', '.join(wrong[:4])}")

    def _made_sound(self) -> None:
        """Load a checkpoint with success, or start again if there is none."""
        try:
            self.checkpointer.load(self.state)
        except (fs.NoCheckpointError, fs.MismatchError):
            self.call("close", self.checkpointer.close)
            self.checkpointer = self.opened()
        self.inconsistent = self.torn = False

    def _closed_for_good(self) -> None:
        self.call("close", self.checkpointer.close)
        for act in reversed(self.at_the_end):
            act()
        self.look()
        for attempt in self.tries:
            self._judge(attempt)

    def _judge(self, attempt: Try) -> None:
        if attempt.save is None:
            self.counts["without future"] += 1
            return
        if not attempt.save.committed.done():
            self.problem(f"step {attempt.step} has not come to an end, and the Checkpointer is closed")
            return
        error = attempt.save.committed.exception()
        if error is None:
            self.counts["committed"] += 1
            if not (attempt.seen or attempt.gone or self.setup.keep):
                self.problem(f"step {attempt.step} was committed, and is not there")
            return
        self.counts["failed"] += 1
        for name in set(attempt.escaped):
            self.counts[f"found {name}"] += 1
        if not isinstance(error, fs.FlowstoneError):
            self.problem(f"step {attempt.step} failed, not by name: {short(error)}")
        elif not (attempt.escaped or attempt.excused):
            self.problem(f"step {attempt.step} failed, and nothing had escaped: {short(error)}")


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


# A complete loop


def held_captures(drawn: LoopPlan) -> contextlib.AbstractContextManager[object]:
    """Captures that are delayed as long as no thread waits for them, so that moves happen during captures."""
    pace = drawn.setup.pace
    return contextlib.nullcontext() if pace is None else mock.patch.object(Captures, "pace", return_value=pace)


def play(drawn: LoopPlan, folders: tuple[Path, Path]) -> Verdict:
    """Make the moves in a store of their own. `folders`: in memory, and on a disk."""
    root = folders[0 if drawn.setup.in_memory else 1] / f"seed-{drawn.seed}"
    shutil.rmtree(root, ignore_errors=True)
    logging.getLogger("flowstone").setLevel(logging.CRITICAL)
    opened = descriptors()
    try:
        with held_captures(drawn):
            verdict = Trainer(drawn, root).run()
    finally:
        sys.settrace(None)
        shutil.rmtree(root, ignore_errors=True)
    gc.collect()
    patience = time.monotonic() + LETS_GO_S
    while (left := descriptors() - opened) and time.monotonic() < patience:
        time.sleep(0.01)  # a thread that has reported its save's end may not have released its objects yet
    if left:
        verdict.problems.append(f"{len(left)} descriptors were left open: {sorted(left)}")
    return verdict


def line_of(verdict: Verdict) -> dict[str, Any]:
    """The result in the form that is sent between processes."""
    return {"seed": verdict.seed, "problems": verdict.problems, "moves": verdict.moves, "counts": verdict.counts}


def descriptors() -> set[str]:
    """The files that this process has open, and how. Memory that torch shares between processes belongs to the loop."""
    collected = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            collected.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return {entry for entry in collected if "/dev/shm/torch_" not in entry}


@contextlib.contextmanager
def folders_below(path: Path) -> Iterator[tuple[Path, Path]]:
    """Folders for stores: in memory, if the machine has such a folder, and below `path`."""
    memory = Path("/dev/shm")
    in_memory = memory / f"hostile-{os.getpid()}" if os.access(memory, os.W_OK) else path / "memory"
    for folder in (in_memory, path):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield in_memory, path
    finally:
        shutil.rmtree(in_memory, ignore_errors=True)


def prepare() -> None:
    """Done once by a process before it plays."""
    torch.set_num_threads(1)
    for kind in OPTIMIZERS:  # their first steps import hundreds of modules
        make_job(Random(1), kind=kind, extras=["average"])
    gc.collect()
    gc.freeze()  # a collection then visits only objects of loops, not all of torch: 1 ms instead of 200
