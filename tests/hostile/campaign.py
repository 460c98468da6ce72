"""Many loops at once, and a summary of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hostile.fork_server import Line
from hostile.moves import BROKEN, MOVES, Detection, Effect
from warm_start import warm_start

TESTS = Path(__file__).resolve().parent.parent
SAYS_MAX = 5  # failed loops that a report describes; of others it only has the number


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all loops. `options`: options of a replay, beside the seed."""

    lines: list[Line]
    counts: Counter[str]
    options: str = ""

    @property
    def wrong(self) -> list[Line]:
        return sorted((line for line in self.lines if line["problems"]), key=lambda line: line["seed"])

    def says(self) -> str:
        wrong = self.wrong
        seeds = [line["seed"] for line in wrong]
        words = [f"{len(wrong)} of {len(self.lines)} loops went wrong: seeds {seeds}"]
        for line in wrong[:SAYS_MAX]:
            replay = f"python -m hostile{self.options} --seed {line['seed']} --shrink"
            words += [f"--- {replay}", *line["moves"], *line["problems"]]
        return "\n".join(words)

    def missed(self, *, times: int) -> list[str]:
        """Moves that changed a running capture less often than required, and detections that were never needed."""
        drawn = [move for move in MOVES.values() if move.name not in BROKEN]
        return [move.name for move in drawn if self.counts[f"made {move.name}"] < times]

    def found(self, detection: Detection) -> int:
        """The number of saves that failed after a move that this detection has to find."""
        escaping = [move.name for move in MOVES.values() if move.effect is Effect.ESCAPES]
        return sum(self.counts[f"found {name}"] for name in escaping if MOVES[name].detection is detection)


def campaign(
    first: int, end: int, path: Path, *, workers: int = 1, moves: tuple[str, ...] = (), mutation: str = "",
    several_ranks: bool = False,
) -> Report:
    """Play the loops of seeds `first` to `end`, divided among that many programs."""
    module, options = ("hostile.ranks.fork_server", " --ranks 4") if several_ranks else ("hostile.fork_server", "")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(TESTS)}
    programs = []
    for number in range(workers):
        command = [
            sys.executable, "-m", module, "--seeds", f"{first + number}:{end}:{workers}",
            "--path", str(path / str(number)), "--moves", ",".join(moves), "--mutation", mutation,
        ]
        with warm_start(module):
            programs.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=TESTS, text=True))
    lines: list[Line] = []
    for program in programs:
        text, _ = program.communicate()
        lines += map(json.loads, text.splitlines())
    assert [line["seed"] for line in sorted(lines, key=lambda line: line["seed"])] == list(range(first, end))
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line["counts"])
    return Report(lines, counts, options)
