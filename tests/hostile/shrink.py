"""Shrinks a loop to the shortest one that fails in the same way, by delta debugging. Each trial is a process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hostile.draw import LoopPlan
from hostile.fork_server import Line, tend
from hostile.trainer import folders_below, line_of, play

TRIALS_MAX = 120


def kind(problems: Sequence[str]) -> str:
    """The kind of the first problem, without its numbers and names; empty if there is none."""
    if not problems:
        return ""
    first, *_ = lines = problems[0].strip().splitlines() or ["it says nothing"]
    if first.startswith(("it died", "it hung")):
        return first
    if "COMMITTED WRONG" in first:
        return "wrong"
    last = lines[-1] if "Traceback" in problems[0] else first
    return re.sub(r"(step )?\d+|['\"].*", "", last)[:60]


def shrink(drawn: LoopPlan, fails: Callable[[LoopPlan], bool]) -> tuple[LoopPlan, tuple[int, ...]]:
    """The shortest loop for which `fails` holds, and the positions of its moves in the drawn one."""
    left = tuple(range(len(drawn.moves)))
    trials, pieces = 0, 2
    while len(left) > 1 and trials < TRIALS_MAX:
        size = -(-len(left) // pieces)
        for start in range(0, len(left), size):
            rest = left[:start] + left[start + size :]
            trials += 1
            if rest and fails(drawn.only(rest)):
                left, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(left))
    return drawn.only(left), left


def fails_like(expected: str, path: Path, *, hangs_s: float, times: int) -> Callable[[LoopPlan], bool]:
    """Whether a loop, played in a process of its own at most `times`, fails in the way of `expected`."""

    def fails(drawn: LoopPlan) -> bool:
        lines = played_apart([drawn] * times, path, hangs_s=hangs_s)
        return any(kind(line["problems"]) == expected for line in lines)

    return fails


def played_apart(loops: Sequence[LoopPlan], path: Path, *, hangs_s: float) -> list[Line]:
    """The results of loops, played in a separate process."""
    collected: list[Line] = []
    with folders_below(path) as folders:
        tend(range(len(loops)), lambda index: line_of(play(loops[index], folders)), collected.append, hangs_s)
    return collected

