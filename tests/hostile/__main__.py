"""Replays one loop, from the folder of the tests: python -m hostile --seed 7. Or plays many: --seeds 1000:21000."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from hostile.campaign import campaign
from hostile.draw import LoopPlan, draw
from hostile.fork_server import HANGS_S, Line
from hostile.moves import MOVES
from hostile.ranks.replay import replay
from hostile.shrink import fails_like, kind, played_apart, shrink
from hostile.trainer import prepare


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hostile", description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", help="first:end: play all of these, and tell which went wrong")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--at", help="make only the moves at these positions: 0,3,4")
    parser.add_argument("--moves", help="draw from these moves alone, beside what every loop does: fork,share-memory")
    parser.add_argument("--times", type=int, default=1, help="play it so often")
    parser.add_argument("--shrink", action="store_true", help="find the shortest sequence of moves that fails alike")
    parser.add_argument("--ranks", type=int, help="of a job of so many ranks")
    asked = parser.parse_args()
    moves = asked.moves.split(",") if asked.moves else None
    if (asked.seed is None) == (asked.seeds is None):
        parser.error("give --seed or --seeds")
    if asked.seeds:
        return play_all(asked.seeds, tuple(moves or ()), workers=asked.workers, several_ranks=bool(asked.ranks))
    word = None if asked.at is None else [int(part) for part in asked.at.split(",") if part]
    if asked.ranks:
        return replay(asked.seed, asked.ranks, moves, word, times=asked.times, shrinks=asked.shrink)
    drawn = draw(asked.seed, moves)
    if word is not None:
        drawn = drawn.only(word)
    print(describe(drawn))
    prepare()
    with tempfile.TemporaryDirectory() as path:
        for _ in range(asked.times):
            (line,) = played_apart([drawn], Path(path), hangs_s=HANGS_S)
            print(tell(line))
            if line["problems"]:
                break
        else:
            return 0
        if asked.shrink:
            expected = kind(line["problems"])
            shortest, positions = shrink(drawn, fails_like(expected, Path(path), hangs_s=HANGS_S, times=asked.times))
            print(f"shortest: --at {','.join(map(str, positions))}")
            print(describe(shortest))
    return 1


def play_all(seeds: str, moves: tuple[str, ...], *, workers: int, several_ranks: bool) -> int:
    first, end = map(int, seeds.split(":"))
    with tempfile.TemporaryDirectory() as path:
        report = campaign(first, end, Path(path), workers=workers, moves=moves, several_ranks=several_ranks)
    print(report.says())
    print(", ".join(f"{name} {count}" for name, count in sorted(report.counts.items())))
    return 1 if report.wrong else 0


def describe(drawn: LoopPlan) -> str:
    lines = [f"seed {drawn.seed}: {drawn.setup}"]
    lines += [f"  {index:3} {name:28} {MOVES[name].says}" for index, (name, _) in enumerate(drawn.moves)]
    return "\n".join(lines)


def tell(line: Line) -> str:
    lines = [f"made: {', '.join(line['moves'])}"]
    lines += [f"PROBLEM: {problem}" for problem in line["problems"]] or ["sound"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
