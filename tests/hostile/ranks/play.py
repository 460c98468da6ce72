"""Plays the drawn lives of the job one after the other, and checks the files that they leave."""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from hostile.ranks.draw import Life, LoopPlan
from hostile.ranks.job import Jobs, Told
from hostile.ranks.moves import Ending
from hostile.ranks.oracle import Stored, note_of, steps_in
from hostile.trainer import Verdict
from interrupts import Struck


class Look:
    """The contents of the store, and the reports of the ranks of all lives."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._lives: list[tuple[Life, Told]] = []
        self._stored: dict[int, tuple[tuple[int, ...], Stored]] = {}

    def at(self, life: Life, events: Told, *, keeps: bool) -> None:
        """Check after a life. `keeps`: retention removes nothing."""
        self._lives.append((life, events))
        self.problems += events.problems
        steps = steps_in(self.root)
        for step, directory in steps.items():
            mark = (directory.stat().st_ino, directory.stat().st_ctime_ns)
            if step not in self._stored or self._stored[step][0] != mark:
                try:
                    self._stored[step] = mark, Stored(directory)
                except FileNotFoundError:
                    if keeps or directory.exists():
                        raise
                    continue
                except ValueError as error:
                    self.problems.append(f"COMMITTED WRONG: step {step} cannot be read: {error}")
                    continue
                self._check_wrong(step)
        self._check_outcomes(life, events, steps, keeps=keeps)
        self._check_loads(events, steps)

    def _check_wrong(self, step: int) -> None:
        """Whether a checkpoint has the states of all ranks when they saved it, at the same position of their loops."""
        stored = self._stored[step][1]
        best: list[str] | None = None
        for life, reported in self._lives:
            result = {
                attempt["position"] for tries in reported.tries.values() for attempt in tries if attempt["step"] == step
            }
            for position in result:
                ranks = {
                    rank: attempt for rank, tries in reported.tries.items() for attempt in tries
                    if attempt["position"] == position and attempt["step"] == step
                }
                wrong = stored.differences({rank: own["contents"] for rank, own in ranks.items()})
                wrong += [f"rank {rank} did not save it" for rank in range(life.size) if rank not in ranks]
                note = note_of(stored)
                if any(rank["note"] != note for rank in ranks.values()):
                    wrong.append(f"note is {note}")
                if not wrong:
                    self.counts["right"] += 1
                    return
                best = wrong if best is None or len(wrong) < len(best) else best
        words = "no rank saved it" if best is None else f"{len(best)}: {', '.join(best[:4])}"
        self.problems.append(f"step {step} WAS COMMITTED WRONG: {words}")

    def _check_outcomes(self, life: Life, events: Told, steps: Mapping[int, Path], *, keeps: bool) -> None:
        ends: dict[str, dict[int, dict[str, Any]]] = {}
        for rank, report in events.reports.items():
            for attempt in report["tries"]:
                ends.setdefault(attempt["position"], {})[rank] = attempt
            self.counts.update({name: count for name, count in report["counts"].items() if rank == 0})
        for position, ranks in ends.items():
            self._check_try(position, ranks, life, events, steps, keeps=keeps)

    def _check_try(
        self, position: str, ranks: Mapping[int, dict[str, Any]], life: Life, seen: Told, steps: Mapping[int, Path], *,
        keeps: bool,
    ) -> None:
        """The outcome of one save: must be the same on all ranks, and a failure must have a name."""
        where = f"step {next(iter(ranks.values()))['step']} ({position})"
        excuses = {reason for rank in ranks.values() for reason in rank["excused"]}
        excuses |= {name for index, name in seen.escaped if index == position}
        hows = {rank["how"] for rank in ranks.values()}
        dead = set(range(life.size)) - seen.reports.keys()
        if "open" in hows and life.ending is not Ending.KILLED:
            self.problems.append(f"{where} has not come to an end: {_hows(ranks)}")
        self.counts["committed" if hows == {"committed"} else "failed"] += 1
        for rank, own in ranks.items():
            if own["how"] != "failed":
                continue
            if not own["named"]:
                self.problems.append(f"{where} failed on rank {rank}, not by name: {own['kind']}: {own['said'][:300]}")
            elif not excuses and not _follows(own["said"]) and not misses(own["said"], dead):
                self.problems.append(
                    f"{where} failed on rank {rank}, and nothing was done to it: {own['kind']}: {own['said'][:400]}"
                )
                break
        undecided = any(rank["undecided"] for rank in ranks.values()) or life.ending is Ending.KILLED
        # A save that a signal has interrupted may still commit (docs/SAVING.md, Interrupts); its bytes are checked.
        returned = {rank["how"] for rank in ranks.values() if rank["kind"] != Struck.__name__}
        if returned >= {"committed", "failed"} and not undecided:
            self.problems.append(f"{where} was committed for some alone: {_hows(ranks)}")
        for own in ranks.values():
            gone = any(own["step"] > back_to for back_to in seen.rewound)
            if own["how"] == "committed" and keeps and not gone and own["step"] not in steps:
                self.problems.append(f"{where} was committed, and is not there")
                break
        for reason in excuses if "failed" in hows else ():
            self.counts[f"found {reason}"] += 1

    def _check_loads(self, events: Told, steps: Mapping[int, Path]) -> None:
        for number, load in enumerate(events.loads[0]):
            ranks = {rank: loads[number] for rank, loads in events.loads.items() if len(loads) > number}
            if len({load["step"] for load in ranks.values()}) > 1:
                self.problems.append(f"ranks have loaded other steps: {[load['step'] for load in ranks.values()]}")
            if load["step"] not in self._stored:
                continue
            self.counts["loads"] += 1
            contents = {rank: load["contents"] for rank, load in ranks.items()}
            wrong = self._stored[load["step"]][1].differences(contents, saved=False)
            if wrong:
                self.problems.append(f"step {load['step']} was loaded wrong: {len(wrong)}: {', '.join(wrong[:4])}")

    def at_the_end(self) -> None:
        """The files that a store may contain after all its jobs have ended in order."""
        allowed = ("step-", "flowstone.", ".superseded-")  # the last by hand: docs/LOADING.md
        left = [path.name for path in self.root.iterdir() if not path.name.startswith(allowed)]
        if left:
            self.problems.append(f"left in the store: {left}")


def _follows(message: str) -> bool:
    """Whether a save failed because an earlier one had failed, and began before that was known."""
    return "began to save with an older plan" in message


def misses(message: str, dead: Set[int]) -> bool:
    """Whether a save failed because a killed rank was silent that was one move ahead of the waiting ranks."""
    silent = re.match(r"nothing heard from ranks? ([\d, and]+) for", message)
    return silent is not None and dead.issuperset(map(int, re.findall(r"\d+", silent[1])))


def _hows(ranks: Mapping[int, dict[str, Any]]) -> str:
    return "; ".join(f"rank {rank}: {own['how']} {own['kind']} {own['said'][:150]}" for rank, own in ranks.items())


def play(drawn: LoopPlan, folders: tuple[Path, Path], jobs: Jobs) -> Verdict:
    """All lives of a drawn job, in a store of their own."""
    logging.getLogger("flowstone").setLevel(logging.CRITICAL)
    root = folders[0 if drawn.setup.in_memory else 1] / f"ranks-{drawn.seed}"
    shutil.rmtree(root, ignore_errors=True)
    look, messages = Look(root), []
    try:
        for number, life in enumerate(drawn.lives()):
            reported = jobs.of(life.size).play(drawn.setup, life, number, root)
            look.at(life, reported, keeps=drawn.setup.keep is None)
            messages += [f"{life.size} ranks", *_said(reported)]
            if look.problems or life.ending is Ending.KILLED:
                jobs.drop(life.size)
            if look.problems:
                break
        else:
            look.at_the_end()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return Verdict(drawn.seed, look.problems, messages, look.counts)


def _said(events: Told) -> Sequence[str]:
    return next((report["said"] for report in events.reports.values()), [])
