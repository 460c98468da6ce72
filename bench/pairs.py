"""Compare saves and loads of this tree with those of another commit of the repository, in pairs.

    PYTHONPATH=src python -m bench.pairs COMMIT DIRECTORY [--bytes 2e9] [--tensors 1800] [--rounds 20]
    PYTHONPATH=src python -m bench.pairs --from runs/bench/pairs.json --update PAGE

The other commit is checked out under runs/bench/pairs and set up there by its own `make setup`; it stays for later
runs. A round saves in a new process of each tree, then loads in another of each; the tree that goes first alternates
between rounds. Two rounds form a pair: each tree has gone first once, right after the removal of the previous round's
files. A tree's value is the lower one of both, since a disturbance only makes a process slower. Ratios are of pairs, so
noise that lasts longer than a pair affects none of them. `--json` is written after every round.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.progress import Progress

from bench import figures, machine, script
from bench.checkouts import CheckoutError, Tree, other_tree, resolve, this_tree
from bench.figures import Sample, Spread
from bench.goals import cell
from bench.launch import ROOT, WorkerError, call
from bench.pair_worker import Equal, Turn
from bench.paired import interval_of
from bench.records import Measured, Outcome, Run, Task
from bench.report import Report, Table
from bench.worker import SETTLE_S

NAME = "pairs"
THIS, OTHER = "this tree", "the other"
SAVES = 3  # of a process: the first, and later ones
HOW = "Checkpointer.load"
WARM_UP_BYTES = 48_000_000
TIMEOUT_S = 1800.0  # of one process
PAIR_ROUNDS = 2
COLUMNS = ("", "this tree, relative to the other", "pairs in favour", THIS, OTHER)


class TurnError(Exception):
    """A process of one of the trees has failed, or has loaded other bytes than were saved."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All raw numbers, and the commits that `run` calls THIS and OTHER."""

    this: str
    other: str
    run: Run


@dataclass(frozen=True, slots=True)
class Figure:
    """A measurement by pair; lower is better."""

    title: str
    digits: int
    of: Callable[[Run, str], Mapping[int, float]]


FIGURES = (
    Figure("durable save, first of a process, s", 3, lambda run, tree: _saves(run, tree, "durable_s", first=True)),
    Figure("durable save, later, s", 3, lambda run, tree: _saves(run, tree, "durable_s", first=False)),
    Figure("inside `save`, later, ms", 1, lambda run, tree: _saves(run, tree, "blocked_s", first=False, times=1e3)),
    Figure("cold load, s", 3, lambda run, tree: _loads(run, tree, "load_s")),
    Figure("CPU-s/GB, save, first of a process", 3,
           lambda run, tree: _saves(run, tree, "cpu_s", first=True, times=_per_gb(run))),
    Figure("CPU-s/GB, save, later", 3, lambda run, tree: _saves(run, tree, "cpu_s", first=False, times=_per_gb(run))),
    Figure("CPU-s/GB, cold load", 3, lambda run, tree: _loads(run, tree, "cpu_s", times=_per_gb(run))),
)


def _saves(run: Run, tree: str, field: str, *, first: bool, times: float = 1.0) -> dict[int, float]:
    return _by_pair(figures.saves(run, tree, first=first), lambda sample: times * getattr(sample, field))


def _loads(run: Run, tree: str, field: str, *, times: float = 1.0) -> dict[int, float]:
    return _by_pair(figures.loads(run, tree, HOW), lambda sample: times * getattr(sample, field))


def _by_pair(series: figures.Series[Sample], value: Callable[[Sample], float]) -> dict[int, float]:
    """The lower value of each pair of rounds. A last round without a partner is left out."""
    rounds = figures.by_round(series, value, of=min)
    return {index // PAIR_ROUNDS: min(rounds[index - 1], rounds[index]) for index in rounds if index % PAIR_ROUNDS == 0}


def _per_gb(run: Run) -> float:
    return 1e9 / run.state_bytes


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        comparison = script.read(options.read, Comparison) if options.read else compared(options)
    except (CheckoutError, TurnError) as error:
        raise SystemExit(f"bench.pairs: {error}") from error
    script.publish(report(comparison), options)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="This tree against another commit, in pairs.")
    add = parser.add_argument
    add("commit", nargs="?", help="whatever git takes for one: a hash, a branch, HEAD~3")
    add("directory", nargs="?", type=Path, default=Path("runs/bench"), help="on the device to measure")
    add("--bytes", type=lambda text: int(float(text)), default=int(2e9), help="of the state")
    add("--tensors", type=int, default=1800)
    add("--rounds", type=int, default=20, help="two are a pair")
    add("--settle-s", type=float, default=SETTLE_S, help="rest before every timer")
    script.add_results(parser, NAME, each="round")
    options = parser.parse_args(arguments)
    if min(options.bytes, options.tensors, options.rounds) < 1:
        parser.error("--bytes, --tensors, --rounds: at least 1")
    if options.rounds % PAIR_ROUNDS:
        parser.error(f"--rounds {options.rounds} is odd: each tree goes first in every second round")
    if options.commit is None and options.read is None:
        parser.error("COMMIT is missing: which commit to compare this tree with")
    return options


