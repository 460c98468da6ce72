"""The benchmark's conductor: rounds of one process for each rival, interleaved, then the tables.

    PYTHONPATH=src python bench/run.py [--bytes 2.1e9] [--rounds 5] [--only NAME ...] [--json FILE] [--markdown FILE]

A missed goal is a line of the output, not a failure; wrong bytes from Flowstone are one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

# A script finds its own folder there, and would not find the package that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import fio, machine, table
from bench.records import Device, FioSample, Measured, Outcome, Run, Task
from bench.rivals import ENTRIES, OURS, Entry
from bench.state import choose_layout

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800.0  # of one worker; the slowest rival needs a minute for 2 GB
SETTLE_S = 1.0  # before every timer: deleted blocks are discarded and rate limits refill meanwhile
MINIMUM_BYTES = 1_000_000
TERMINAL_WIDTH = 150  # where there is no terminal to ask


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    entries = [entry for entry in ENTRIES if not options.only or entry.name in options.only]
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as directory, progress() as bar:
        run = measure(Path(directory), entries, options, bar)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1))
    if options.markdown:
        options.markdown.write_text(table.markdown(run))
    console = Console()
    table.print_tables(run, console if console.is_terminal else Console(width=TERMINAL_WIDTH))
    return 0 if is_sound(run) else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Flowstone, its rivals and the device, on one Llama-shaped state.")
    parser.add_argument("--bytes", type=lambda text: int(float(text)), default=int(2.1e9), help="of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("runs/bench"), help="on the device to measure")
    parser.add_argument("--json", type=Path, help="every raw number")
    parser.add_argument("--markdown", type=Path, help="the tables, as docs/PERFORMANCE.md embeds them")
    parser.add_argument("--only", nargs="+", choices=[entry.name for entry in ENTRIES], metavar="NAME", help="rivals")
    parser.add_argument("--passes", type=int, default=fio.PASSES, help="over fio's candidates, to choose among them")
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="rest before every timer")
    options = parser.parse_args(arguments)
    if options.bytes < MINIMUM_BYTES or min(options.rounds, options.passes) < 1:
        parser.error(f"--bytes: at least {MINIMUM_BYTES}; --rounds, --passes: at least 1")
    return options


def progress() -> Progress:
    """On a terminal's error stream; silent elsewhere."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )


def measure(directory: Path, entries: Sequence[Entry], options: argparse.Namespace, bar: Progress) -> Run:
    layout = choose_layout(options.bytes)
    has_fio = fio.is_installed()
    steps = (2 * len(fio.CANDIDATES) * options.passes + options.rounds) * has_fio
    steps += options.rounds * sum(1 + len(entry.loads) for entry in entries)
    shown = bar.add_task("fio: memory, request size, depth", total=steps)
    settle = partial(rest, options.settle_s)
    candidates: tuple[FioSample, ...] = ()
    if has_fio:
        candidates = fio.choose(
            directory, layout.state_bytes, passes=options.passes, settle=settle, on_done=partial(bar.advance, shown)
        )
    device: list[Device] = []
    measured: list[Measured] = []

    def tell(what: str) -> None:
        bar.update(shown, description=f"round {number}/{options.rounds}: {what}")
        bar.advance(shown)

    for number in range(1, options.rounds + 1):
        if has_fio:
            tell("fio")
            device.append(fio.measure_round(directory, layout.state_bytes, candidates, settle))
        for entry in entries:
            measured += measure_rival(entry, number, directory, options, tell)
    return Run(
        command=command(options), started_utc=f"{datetime.now(UTC):%Y-%m-%d}", machine=machine.describe(directory),
        layout=str(layout), state_bytes=layout.state_bytes, rounds=options.rounds,
        device=fio.join(device) if device else None, measured=tuple(measured),
    )


def measure_rival(
    entry: Entry, number: int, directory: Path, options: argparse.Namespace, tell: Callable[[str], None]
) -> list[Measured]:
    """The saves in one process, each way to load in another; a failure ends this rival's round."""
    own = directory / "rival"
    own.mkdir()
    measured = []
    try:
        for what, how in (("save", ""), *(("load", how) for how in entry.loads)):
            tell(f"{entry.title}, {what}")
            task = Task(entry.name, what, how, entry.saves, options.bytes, str(own), options.settle_s)
            measured.append(work(task, number))
            if measured[-1].error is not None:
                break
    finally:
        shutil.rmtree(own)
    return measured


def work(task: Task, number: int) -> Measured:
    """One worker process, from task to outcome."""
    with tempfile.TemporaryDirectory() as desk:
        task_path, outcome_path = Path(desk, "task.json"), Path(desk, "outcome.json")
        task_path.write_bytes(msgspec.json.encode(task))
        command = [sys.executable, "-m", "bench.worker", str(task_path), str(outcome_path)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Measured(task.rival, number, None, f"{task.what}: no end after {TIMEOUT_S:.0f} s")
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()
            return Measured(task.rival, number, None, f"{task.what}: {said[-1] if said else done.returncode}")
        return Measured(task.rival, number, msgspec.json.decode(outcome_path.read_bytes(), type=Outcome))


def environment() -> dict[str, str]:
    """The caller's, with its import paths made absolute, since workers start in the repository's root."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *paths])}


def rest(settle_s: float) -> None:
    os.sync()
    time.sleep(settle_s)


def command(options: argparse.Namespace) -> str:
    """What makes these numbers again; paths of this machine are nobody's business."""
    only = f" --only {' '.join(options.only)}" if options.only else ""
    return f"PYTHONPATH=src python bench/run.py --bytes {options.bytes / 1e9:g}e9 --rounds {options.rounds}{only}"


def is_sound(run: Run) -> bool:
    """Whether Flowstone was measured without failure, and every load gave back what was saved."""
    ours = [measured for measured in run.measured if measured.rival == OURS]
    exact = all(load.exact for m in run.measured if m.outcome is not None for load in m.outcome.loads)
    return exact and all(measured.error is None for measured in ours)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
