"""Plays what was drawn, one life of the job after the other, and looks at the files that are left."""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from hostile.ranks.draw import Drawn, Life
from hostile.ranks.job import Jobs, Told
from hostile.ranks.moves import Ending
from hostile.ranks.oracle import Stored, note_of, steps_in
from hostile.trainer import Verdict


class Look:
    """What is in the store, beside what the ranks of all lives have told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._lives: list[tuple[Life, Told]] = []
        self._stored: dict[int, tuple[tuple[int, ...], Stored]] = {}

    def at(self, life: Life, told: Told, *, keeps: bool) -> None:
        """After a life. `keeps`: retention removes nothing."""
        self._lives.append((life, told))
        self.problems += told.problems
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
        self._check_outcomes(life, told, steps, keeps=keeps)
        self._check_loads(told, steps)

    def _check_wrong(self, step: int) -> None:
        """Whether a checkpoint is what all ranks held when they saved it: at one and the same place of their loops."""
        stored = self._stored[step][1]
        best: list[str] | None = None
        for life, told in self._lives:
            found = {
                one["position"] for tries in told.tries.values() for one in tries if one["step"] == step
            }
            for position in found:
                ranks = {
                    rank: one for rank, tries in told.tries.items() for one in tries
                    if one["position"] == position and one["step"] == step
                }
                wrong = stored.differences({rank: one["contents"] for rank, one in ranks.items()})
                wrong += [f"rank {rank} did not save it" for rank in range(life.size) if rank not in ranks]
                note = note_of(stored)
                if any(one["note"] != note for one in ranks.values()):
                    wrong.append(f"note is {note}")
                if not wrong:
                    self.counts["right"] += 1
                    return
                best = wrong if best is None or len(wrong) < len(best) else best
        words = "no rank saved it" if best is None else f"{len(best)}: {', '.join(best[:4])}"
        self.problems.append(f"step {step} WAS COMMITTED WRONG: {words}")

    def _check_outcomes(self, life: Life, told: Told, steps: Mapping[int, Path], *, keeps: bool) -> None:
        ends: dict[str, dict[int, dict[str, Any]]] = {}
        for rank, report in told.reports.items():
            for one in report["tries"]:
                ends.setdefault(one["position"], {})[rank] = one
            self.counts.update({name: count for name, count in report["counts"].items() if rank == 0})
        for position, ranks in ends.items():
            self._check_try(position, ranks, life, told, steps, keeps=keeps)

    def _check_try(
        self, position: str, ranks: Mapping[int, dict[str, Any]], life: Life, told: Told, steps: Mapping[int, Path], *,
        keeps: bool,
    ) -> None:
        """How one save ended, on all ranks: for all alike, and by name."""
        where = f"step {next(iter(ranks.values()))['step']} ({position})"
        excuses = {reason for one in ranks.values() for reason in one["excused"]}
        excuses |= {name for at, name in told.escaped if at == position}
        hows = {one["how"] for one in ranks.values()}
        dead = set(range(life.size)) - told.reports.keys()
        if "open" in hows and life.ending is not Ending.KILLED:
            self.problems.append(f"{where} has not come to an end: {_hows(ranks)}")
        self.counts["committed" if hows == {"committed"} else "failed"] += 1
        for rank, one in ranks.items():
            if one["how"] != "failed":
                continue
            if not one["named"]:
                self.problems.append(f"{where} failed on rank {rank}, not by name: {one['kind']}: {one['said'][:300]}")
            elif not excuses and not _follows(one["said"]) and not misses(one["said"], dead):
                self.problems.append(
                    f"{where} failed on rank {rank}, and nothing was done to it: {one['kind']}: {one['said'][:400]}"
                )
                break
        undecided = any(one["undecided"] for one in ranks.values()) or life.ending is Ending.KILLED
        if "committed" in hows and "failed" in hows and not undecided:
            self.problems.append(f"{where} was committed for some alone: {_hows(ranks)}")
        for one in ranks.values():
            gone = any(one["step"] > back_to for back_to in told.rewound)
            if one["how"] == "committed" and keeps and not gone and one["step"] not in steps:
                self.problems.append(f"{where} was committed, and is not there")
                break
        for reason in excuses if "failed" in hows else ():
            self.counts[f"found {reason}"] += 1

    def _check_loads(self, told: Told, steps: Mapping[int, Path]) -> None:
        for number, one in enumerate(told.loads[0]):
            ranks = {rank: loads[number] for rank, loads in told.loads.items() if len(loads) > number}
            if len({load["step"] for load in ranks.values()}) > 1:
                self.problems.append(f"ranks have loaded other steps: {[load['step'] for load in ranks.values()]}")
            if one["step"] not in self._stored:
                continue
            self.counts["loads"] += 1
            contents = {rank: load["contents"] for rank, load in ranks.items()}
            wrong = self._stored[one["step"]][1].differences(contents, saved=False)
            if wrong:
                self.problems.append(f"step {one['step']} was loaded wrong: {len(wrong)}: {', '.join(wrong[:4])}")

    def at_the_end(self) -> None:
        """What may be in a store whose jobs have all ended in order."""
        allowed = ("step-", "flowstone.", ".superseded-")  # the last by hand: docs/LOADING.md
        left = [at.name for at in self.root.iterdir() if not at.name.startswith(allowed)]
        if left:
            self.problems.append(f"left in the store: {left}")


def _follows(said: str) -> bool:
    """Whether a save failed because an earlier one had, and it was begun before that was known."""
    return "began to save with an older plan" in said


def misses(said: str, dead: Set[int]) -> bool:
    """Whether a save failed as a rank was silent that had been killed, a move ahead of those that waited for it."""
    silent = re.match(r"nothing heard from ranks? ([\d, and]+) for", said)
    return silent is not None and dead.issuperset(map(int, re.findall(r"\d+", silent[1])))


def _hows(ranks: Mapping[int, dict[str, Any]]) -> str:
    return "; ".join(f"rank {rank}: {one['how']} {one['kind']} {one['said'][:150]}" for rank, one in ranks.items())


def play(drawn: Drawn, folders: tuple[Path, Path], jobs: Jobs) -> Verdict:
    """All lives of what was drawn, in a store of their own."""
    logging.getLogger("flowstone").setLevel(logging.CRITICAL)
    root = folders[0 if drawn.setup.in_memory else 1] / f"ranks-{drawn.seed}"
    shutil.rmtree(root, ignore_errors=True)
    look, said = Look(root), []
    try:
        for number, life in enumerate(drawn.lives()):
            told = jobs.of(life.size).play(drawn.setup, life, number, root)
            look.at(life, told, keeps=drawn.setup.keep is None)
            said += [f"{life.size} ranks", *_said(told)]
            if look.problems or life.ending is Ending.KILLED:
                jobs.drop(life.size)
            if look.problems:
                break
        else:
            look.at_the_end()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return Verdict(drawn.seed, look.problems, said, look.counts)


def _said(told: Told) -> Sequence[str]:
    return next((report["said"] for report in told.reports.values()), [])
