"""Functions that all commands use: output as tables or JSON, errors, and common options."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from flowstone.config import GIB, KIB, MIB
from flowstone.errors import CoverageError, FlowstoneError, StorageError, is_damage, printable

if TYPE_CHECKING:
    from rich.console import Console

    from flowstone.cluster import Cluster
    from flowstone.store.memory.agent_wire import RunStatus

Step = Annotated[int | None, typer.Option("--step", help="The step; default: the newest.")]
StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="A store, or a checkpoint's directory.")]
Section = Annotated[str, typer.Option("--section", help="Section of the state; '' for all, with full names.")]
Skips = Annotated[
    list[str] | None, typer.Option("--skip", metavar="PATTERN", help="Leave out matching names; repeatable.")
]
CastTo = Annotated[str | None, typer.Option("--dtype", help="Convert floating-point tensors: bf16, f16, f32.")]
OnRay = Annotated[
    bool, typer.Option("--ray", help="Distribute the work over the Ray cluster at RAY_ADDRESS, or on this machine.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


DAMAGE, ERROR = 1, 2
"""Exit statuses of all commands: 1 for damage or a difference; 2 for wrong usage or a system error; else 0."""


def make_console() -> Console:
    from rich.console import Console  # imported here, as the import takes half as long as a listing

    # Output into a pipe is for programs, so lines are not cut to the width of a terminal.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_json(value: object) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates, by which Python represents bytes of a path that are not UTF-8
        text = json.dumps(value, indent=2)
    typer.echo(text)


def escape_markup(text: str) -> str:
    """Like `printable`, but markup of rich's console is escaped, too."""
    from rich.markup import escape

    return escape(printable(text))


def print_rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Rich's Table would take seconds for thousands of rows."""
    rows = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    bars = ["\u2501" * (width + 2) for width in widths], ["\u2500" * (width + 2) for width in widths]

    def line(cells: Sequence[str], border: str) -> str:
        return border + border.join([f" {cell:<{width}} " for cell, width in zip(cells, widths, strict=True)]) + border

    lines = ["\u250f" + "\u2533".join(bars[0]) + "\u2513", line(titles, "\u2503")]
    lines += ["\u2521" + "\u2547".join(bars[0]) + "\u2529", *(line(row, "\u2502") for row in rows)]
    lines += ["\u2514" + "\u2534".join(bars[1]) + "\u2518"]
    typer.echo("\n".join(lines))


def size_text(count: object) -> str:
    """A number of bytes as text, with a suitable unit."""
    size = float(count) if isinstance(count, int) else 0.0
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


_UNITS = {"": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def print_conversion(line: str, seconds: float, resumed_bytes: int, **names: Sequence[str]) -> None:
    """Print the result of a conversion: a line of text, then the `names` under their titles, if there are any."""
    resumed = f"; resumed after {size_text(resumed_bytes)}" if resumed_bytes else ""
    typer.echo(printable(f"{line}, {seconds:.1f} s{resumed}"))
    for title, listed in names.items():
        if listed:
            more = ", ..." if len(listed) > 20 else ""
            typer.echo(printable(f"{title.replace('_', ' ')}: {', '.join(listed[:20])}{more}"))


def parse_size(text: str) -> int:
    """The number of bytes that a size with a unit means, such as 256MiB or 2GB. Raises typer.BadParameter."""
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise typer.BadParameter(f"{text!r} is not a size; write 256MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])


Budget = Annotated[
    int, typer.Option("--budget", parser=parse_size, metavar="SIZE", help="Memory limit for buffers.")
]


@contextmanager
def chosen_cluster(on_ray: bool) -> Iterator[Cluster | None]:
    """Context that yields the Ray cluster that does the work. Without `on_ray`, yields None: this process does it."""
    if not on_ray:
        yield None
        return
    from flowstone.cluster import ray_cluster

    with ray_cluster() as cluster:
        yield cluster


@contextmanager
def errors_reported(as_json: bool, *, writes: bool = False) -> Iterator[None]:
    """Context that prints an error without a traceback, and then exits with the status DAMAGE or ERROR.

    writes  whether the command also writes. If so, a StorageError may concern the command's target, so it never counts
            as damage
    """
    try:
        yield
    except FlowstoneError as error:
        is_of_target = writes and isinstance(error, StorageError)
        _fail(error, as_json, ERROR if is_of_target else status_of(error))
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader has closed the pipe, so no error can or must be reported
        _fail(system_error(error), as_json, ERROR)


def status_of(error: FlowstoneError) -> int:
    """The exit status for an error: DAMAGE if stored bytes are missing or differ from the bytes that were written,
    otherwise ERROR.
    """
    return DAMAGE if is_damage(error) or isinstance(error, CoverageError) else ERROR


def system_error(error: OSError) -> StorageError:
    """The error for a failure outside of any store, such as of a report's file, a terminal, or the working directory.
    """
    file = f" for {os.fsdecode(error.filename)}" if error.filename else ""
    return StorageError(f"the system refused: {error.strerror}{file}", errno=error.errno or 0, next="give another path")


def _fail(error: FlowstoneError, as_json: bool, status: int) -> NoReturn:
    if as_json:
        facts = {key: str(value) for key, value in error.facts.items()}
        print_json({"error": type(error).__name__, "message": error.message, "facts": facts})
    else:
        typer.echo(printable(f"{type(error).__name__}: {error}"), err=True)
    raise typer.Exit(status)


def local_time(created: str) -> str:
    """The time at which a checkpoint was made, as text in the local time zone."""
    return created.replace("T", " ").replace("+00:00", " UTC")


def run_status_text(run: RunStatus) -> str:
    """The status of a run in the memory agent, as one line of text."""
    flushed = f"up to step {run.flushed_step}" if run.flushed_step >= 0 else "no step yet"
    flush = f"flushed to {run.flush_to}: {flushed}" if run.flush_to else "not flushed to a store"
    under_way = ", a flush is running" if run.is_flushing else ""
    failed = f", the last flush failed: {run.flush_error.splitlines()[0]}" if run.flush_error else ""
    memory = f"{size_text(run.held_bytes)} of memory, {size_text(run.pooled_bytes)} of it free for the next save"
    return f"{memory}; {run.jobs} process(es) connected; {flush}{under_way}{failed}"
