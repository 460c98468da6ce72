"""One loop: makes the moves that were drawn, and checks after them what has to hold whatever they were.

Every checkpoint that is there holds what the state held at its `save`, or it is not there and its save failed by
name. A save that nothing escaped from is committed. The next save works. Nothing is left open.
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
from interrupts import Struck
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flowstone as fs
from flowstone.events import Event
from flowstone.pipeline.pacing import Captures
from hostile.draw import Drawn
from hostile.moves import MOVES, Effect
from hostile.oracle import Contents, contents_of, contents_on_disk, differences
from hostile.states import OPTIMIZERS, Job, make_job

_Result = TypeVar("_Result")
LETS_GO_S = 20.0  # for threads that have ended a save to let go of what they hold
ENDS_S = 60.0  # for a save to come to its end, once a thread waits


@dataclass(slots=True, eq=False)
class Try:
    """A save that was asked for.

    wanted   what its checkpoint has to hold
    save     None where the call did not return
    escaped  moves that may have changed bytes of it before they were captured
    excused  why it may fail though nothing escaped
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
    seen: bool = False  # on disk, and right

    @property
    def open(self) -> bool:
        """Whether its capture is under way."""
        return self.save is not None and not self.save.captured.done()

    @property
    def failure(self) -> BaseException | None:
        """Why it ended without a checkpoint; None where it has one, or has not ended."""
        done = self.save is not None and self.save.committed.done()
        return self.save.committed.exception() if done else None  # type: ignore[union-attr]


@dataclass(slots=True)
class Verdict:
    """How a loop went: what was wrong, and what it has been through, counted."""

    seed: int
    problems: list[str]
    moves: list[str]
    counts: Counter[str]