def compared(options: argparse.Namespace) -> Comparison:
    commit = resolve(ROOT, options.commit)
    with script.workplace(options.directory) as (directory, bar):
        shown = bar.add_task(f"set-up of {commit}")
        trees = this_tree(ROOT, THIS), other_tree(ROOT, commit, OTHER)
        bar.remove_task(shown)
        return measure(options, trees, directory, bar)


def measure(
    options: argparse.Namespace, trees: tuple[Tree, Tree], directory: Path, bar: Progress
) -> Comparison:
    """All rounds, after an uncounted one with a small state that compiles modules and fills the page cache."""
    layout = Equal(options.tensors, options.bytes)
    this, other = trees
    run = Run(
        command=command(options, other), started_utc=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=machine.describe(directory, []), layout=str(layout), state_bytes=layout.state_bytes, rounds=0,
        device=None, measured=(),
    )
    comparison = Comparison(this.title, other.title, run)
    shown = bar.add_task("", total=4 * (options.rounds + 1))
    for number in range(options.rounds + 1):
        state_bytes = options.bytes if number else min(options.bytes, WARM_UP_BYTES)
        measured = []
        for tree, task in turns(number, trees, directory / "stores", state_bytes, options.settle_s):
            bar.update(shown, description=f"round {number}/{options.rounds}: {tree.name}, {task.what}")
            measured.append(Measured(tree.name, number, take(tree, Turn(options.tensors, task))))
            bar.advance(shown)
        shutil.rmtree(directory / "stores")
        if number:
            run = replace(run, rounds=number, measured=(*run.measured, *measured))
            comparison = replace(comparison, run=run)
            script.write(comparison, options.json)
    return comparison


def turns(
    number: int, trees: tuple[Tree, Tree], stores: Path, state_bytes: int, settle_s: float
) -> Iterator[tuple[Tree, Task]]:
    """The tasks of round `number`, in order. A tree loads the files that it has saved itself."""
    for verb, how, times in (("save", "", SAVES), ("load", HOW, 1)):
        for tree in trees if number % 2 else reversed(trees):
            yield tree, Task(
                rival=tree.name, what=verb, how=how, times=times, number=SAVES, shape=NAME, state_bytes=state_bytes,
                phase=None, directory=str(stores / tree.name), settle_s=settle_s,
            )


def take(tree: Tree, turn: Turn) -> Outcome:
    """Run in a new process. Raises TurnError."""
    title = f"{tree.name}, {tree.title}: {turn.task.what}"
    Path(turn.task.directory).mkdir(parents=True, exist_ok=True)
    try:
        outcome = call("bench.pair_worker", turn, Outcome, python=tree.python, timeout_s=TIMEOUT_S, alone=True)
    except WorkerError as error:
        raise TurnError(f"{title}: {error}") from error
    if not all(load.exact for load in outcome.loads):
        raise TurnError(f"{title}: the state is not what was saved")
    return outcome


def command(options: argparse.Namespace, other: Tree) -> str:
    """The command that measures these numbers again, without paths of this machine."""
    size = f"--bytes {options.bytes / 1e9:g}e9 --tensors {options.tensors} --rounds {options.rounds}"
    return f"PYTHONPATH=src python -m bench.pairs {other.commit} DIRECTORY {size}"


def report(comparison: Comparison) -> Report:
    run, commits = comparison.run, ((THIS, comparison.this), (OTHER, comparison.other))
    notes = tuple(f"{name}: {commit}, with {figures.note(run, name)}." for name, commit in commits)
    return Report(
        NAME, run.command, run.started_utc, run.machine, conditions(run), (), (), (table(run),), notes
    )


def conditions(run: Run) -> str:
    loads = [sample for tree in (THIS, OTHER) for of in figures.loads(run, tree, HOW).values() for sample in of]
    cache = {True: "dropped from", False: "NOT DROPPED FROM", None: "perhaps not dropped from"}
    worst = next(cold for cold in (False, None, True) if any(sample.cold is cold for sample in loads))
    return (
        f"{run.layout}; {run.rounds // PAIR_ROUNDS} pairs of two rounds. In the two rounds of a pair, each source "
        "tree is measured first in one round and second in the other, and the lower of its two values counts. Figures "
        "are medians (lowest-highest). A ratio is the value of \"this tree\" divided by the value of \"the other\"; "
        "the median of the pairs' ratios is given, with its 95 % interval. If 1 is outside of the interval, the trees "
        "differ. If the ratio is below 1, \"this tree\" is better. A save counts as ended when it is committed, "
        f"which means that it is durable. Files were {cache[worst]} the page cache before each load. GB are 10^9 bytes."
    )


def table(run: Run) -> Table:
    rows = []
    for figure in FIGURES:
        this, other = figure.of(run, THIS), figure.of(run, OTHER)
        ratios = figures.ratios(this, other)
        favour = sum(ratio < 1 for ratio in ratios)
        absolute = (cell(figures.spread(of.values()), figure.digits) for of in (this, other))
        ratio = cell(Spread(*interval_of(ratios)) if ratios else None, 3)
        rows.append((figure.title, ratio, f"{favour} of {len(ratios)}", *absolute))
    return Table("This tree against the other, in pairs", COLUMNS, tuple(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
