"""The main program of the benchmark: interleaved rounds of one process for each rival, then tables, plots and goals.

    PYTHONPATH=src python bench/run.py                    # the short programme: 2.1 GB, no installs
    PYTHONPATH=src python bench/run.py --set full --json runs/bench.json \
        --update docs/performance/rivals.md --plots docs/figures  # 5 GB, every rival, every goal
    PYTHONPATH=src python bench/run.py --from runs/bench.json --update docs/performance/rivals.md --plots docs/figures

A missed goal is a line of the output, not a failure; wrong bytes from Flowstone are a failure. `--json` is written
after every round, so that the results of an interrupted run survive.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

# A script finds its own folder there, and would not find the package that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.progress import Progress

from bench import fio, machine, plots, script, table
from bench.environments import CannotInstallError, Environment
from bench.goals import goals
from bench.launch import work
from bench.records import FioSample, Measured, Run, Task
from bench.report import Report, section
from bench.rivals import CACHED, ENTRIES, SHORT, Entry
from bench.state import Llama, choose_llama
from bench.worker import SETTLE_S

NAME = "bench"
SETS = {"short": int(2.1e9), "full": int(5e9)}  # and the bytes of their states
MINIMUM_BYTES = 1_000_000


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.read:
        run = script.read(options.read, Run)
    else:
        with script.workplace(options.directory) as (directory, bar):
            run = measure(directory, options, bar)
    text = report(run, options.section)
    if options.markdown:
        options.markdown.write_text(section(text))
    script.publish(text, options)
    return 0 if is_sound(run) else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Flowstone, its rivals and the device, on one Llama-shaped state.",
        epilog="The short set takes about a quarter of an hour on a disk of 2 GB/s, the full one one to two hours.",
    )
    add = parser.add_argument
    add("--set", choices=SETS, default="short", help="short: what needs no installation; full: all, and all goals")
    add("--only", nargs="+", choices=[entry.name for entry in ENTRIES], metavar="NAME", help="rows of any set")
    add("--bytes", type=lambda text: int(float(text)), help="of the state; the set's own otherwise")
    add("--rounds", type=int, default=5)
    add("--directory", type=Path, default=Path("runs/bench"), help="on the device to measure; environments are kept")
    script.add_results(parser, NAME, each="round")
    add("--section", default=NAME, help="whose markers --update means, for rows that have a section of their own")
    add("--resume", action="store_true", help="go on with the rounds that --json holds, after an interruption")
    add("--markdown", type=Path, help="the section of docs/performance/rivals.md")
    add("--passes", type=int, default=fio.PASSES, help="over fio's candidates, to choose among them")
    add("--settle-s", type=float, default=SETTLE_S, help="rest before every timer")
    options = parser.parse_args(arguments)
    options.bytes = options.bytes or SETS[options.set]
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    if options.bytes < MINIMUM_BYTES or min(options.rounds, options.passes) < 1:
        parser.error(f"--bytes: at least {MINIMUM_BYTES}; --rounds, --passes: at least 1")
    return options


def chosen(options: argparse.Namespace) -> list[Entry]:
    if options.only:
        return [entry for entry in ENTRIES if entry.name in options.only]
    return [entry for entry in ENTRIES if options.set == "full" or entry.name in SHORT]


def measure(directory: Path, options: argparse.Namespace, bar: Progress) -> Run:
    entries, layout = chosen(options), choose_llama(options.bytes)
    run = begun(options, layout)
    has_fio = fio.is_installed()
    at_once = max(entry.ranks for entry in entries)
    steps = (2 * len(fio.CANDIDATES) * options.passes + options.rounds) * has_fio
    steps += sum(min(options.rounds, entry.rounds or options.rounds) * (1 + len(entry.loads)) for entry in entries)
    shown = bar.add_task("environments of rivals", total=steps)
    tell = partial(_tell, bar, shown)
    pythons, failed = find_pythons(entries, options.directory / "environments", tell)
    candidates: tuple[FioSample, ...] = () if run is None or run.device is None else run.device.candidates
    settle = partial(rest, options.settle_s)
    if has_fio and not candidates:
        bar.update(shown, description="fio: memory, request size, depth")
        candidates = fio.choose(
            directory, layout.state_bytes, passes=options.passes, settle=settle, on_done=partial(bar.advance, shown)
        )
    device = [] if run is None or run.device is None else [run.device]
    measured = list(failed) if run is None else list(run.measured)
    described = machine.describe(directory, [name for name in pythons if name is not None])
    for number in range(1 if run is None else run.rounds + 1, options.rounds + 1):
        if has_fio:
            tell(f"round {number}/{options.rounds}: fio", 1)
            device.append(fio.measure_round(directory, layout.state_bytes, candidates, settle, at_once))
        for entry in entries:
            if entry.environment in pythons and number <= (entry.rounds or number):
                measured += measure_rival(entry, number, directory, options, pythons[entry.environment], tell)
        run = Run(
            command=command(options), started_utc=f"{datetime.now(UTC):%Y-%m-%d}", machine=described,
            layout=str(layout), state_bytes=layout.state_bytes, rounds=number,
            device=fio.join(device) if device else None, measured=tuple(measured),
        )
        script.write(run, options.json)
    assert run is not None
    return run


def begun(options: argparse.Namespace, layout: Llama) -> Run | None:
    """The rounds of an interrupted run, if they are wanted."""
    if not options.resume or not options.json.exists():
        return None
    run = script.read(options.json, Run)
    if str(layout) != run.layout:
        raise SystemExit(f"{options.json} is about another state: {run.layout}")
    return run


def _tell(bar: Progress, shown: object, title: str, steps: int) -> None:
    bar.update(shown, description=title, advance=steps)  # type: ignore[arg-type]


def find_pythons(
    entries: Sequence[Entry], root: Path, tell: Callable[[str, int], None]
) -> tuple[dict[str | None, Path], list[Measured]]:
    """The interpreter of every environment that can be created, and for each of the other rivals the reason."""
    pythons: dict[str | None, Path] = {None: Path(sys.executable)}
    failed = []
    for name in dict.fromkeys(entry.environment for entry in entries if entry.environment is not None):
        tell(f"environment of {name}", 0)
        try:
            pythons[name] = Environment(root).python(name)
        except CannotInstallError as error:
            failed += [Measured(e.name, 1, None, f"cannot install: {error}") for e in entries if e.environment == name]
    return pythons, failed


def measure_rival(
    entry: Entry, number: int, directory: Path, options: argparse.Namespace, python: Path,
    tell: Callable[[str, int], None],
) -> list[Measured]:
    """The saves in one process, each way to load in another; a failure ends this rival's round.

    In every other round the ways to load run in reverse order, so that none always follows the saves.
    """
    own = directory / "rival"
    own.mkdir()
    measured = []
    try:
        loads = entry.loads if number % 2 else reversed(entry.loads)
        for verb, how in (("save", ""), *(("load", how) for how in loads)):
            tell(f"round {number}/{options.rounds}: {entry.title}, {verb}", 1)
            tasks = [task(entry, verb, how, own / "0", options, rank) for rank in range(entry.ranks)]
            measured.append(work(tasks, number, python=python, io_uring=entry.io_uring))
            if measured[-1].error is not None:
                break
    finally:
        shutil.rmtree(own)
    return measured


def task(entry: Entry, verb: str, how: str, directory: Path, options: argparse.Namespace, rank: int) -> Task:
    directory.mkdir(exist_ok=True)
    return Task(
        rival=entry.name, what=verb, how=how, times=entry.saves if verb == "save" else entry.times_loaded,
        number=entry.saves, shape=entry.shape,
        state_bytes=options.bytes // entry.ranks if entry.replicas else options.bytes,
        phase=entry.phases[verb == "load"], directory=str(directory), settle_s=options.settle_s,
        rank=rank, ranks=entry.ranks, gated=entry.ranks > 1, replicas=entry.replicas, cached=how.startswith(CACHED),
    )


def rest(settle_s: float) -> None:
    os.sync()
    time.sleep(settle_s)


def command(options: argparse.Namespace) -> str:
    """The command that measures these numbers again, without paths of this machine."""
    only = f" --only {' '.join(options.only)}" if options.only else ""
    size = f" --bytes {options.bytes / 1e9:g}e9" if options.bytes != SETS[options.set] else ""
    passes = f" --passes {options.passes}" if options.passes != fio.PASSES else ""
    return f"PYTHONPATH=src python bench/run.py --set {options.set}{size} --rounds {options.rounds}{passes}{only}"


def report(run: Run, name: str = NAME) -> Report:
    return Report(
        name, run.command, run.started_utc, run.machine, table.conditions(run), goals(run), plots.charts(run),
        table.tables(run), table.notes(run),
    )


def is_sound(run: Run) -> bool:
    """Whether Flowstone was measured without failure, and each of its loads returned the saved bytes."""
    ours = {entry.name for entry in ENTRIES if entry.is_ours}
    measured = [m for m in run.measured if m.rival in ours]
    exact = all(load.exact for m in measured if m.outcome is not None for load in m.outcome.loads)
    return exact and all(m.error is None for m in measured)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
