"""Plans of large jobs: a Llama-3's training state on 64 to 8,192 simulated ranks, in several parallelisms.

    PYTHONPATH=src python bench/scale.py --quick    # checks that it works, in seconds, with small models
    PYTHONPATH=src python bench/scale.py --json runs/scale.json --update docs/performance/scale.md --plots docs/figures
    PYTHONPATH=src python bench/scale.py --from runs/scale.json --update docs/performance/scale.md

Each job is planned in a process of its own, on one core: the first plan of rank 0, one rank's write plan, the index
and the manifest, and one rank's load plan in another layout. It measures time, memory, balance and messages. A missed
goal is a line of the output, not a failure. `--json` is written after every job.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

# A script finds its own folder there, and would not find the package that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from bench import machine, script
from bench.launch import WorkerError, call
from bench.report import Report
from bench.scaling import tables
from bench.scaling.records import Case, Outcome, Run, Task
from bench.scaling.state import PARALLELISMS

NAME = "scale"
TIMEOUT_S = 1800.0  # of one job; the largest needs a few minutes
RANKS, QUICK_RANKS = (64, 256, 1024, 8192), (8, 64)
TARGETS = {"fsdp": "tp-pp-fsdp", "hsdp": "tp-pp-fsdp", "ep": "fsdp"}  # where a job is loaded; others into FSDP


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    run = script.read(options.read, Run) if options.read else measured(options)
    script.publish(report(run), options)
    return 1 if any(case.error for case in run.cases) else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plans of large jobs, without the ranks: time, memory, balance.")
    add = parser.add_argument
    add("--quick", action="store_true", help="toy models, to see that it works")
    add("--models", nargs="+", choices=("70b", "405b", "moe"), default=("70b", "405b", "moe"))
    add("--layouts", nargs="+", choices=list(PARALLELISMS), default=list(PARALLELISMS))
    add("--ranks", nargs="+", type=int, help=f"default: {' '.join(map(str, RANKS))}")
    add("--directory", type=Path, default=Path("runs/bench"), help="where indexes are written, and removed")
    script.add_results(parser, NAME, each="job")
    options = parser.parse_args(arguments)
    if options.quick and options.update:
        parser.error("--quick is a check: its numbers belong into no document")
    options.ranks = options.ranks or (QUICK_RANKS if options.quick else RANKS)
    return options


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Model, layout and ranks of each job. Layouts with experts need a model with experts, the others one without."""
    for model in ("tiny", "tiny-moe") if options.quick else options.models:
        for how in options.layouts:
            if PARALLELISMS[how].experts == ("moe" in model):
                yield from ((model, how, ranks) for ranks in options.ranks)


def measured(options: argparse.Namespace) -> Run:
    todo = list(jobs(options))
    with script.workplace(options.directory) as (directory, bar):
        run = Run(
            command(options), f"{datetime.now(UTC):%Y-%m-%d}", machine.describe(directory, []),
            "quick" if options.quick else "full", (),
        )
        shown = bar.add_task("", total=len(todo))
        for model, how, ranks in todo:
            bar.update(shown, description=f"{model}, {how}, {ranks} ranks")
            task = Task(model, how, ranks, TARGETS.get(how, "fsdp"), str(directory))
            run = msgspec.structs.replace(run, cases=(*run.cases, plan(task)))
            bar.advance(shown)
            script.write(run, options.json)
    return run


def plan(task: Task) -> Case:
    public = msgspec.structs.replace(task, directory="")
    try:
        outcome = call("bench.scaling.measure", task, Outcome, python=Path(sys.executable), timeout_s=TIMEOUT_S)
        return Case(public, outcome)
    except WorkerError as error:
        return Case(public, None, str(error))


def command(options: argparse.Namespace) -> str:
    """The command that measures these numbers again."""
    quick = " --quick" if options.quick else ""
    ranks = "" if tuple(options.ranks) == RANKS or options.quick else f" --ranks {' '.join(map(str, options.ranks))}"
    return f"PYTHONPATH=src python bench/scale.py{quick}{ranks}"


def report(run: Run) -> Report:
    return Report(
        NAME, run.command, run.started_utc, run.machine, "", tables.goals(run), tables.charts(run), tables.tables(run),
        tables.NOTES,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