class Trainer:
    """A loop under way. Moves are functions of it."""

    def __init__(self, drawn: Drawn, root: Path) -> None:
        self.drawn, self.setup, self.root = drawn, drawn.setup, root
        self.job: Job = make_job(
            Random(self.setup.job_seed), kind=self.setup.kind, extras=self.setup.extras, contiguous=self.setup.exact
        )
        self.tries: list[Try] = []
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.events: list[Event] = []
        self.moves: list[str] = []
        self.mapped: list[Any] = []  # memory of parameters that is mapped by moves
        self.at_the_end: list[Callable[[], object]] = []
        self.on_event: Callable[[Event], None] | None = None
        self.unsound = False  # a load was cut short, and may have left the state half changed
        self.torn = False  # it has
        self.newest = 0  # the highest step that was ever asked for since the last rewind
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
        """What a verb returns; None where it raises. It may tell of an earlier save; any other error is a problem."""
        try:
            return act()
        except fs.SaveFailedError as told:
            self._due(told)
        except Exception as error:
            self.problem(f"{verb} raised {short(error)}")
        return None

    def _due(self, told: fs.SaveFailedError) -> None:
        """A failure is told where there is one: of a save that was lost before the caller had its future, or of one."""
        if not any(one.save is None or one.failure is not None for one in self.tries):
            self.problem(f"told of a save that did not fail: {short(told)}")

    def save(
        self, fence: Literal["auto", "manual"] = "auto", around: Callable[..., Any] | None = None,
        by: Callable[[int, dict[str, Any]], fs.Save] | None = None,
    ) -> Try | None:
        """Save the state as it is. `around` makes the call, and may do something to it; `by` is another verb."""
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
            except fs.SaveFailedError as told:
                self._due(told)
                continue  # another save's failure: this one has not been tried
            except fs.DamagedError as error:
                if not self.unsound:
                    self.problem(f"step {one.step} was refused: {short(error)}")
                one.excused.append("the state was unsound")
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

    # Captures under way

    @property
    def open_tries(self) -> list[Try]:
        return [one for one in self.tries if one.open]

    def escapes(self, name: str, which: Callable[[Try], bool] = lambda _: True) -> None:
        """From here on `name` changes what saves have not captured yet."""
        for one in self.open_tries:
            if which(one):
                one.escaped.append(name)

    def train(self) -> None:
        """Forward, backward, step. The step waits for all saves that know its optimizer, and are to be waited for."""
        steps = {id(optimizer) for optimizer in self.job.optimizers}
        self.job.backward()
        self.escapes("step", lambda one: one.fence == "manual" or steps.isdisjoint(map(id, one.optimizers)))
        self.job.step()
        self.job.zero_grad()

    def restructured(self) -> None:
        """The model is another one: so is its average."""
        if self.job.average is None:
            return
        try:
            self.job.average = AveragedModel(self.job.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            self.job.state["average"] = self.job.average
        except RuntimeError:  # weights that are computed from others cannot be copied
            self.job.average = None
            del self.job.state["average"]

    def settle(self) -> None:
        """Until every save so far has come to its end, and every failure was told."""
        for _ in range(len(self.tries) + 1):
            try:
                self.checkpointer.wait()
                return
            except fs.SaveFailedError as told:
                self._due(told)
        self.problem("wait() goes on telling of failures")

    # The whole

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
            self.moves[-1] += f" (while {', '.join(str(one.step) for one in opened)} is captured)"

    def _guarded(self, where: str, act: Callable[[], _Result]) -> _Result | None:
        try:
            return act()
        except Exception:
            self.problem(f"{where}: {traceback.format_exc()}")
        except Struck:
            self.problem(f"{where}: struck out of turn: {traceback.format_exc()}")
        return None

    def look(self) -> None:
        """Whether every checkpoint that is there is right."""
        known = {one.step: one for one in self.tries if not one.gone}
        for directory in sorted(self.root.glob("step-*")):
            step = int(directory.name.removeprefix("step-"))
            if step not in known:
                self.problem(f"step {step} is there, and was never to be")
                continue
            one = known[step]
            if one.seen:
                continue
            try:
                found, replicated = contents_on_disk(directory)
            except FileNotFoundError:
                if self.setup.keep is None or directory.exists():
                    raise
                continue  # retention was faster
            wrong = differences(one.wanted, found)
            if replicated.get("step") != one.note:
                wrong.append(f"step is {replicated.get('step')}, not {one.note}")
            if wrong:
                self.counts["wrong"] += 1
                self.problem(f"step {step} WAS COMMITTED WRONG: {', '.join(wrong[:4])}; escaped: {one.escaped}")
            one.seen = True

    def _end(self) -> None:
        """What has to work after whatever there was: a save, and a load of it."""
        self.on_event = None
        self.settle()
        self.look()
        if self.unsound:
            self._made_sound()
        one = self.save()
        if one is None or one.save is None:
            return
        self.checkpointer.fence()
        error = one.save.committed.exception(ENDS_S)
        if error is not None:
            self.problem(f"the save after all failed: {short(error)}")
            return
        self.look()
        for tensor in self.job.tensors():
            if not tensor.is_inference():
                tensor.detach().view(-1).zero_() if tensor.is_contiguous() else tensor.detach().zero_()
        report = self.checkpointer.load(self.state)
        wrong = differences(one.wanted, contents_of(self.state))
        if report.step != one.step or wrong:
            self.problem(f"step {one.step} was loaded as {report.step}, with {', '.join(wrong[:4])}")

    def _made_sound(self) -> None:
        """Load something with success, or begin anew where there is nothing."""
        try:
            self.checkpointer.load(self.state)
        except (fs.NoCheckpointError, fs.MismatchError):
            self.call("close", self.checkpointer.close)
            self.checkpointer = self.opened()
        self.unsound = self.torn = False

    def _closed_for_good(self) -> None:
        self.call("close", self.checkpointer.close)
        for act in reversed(self.at_the_end):
            act()
        self.look()
        for one in self.tries:
            self._judge(one)

    def _judge(self, one: Try) -> None:
        if one.save is None:
            self.counts["without future"] += 1
            return
        if not one.save.committed.done():
            self.problem(f"step {one.step} has not come to an end, and the Checkpointer is closed")
            return
        error = one.save.committed.exception()
        if error is None:
            self.counts["committed"] += 1
            if not (one.seen or one.gone or self.setup.keep):
                self.problem(f"step {one.step} was committed, and is not there")
            return
        self.counts["failed"] += 1
        for name in set(one.escaped):
            self.counts[f"found {name}"] += 1
        if not isinstance(error, fs.FlowstoneError):
            self.problem(f"step {one.step} failed, not by name: {short(error)}")
        elif not (one.escaped or one.excused):
            self.problem(f"step {one.step} failed, and nothing had escaped: {short(error)}")


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


# A whole loop


def held_captures(drawn: Drawn) -> contextlib.AbstractContextManager[object]:
    """Captures that stay behind for as long as no thread waits for them, so that moves fall into them."""
    pace = drawn.setup.pace
    return contextlib.nullcontext() if pace is None else mock.patch.object(Captures, "pace", return_value=pace)


def play(drawn: Drawn, folders: tuple[Path, Path]) -> Verdict:
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
        time.sleep(0.01)  # a thread that has told of its save's end may not have run since, to let go of its own
    if left:
        verdict.problems.append(f"{len(left)} descriptors were left open: {sorted(left)}")
    return verdict


def line_of(verdict: Verdict) -> dict[str, Any]:
    """The verdict as it travels between processes."""
    return {"seed": verdict.seed, "problems": verdict.problems, "moves": verdict.moves, "counts": verdict.counts}


def descriptors() -> set[str]:
    """What this process has open, and how. Memory that torch shares between processes is the loop's own."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return {one for one in found if "/dev/shm/torch_" not in one}


@contextlib.contextmanager
def folders_below(path: Path) -> Iterator[tuple[Path, Path]]:
    """Where stores may be: in memory, if the machine has such a place, and below `path`."""
    memory = Path("/dev/shm")
    in_memory = memory / f"hostile-{os.getpid()}" if os.access(memory, os.W_OK) else path / "memory"
    for folder in (in_memory, path):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield in_memory, path
    finally:
        shutil.rmtree(in_memory, ignore_errors=True)


def prepare() -> None:
    """What a process does once, before it plays."""
    torch.set_num_threads(1)
    for kind in OPTIMIZERS:  # their first steps import hundreds of modules
        make_job(Random(1), kind=kind, extras=["average"])
    gc.collect()
    gc.freeze()  # a collection looks at what loops make, not at all of torch: 1 ms instead of 200
