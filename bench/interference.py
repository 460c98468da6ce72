"""The effect of saves on training: steps, waits and total time with saves and without, for Flowstone and its rivals.

    PYTHONPATH=src python bench/interference.py --quick    # checks that it works, in a minute; figures mean nothing
    PYTHONPATH=src python bench/interference.py --json runs/interference.json \
        --update docs/performance/training.md --plots docs/figures  # GPT-2 of 124 million parameters, every goal
    PYTHONPATH=src python bench/interference.py --from runs/interference.json --update docs/performance/training.md

GPT-2 learns real text. Each rival trains in a process of its own, in blocks with saves beside blocks without. Then it
saves once more and continues to train, and its checkpoint is compared with the state at the save. A missed goal is a
line of the output, not a failure; a failed save or wrong bytes of Flowstone are a failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

# A script finds its own folder there, and would not find the package that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.progress import Progress

from bench import machine, script
from bench.environments import CannotInstallError, Environment
from bench.launch import Result, WorkerError, call
from bench.report import Report
from bench.rivals import Entry
from bench.training import tables
from bench.training.goals import goals
from bench.training.programme import FULL, PARTICIPANTS, QUICK, Drill, Programme
from bench.training.records import (
    Calibration,
    CalibrationTask,
    Drilled,
    DrillOutcome,
    Run,
    Trained,
    TrainingOutcome,
    TrainingTask,
)

NAME = "interference"
TIMEOUT_S = 3600.0  # of one process; the longest trains for a quarter of an hour


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.read:
        run = script.read(options.read, Run)
    else:
        with script.workplace(options.directory) as (directory, bar):
            run = Conductor(options, directory, bar).run()
    script.publish(report(run), options)
    return 0 if is_sound(run) else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Saves beside a real training: step times, waits, memory, exactness.",
        epilog="The whole takes about an hour and a half where a step takes two seconds.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model and few steps, to see that it works")
    add("--only", nargs="+", choices=[entry.name for entry in PARTICIPANTS], metavar="NAME", help="rivals to train")
    add("--rounds", type=int, help="the programme's own otherwise")
    add("--directory", type=Path, default=Path("runs/bench"), help="on the device to measure; environments are kept")
    script.add_results(parser, NAME, each="process")
    add("--resume", action="store_true", help="go on behind what --json holds, after an interruption")
    options = parser.parse_args(arguments)
    options.programme = QUICK if options.quick else FULL
    options.rounds = options.programme.rounds if options.rounds is None else options.rounds
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    if options.quick and options.update:
        parser.error("--quick is a check: its numbers belong into no document")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


class Conductor:
    """Rounds of one process for each rival and drill; the measurements so far are in `Run`, and on disk."""

    def __init__(self, options: argparse.Namespace, directory: Path, bar: Progress) -> None:
        self._options, self._directory, self._bar = options, directory, bar
        self._programme: Programme = options.programme
        self._entries = [entry for entry in PARTICIPANTS if options.only is None or entry.name in options.only]
        self._pythons: dict[str | None, Path] = {None: Path(sys.executable)}
        self._missing: dict[str | None, str] = {}

    def run(self) -> Run:
        rounds = range(1, self._options.rounds + 1)
        shown = self._bar.add_task("", total=sum(1 for number in rounds for _ in self._work(number)))
        self._find_pythons(shown)
        run = self._begun() or self._started(shown)
        for number in rounds:
            for title, do in self._work(number):
                self._bar.update(shown, description=f"round {number}/{self._options.rounds}: {title}")
                run = do(replace(run, rounds=number))
                self._bar.advance(shown)
                script.write(run, self._options.json)
        return run

    def _work(self, number: int) -> Iterator[tuple[str, Callable[[Run], Run]]]:
        """Of round `number`: titles, and what adds to a run what it lacks."""
        for entry in self._entries:
            yield entry.title, lambda run, entry=entry: self._train(run, entry, number)
        for drill in self._programme.drills:
            if number <= (drill.rounds or number):
                yield drill.title, lambda run, drill=drill: self._drill(run, drill, number)

    def _find_pythons(self, shown: object) -> None:
        for name in {entry.environment for entry in self._entries} - {None}:
            self._bar.update(shown, description=f"environment of {name}")  # type: ignore[arg-type]
            try:
                self._pythons[name] = Environment(self._options.directory / "environments").python(name)
            except CannotInstallError as error:
                self._missing[name] = f"cannot install: {error}"

    def _begun(self) -> Run | None:
        """The results of an interrupted run, if they are wanted; failed parts are tried again."""
        path = self._options.json
        if not self._options.resume or not path.exists():
            return None
        run = script.read(path, Run)
        if run.programme != self._programme.name or run.shape != self._programme.shape:
            raise SystemExit(f"{path} is of another programme: {run.programme}")
        trained = tuple(trained for trained in run.trained if trained.error is None)
        return replace(run, trained=trained, drilled=tuple(d for d in run.drilled if d.error is None))

    def _started(self, shown: object) -> Run:
        programme = self._programme
        if programme.window is None:
            self._bar.update(shown, description="calibration")  # type: ignore[arg-type]
            task = CalibrationTask(programme.shape, programme.target_s)
            calibration = self._call(task, Calibration, self._pythons[None])
        else:
            calibration = Calibration(programme.window)
        environments = [name for name in self._pythons if name is not None]
        return Run(
            command=command(self._options), started_utc=f"{datetime.now(UTC):%Y-%m-%d}",
            machine=machine.describe(self._directory, environments), programme=programme.name, shape=programme.shape,
            calibration=calibration, rounds=0,
        )

    def _train(self, run: Run, entry: Entry, number: int) -> Run:
        if any((trained.rival, trained.round) == (entry.name, number) for trained in run.trained):
            return run
        if entry.environment in self._missing:
            trained = Trained(entry.name, number, None, self._missing[entry.environment])
        else:
            with _Room(self._directory) as scratch:
                task = TrainingTask(
                    entry.name, run.shape, run.calibration.window, self._programme.legs(entry.name), str(scratch),
                    self._programme.settle_s,
                )
                try:
                    outcome = self._call(task, TrainingOutcome, self._pythons[entry.environment])
                    trained = Trained(entry.name, number, outcome)
                except WorkerError as error:
                    trained = Trained(entry.name, number, None, str(error))
        return replace(run, trained=(*run.trained, trained))

    def _drill(self, run: Run, drill: Drill, number: int) -> Run:
        if any((drilled.drill, drilled.round) == (drill.name, number) for drilled in run.drilled):
            return run
        with _Room(self._directory) as scratch:
            task = drill.task(str(scratch), self._programme.settle_s)
            try:
                drilled = Drilled(drill.name, number, self._call(task, DrillOutcome, self._pythons[None]))
            except WorkerError as error:
                drilled = Drilled(drill.name, number, None, str(error))
        return replace(run, drilled=(*run.drilled, drilled))

    def _call(self, task: object, result: type[Result], python: Path) -> Result:
        named = {type(task).__name__: task}
        return call("bench.training.worker", named, result, python=python, timeout_s=TIMEOUT_S)


class _Room:
    """A directory for one process, which is removed afterwards."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "room"

    def __enter__(self) -> Path:
        self._path.mkdir()
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path)
        os.sync()  # otherwise the next one would write this one's unwritten data


def command(options: argparse.Namespace) -> str:
    """The command that measures these numbers again, without paths of this machine."""
    quick = " --quick" if options.quick else ""
    only = f" --only {' '.join(options.only)}" if options.only else ""
    return f"PYTHONPATH=src python bench/interference.py{quick} --rounds {options.rounds}{only}"


def report(run: Run) -> Report:
    return Report(
        NAME, run.command, run.started_utc, run.machine, tables.conditions(run), goals(run), tables.charts(run),
        tables.tables(run), tables.notes(run),
    )


def is_sound(run: Run) -> bool:
    """Whether Flowstone trained and drilled without failure, and brought back what was saved."""
    ours = {entry.name for entry in PARTICIPANTS if entry.is_ours}
    trained = [t for t in run.trained if t.rival in ours]
    exact = all(t.outcome is not None and not t.outcome.differing for t in trained)
    saved = all(s.error is None for t in trained if t.outcome for block in t.outcome.blocks for s in block.saves)
    return exact and saved and all(d.outcome is not None and not d.outcome.failures for d in run.drilled)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
