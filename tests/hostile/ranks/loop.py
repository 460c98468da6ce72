"""One rank of a loop: makes the drawn moves, and reports the expected contents and the outcome of each save.

All ranks run the same moves with the same random numbers; a move decides which rank does which part. A rank sends each
report to its parent process as soon as possible, since it may be killed. The parent checks the files.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
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
import torch.distributed as dist

import flowstone as fs
from flowstone.events.phases import Event
from flowstone.ranks import agreement, exchange
from flowstone.save.pacing import Captures
from hostile.ranks.draw import DEADLINE_S, Life, Setup
from hostile.ranks.moves import MOVES, Ending
from hostile.ranks.oracle import Contents, contents_of
from hostile.ranks.states import Job
from hostile.trainer import descriptors, short
from interrupts import Struck

_Result = TypeVar("_Result")
ENDS_S = 4 * DEADLINE_S  # the longest time for a save, once a thread waits, and for a call
Tell = Callable[[str, dict[str, Any]], None]


@dataclass(slots=True, eq=False)
class Try:
    """A call of save.

    position  of the move that made it; saves at the same position belong together, whatever their step
    escaped   moves that may have changed bytes of it on this rank before they were captured
    excused   the reason why it may fail although nothing escaped
    error     the reason why the call did not return
    """

    position: str
    step: int
    escaped: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)
    save: fs.Save | None = None
    error: BaseException | None = None

    @property
    def open(self) -> bool:
        return self.save is not None and not self.save.captured.done()

    @property
    def done(self) -> bool:
        return self.save is None or self.save.committed.done()

    @property
    def failure(self) -> BaseException | None:
        if self.save is None:
            return self.error
        return self.save.committed.exception() if self.save.committed.done() else None


class Loop:
    """One rank's running loop. Moves are functions of it.

    newest   the highest step that any rank was told to save; the same on all
    unsettled  the reason why saves may fail until all ranks have met again
    drifted  replicas are not the same on all ranks, so no save may be committed
    known    a save of this layout was committed, and nothing has happened since
    has_writer  a save by these Checkpointers was committed: the store is locked
    """

    def __init__(self, setup: Setup, life: Life, number: int, root: Path, tell: Tell) -> None:
        self.setup, self.life, self.number, self.root, self.tell = setup, life, number, root, tell
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.job = Job(setup.kinds, setup.optimizer, setup.seed + number, large=setup.large)
        if setup.stepped or number:
            self.job.step()
        self.tries: list[Try] = []
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.said: list[str] = []
        self.unsettled: list[str] = []
        self.drifted = self.known = False
        self.on_event: Callable[[Event], None] | None = None
        self.newest, self.position, self.calls = 0, 0, 0
        self.open()

    def open(self) -> None:
        """On all ranks. The rank with the lock has closed its Checkpointer."""
        self.checkpointer, self.has_writer = self.opened(), False

    def opened(self, path: Path | None = None, **options: Any) -> fs.Checkpointer:
        setup, self.known = self.setup, False
        return fs.Checkpointer(
            path or self.root, keep=setup.keep, budget_bytes=setup.budget_bytes, engine=setup.engine(),
            on_error=setup.on_error, saves_in_flight=setup.saves_in_flight, deadline_s=DEADLINE_S,  # type: ignore[arg-type]
            on_event=self._told, **options,
        )

    def _told(self, event: Event) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def problem(self, words: str) -> None:
        self.problems.append(f"rank {self.rank}: {words}")

    # Verbs

    def call(self, verb: str, act: Callable[[], _Result]) -> _Result | None:
        """The result of a verb; None if it raises, by name. It returns in bounded time."""
        started = time.monotonic()
        try:
            return act()
        except fs.FlowstoneError as error:
            if not isinstance(error, fs.SaveFailedError) and not self.unsettled:
                self.problem(f"{verb} raised {short(error)}")
        except Exception:
            self.problem(f"{verb} raised {traceback.format_exc()}")
        finally:
            taken = time.monotonic() - started
            if taken > ENDS_S:
                self.problem(f"{verb} took {taken:.1f} s")
        return None

    def save(
        self, fence: Literal["auto", "manual"] = "auto", *, step: int | None = None,
        state: dict[str, Any] | None = None, excuse: str = "",
        around: Callable[[Callable[[], fs.Save]], fs.Save] | None = None,
    ) -> Try:
        """Save the present state, and report it before the call. On all ranks that take part, at the same position."""
        self.passed_over()
        entry = Try(f"{self.position}.{self.calls}", self.newest if step is None else step)
        entry.excused += [*self.unsettled, *([excuse] if excuse else []), *(["drift"] if self.drifted else [])]
        contents: Contents = contents_of(self.job.parts())
        note = {"kinds": list(self.setup.kinds), "steps": self.job.steps}
        self.tell("try", {"position": entry.position, "step": entry.step, "contents": contents, "note": note})
        self.tries.append(entry)
        self.counts["saves"] += 1
        self.known = self.known and not entry.excused
        whole = self.job.state if state is None else state
        begin = lambda: self.checkpointer.save(entry.step, whole, fence=fence)  # noqa: E731
        started = time.monotonic()
        try:
            entry.save = around(begin) if around else begin()
        except fs.FlowstoneError as error:
            entry.error = error
            if isinstance(error, fs.SaveFailedError):
                entry.excused.append("an earlier one had failed")
        except Struck as error:
            entry.error = error
            entry.excused.append("struck")
        taken = time.monotonic() - started
        if taken > ENDS_S:
            self.problem(f"save of step {entry.step} stood for {taken:.1f} s")
        return entry

    def passed_over(self) -> None:
        """A save in which at least this rank takes no part."""
        self.newest += 1
        self.calls += 1

    def excuse(self, reason: str) -> None:
        """Saves in flight may fail."""
        for attempt in self.tries:
            if not attempt.done:
                attempt.excused.append(reason)

    def escapes(self, name: str) -> None:
        """From here on `name` changes, on this rank, data that saves have not captured yet."""
        for attempt in self.tries:
            if attempt.open:
                attempt.escaped.append(name)
                self.tell("escaped", {"position": attempt.position, "name": name})

    def disturb(self, reason: str) -> None:
        """Ranks do different things: until they have met again, saves may fail."""
        self.known = False
        self.unsettled.append(reason)

    def train(self) -> None:
        self.job.step()

    def settle(self) -> None:
        """Wait until every save so far has ended, and every failure was reported."""
        for _ in range(len(self.tries) + 1):
            started = time.monotonic()
            try:
                self.checkpointer.wait()
            except fs.SaveFailedError:
                continue
            finally:
                if time.monotonic() - started > ENDS_S:
                    self.problem(f"wait() stood for {time.monotonic() - started:.1f} s")
            return
        self.problem("wait() goes on telling of failures")

    def together(self) -> None:
        """All ranks have arrived here, and no save is in flight: the next save has to succeed."""
        self.call("wait", self.settle)
        dist.barrier()
        self.unsettled.clear()

    def in_step(self) -> None:
        """The same for any call. A rank whose save was refused may notify the others, whose next call then fails."""
        behind = bool(self.unsettled)
        self.call("wait", self.settle)
        if behind:
            self.call("latest", self.checkpointer.latest)
        self.together()

    def made_alike(self) -> None:
        """Replicas are the same on all ranks."""
        self.together()
        if self.drifted:
            self.job.make_alike()
            self.drifted = False

    def make_known(self) -> None:
        """A save of all ranks is committed, so each rank knows which ranks write which pieces."""
        if not self.known:
            self.made_alike()
            self.save()
            self.together()
            self.known = self.has_writer = True

    def load(self, **options: Any) -> fs.LoadReport | None:
        """All ranks go back to the newest checkpoint, and report their state."""
        try:
            report = self.checkpointer.load(self.job.state, **options)
        except fs.NoCheckpointError:
            if any(attempt.save is not None and attempt.failure is None for attempt in self.tries):
                self.problem("no checkpoint is found, and there was one")
            return None
        self.drifted = False
        self.job.steps = self.job.state["note"]["steps"]
        least = max((attempt.step for attempt in self.tries if self.is_committed(attempt)), default=0)
        if "step" not in options and report.step < least:
            self.problem(f"step {report.step} was loaded, and {least} was committed")
        self.tell("load", {"step": report.step, "contents": contents_of(self.job.parts()), "steps": self.job.steps})
        return report

    @staticmethod
    def is_committed(attempt: Try) -> bool:
        return attempt.save is not None and attempt.save.committed.done() and attempt.save.committed.exception() is None

    # The complete loop

    def run(self) -> dict[str, Any]:
        """The final report of this rank."""
        if self.number:
            self._guarded("beginning anew", self._begin_anew)
        for position, name, seed in self.life.moves:
            self.position = position
            self.said.append(f"{position} {name}")
            self.counts[f"made {name}"] += 1
            if any(attempt.open for attempt in self.tries):
                self.counts[f"met {name}"] += 1
            self._guarded(f"{position} {name}", lambda name=name, seed=seed: MOVES[name].act(self, Random(seed)))
        self.position = -1
        self.on_event = None
        if self.life.ending is Ending.NONE:
            self._guarded("the end", self._end)
        if self.life.ending is not Ending.KILLED:
            self._guarded("closing", lambda: self._close())
        return self.report()

    def report(self) -> dict[str, Any]:
        return {
            "problems": self.problems, "said": self.said, "counts": dict(self.counts),
            "tries": [self._ended(attempt) for attempt in self.tries],
        }

    def _guarded(self, where: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception:
            self.problem(f"{where}: {traceback.format_exc()}")
        except (Struck, KeyboardInterrupt):
            self.problem(f"{where}: struck out of turn: {traceback.format_exc()}")

    def _begin_anew(self) -> None:
        """After any end of the previous job: load the newest checkpoint of its store."""
        report = self.load()
        self.newest = 0 if report is None else report.step

    def _end(self) -> None:
        """Must succeed after any moves: a save, and a load of it."""
        self.made_alike()
        save = self.save()
        if save.save is None:
            self.problem(f"the save after all was refused: {short(save.error) if save.error else ''}")
        else:
            error = save.save.committed.exception(ENDS_S)
            if error is not None:
                self.problem(f"the save after all failed: {short(error)}")
        dist.barrier()
        with torch.no_grad():
            for part in self.job.parts():
                part.local.zero_()
        report = self.load()
        if report is not None and report.step != save.step:
            self.problem(f"step {save.step} was loaded as {report.step}")

    def _close(self) -> None:
        started = time.monotonic()
        with contextlib.suppress(fs.SaveFailedError):
            self.checkpointer.close()
        if time.monotonic() - started > ENDS_S:
            self.problem(f"close() stood for {time.monotonic() - started:.1f} s")

    def _ended(self, save: Try) -> dict[str, Any]:
        """The outcome of a save on this rank."""
        error = save.failure
        if save.save is not None and not save.save.committed.done():
            how = "open"
        else:
            how = "committed" if error is None else "failed"
        return {
            "position": save.position, "step": save.step, "escaped": save.escaped, "excused": save.excused, "how": how,
            "kind": "" if error is None else type(error).__name__, "said": "" if error is None else str(error),
            "named": isinstance(error, fs.FlowstoneError | Struck), "undecided": getattr(error, "undecided", False),
        }


def play(setup: Setup, life: Life, number: int, root: Path, tell: Tell) -> dict[str, Any]:
    """One life of a job, on this rank; checks that it leaves nothing open in this process."""
    opened, threads = descriptors(), threads_alive()
    held = mock.patch.object(Captures, "pace", return_value=setup.pace) if setup.pace else contextlib.nullcontext()
    with held:
        results = Loop(setup, life, number, root, tell).run()
    if life.ending is Ending.KILLED:
        return results
    gc.collect()
    if left := descriptors() - opened:
        results["problems"].append(f"rank {dist.get_rank()}: descriptors were left open: {sorted(left)}")
    for _ in range(100):
        if not (threads_alive() - threads):
            break
        time.sleep(0.01)
    else:
        results["problems"].append(f"rank {dist.get_rank()}: threads go on: {sorted(threads_alive() - threads)}")
    return results


def threads_alive() -> set[str]:
    return {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}


@contextlib.contextmanager
def hasty() -> Iterator[None]:
    """Shorten the waits for ranks that live and do not arrive, since these loops have many of them."""
    with (
        mock.patch.object(exchange, "UNANSWERED_S", 2.5), mock.patch.object(exchange, "DEADLINE_MARGIN_S", 0.5),
        mock.patch.object(agreement, "LEAVE_S", 2.0),
    ):
        yield


def killed_after(delay_s: float) -> None:
    """This process is killed after this time."""
    import signal

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, delay_s)


def killed() -> None:
    """This process is killed now."""
    import signal

    os.kill(os.getpid(), signal.SIGKILL)
