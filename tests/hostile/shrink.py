"""Shrinks a loop to the shortest one that goes wrong in the same way, by delta debugging. Each trial is a process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hostile.draw import Drawn
from hostile.nursery import Line, tend
from hostile.trainer import folders_below, line_of, play

TRIALS_MAX = 120


def kind(problems: Sequence[str]) -> str:
    """What the first problem is like, without its numbers and names; empty where there is none."""
    if not problems:
        return ""
    first, *_ = lines = problems[0].strip().splitlines() or ["it says nothing"]
    if first.startswith(("it died", "it hung")):
        return first
    if "COMMITTED WRONG" in first:
        return "wrong"
    last = lines[-1] if "Traceback" in problems[0] else first
    return re.sub(r"(step )?\d+|['\"].*", "", last)[:60]


def shrink(drawn: Drawn, fails: Callable[[Drawn], bool]) -> tuple[Drawn, tuple[int, ...]]:
    """The loop of the fewest moves that `fails`, and their positions in the one that was drawn."""
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


def fails_like(wanted: str, path: Path, *, hangs_s: float, times: int) -> Callable[[Drawn], bool]:
    """Whether a loop, played in a process of its own, `times` at most, goes wrong in the way of `wanted`."""

    def fails(drawn: Drawn) -> bool:
        lines = played_apart([drawn] * times, path, hangs_s=hangs_s)
        return any(kind(line["problems"]) == wanted for line in lines)

    return fails


def played_apart(loops: Sequence[Drawn], path: Path, *, hangs_s: float) -> list[Line]:
    """How loops went, in a process apart."""
    found: list[Line] = []
    with folders_below(path) as folders:
        tend(range(len(loops)), lambda at: line_of(play(loops[at], folders)), found.append, hangs_s)
    return found

