"""Replays one loop of several ranks: python -m hostile --ranks 4 --seed 7, from the folder of the tests."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hostile.ranks.draw import Drawn, draw
from hostile.ranks.moves import MOVES
from hostile.ranks.nursery import players, prepare
from hostile.ranks.play import play
from hostile.shrink import kind, shrink


def replay(
    seed: int, size: int, moves: Sequence[str] | None, at: Sequence[int] | None, *, times: int, shrinks: bool
) -> int:
    """Play it so often, or until it goes wrong; then find the fewest moves that go wrong alike. How to exit."""
    drawn = draw(seed, moves, size)
    drawn = drawn if at is None else drawn.only(at)
    print(describe(drawn))
    prepare()
    with tempfile.TemporaryDirectory() as path, players(Path(path)) as (folders, jobs):

        def problems(loop: Drawn) -> list[str]:
            for _ in range(times):
                verdict = play(loop, folders, jobs)
                if verdict.problems:
                    print(f"made: {', '.join(verdict.moves)}")
                    return verdict.problems
            return []

        found = problems(drawn)
        print("\n".join(f"PROBLEM: {problem}" for problem in found) or "sound")
        if found and shrinks:
            shortest, positions = shrink(drawn, lambda loop: kind(problems(loop)) == kind(found))
            print(f"shortest: --at {','.join(map(str, positions))}")
            print(describe(shortest))
    return 1 if found else 0


def describe(drawn: Drawn) -> str:
    lines = [f"seed {drawn.seed}: {drawn.setup}"]
    for life in drawn.lives():
        lines.append(f"  {life.size} ranks")
        lines += [f"  {at:3} {name:28} {MOVES[name].says}" for at, name, _ in life.moves]
    return "\n".join(lines)
