"""Replays one loop of several ranks: python -m hostile --ranks 4 --seed 7, from the folder of the tests."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hostile.ranks.draw import LoopPlan, draw
from hostile.ranks.fork_server import players, prepare
from hostile.ranks.moves import MOVES
from hostile.ranks.play import play
from hostile.shrink import kind, shrink


def replay(
    seed: int, size: int, moves: Sequence[str] | None, position: Sequence[int] | None, *, times: int, shrinks: bool
) -> int:
    """Play it that often, or until it fails; then find the fewest moves that fail alike. Returns the exit code."""
    drawn = draw(seed, moves, size)
    drawn = drawn if position is None else drawn.only(position)
    print(describe(drawn))
    prepare()
    with tempfile.TemporaryDirectory() as path, players(Path(path)) as (folders, jobs):

        def problems(loop: LoopPlan) -> list[str]:
            for _ in range(times):
                verdict = play(loop, folders, jobs)
                if verdict.problems:
                    print(f"made: {', '.join(verdict.moves)}")
                    return verdict.problems
            return []

        result = problems(drawn)
        print("\n".join(f"PROBLEM: {problem}" for problem in result) or "sound")
        if result and shrinks:
            shortest, positions = shrink(drawn, lambda loop: kind(problems(loop)) == kind(result))
            print(f"shortest: --at {','.join(map(str, positions))}")
            print(describe(shortest))
    return 1 if result else 0


def describe(drawn: LoopPlan) -> str:
    lines = [f"seed {drawn.seed}: {drawn.setup}"]
    for life in drawn.lives():
        lines.append(f"  {life.size} ranks")
        lines += [f"  {position:3} {name:28} {MOVES[name].says}" for position, name, _ in life.moves]
    return "\n".join(lines)
