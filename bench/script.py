"""The common parts of the benchmarks' scripts: input and output of results, and the end of a run."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.progress import Progress

from bench import front_page
from bench.progress import progress
from bench.report import Report, draw, show, update

Record = TypeVar("Record")


def add_results(parser: argparse.ArgumentParser, name: str, *, each: str) -> None:
    """Options of benchmark `name`, which writes its raw numbers after every `each`."""
    add = parser.add_argument
    add("--json", type=Path, help=f"every raw number, written after every {each}")
    add("--from", dest="read", type=Path, help="measure nothing: tables of what --json wrote")
    add("--update", type=Path, help=f"the document whose section between the {name} markers is replaced")
    add("--plots", type=Path, help="where charts (SVG) are put")


@contextmanager
def folder_in(directory: Path) -> Iterator[Path]:
    """A folder below `directory`, which is created if it is absent. Only the folder is removed at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=directory, ignore_cleanup_errors=True) as own:
        yield Path(own)


@contextmanager
def workplace(directory: Path) -> Iterator[tuple[Path, Progress]]:
    """A folder below `directory`, and a progress bar. The folder is removed at the end, also on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with folder_in(directory) as own, progress() as bar:
        yield own, bar


def write(run: object, path: Path | None) -> None:
    """Write the file that `--json` requests."""
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1))


def read(path: Path, kind: type[Record]) -> Record:
    """Read a file of `write`."""
    return msgspec.json.decode(path.read_bytes(), type=kind)


def publish(report: Report, options: argparse.Namespace) -> None:
    """To all places that the options name, and to standard output."""
    if options.update:
        update(options.update, report, options.plots)
        front_page.renew(options.update)
    if options.plots:
        draw(report.charts, options.plots)
    show(report)
