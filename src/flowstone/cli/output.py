"""Shared by the verbs of the command line: output as tables or JSON, and errors as both."""

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
    from flowstone.store.agent_wire import RunStatus

Step = Annotated[int | None, typer.Option("--step", help="The step; default: the newest.")]
StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="A store, or one checkpoint's own directory.")]
Section = Annotated[str, typer.Option("--section", help="Of the state; '' for all, where names are whole.")]
Skips = Annotated[list[str] | None, typer.Option("--skip", metavar="PATTERN", help="Leave out what matches; repeat.")]
CastTo = Annotated[str | None, typer.Option("--dtype", help="Convert floating-point tensors: bf16, f16, f32.")]
OnRay = Annotated[bool, typer.Option("--ray", help="Spread the work over a cluster of Ray: RAY_ADDRESS, or here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


DAMAGE, ERROR = 1, 2
"""Exit statuses of all verbs: damage, or a difference; an error of use or of the system. 0: all is sound."""


def make_console() -> Console:
    from rich.console import Console  # imported here: it takes half as long as a listing

    # Piped output is for programs: do not truncate it to a terminal's width.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_json(value: object) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates, which Python uses for bytes of a path that are not UTF-8
        text = json.dumps(value, indent=2)
    typer.echo(text)


def marked(text: str) -> str:
    """The same for rich's console, with markup escaped as well."""
    from rich.markup import escape

    return escape(printable(text))


def print_rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of thousands of rows; rich's Table takes seconds for that."""
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
    """Bytes in a unit that reads well."""
    size = float(count) if isinstance(count, int) else 0.0
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


_UNITS = {"": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def print_conversion(line: str, seconds: float, resumed_bytes: int, **names: Sequence[str]) -> None:
    """What a conversion did: a line about it, then `names` by title, where there are some."""
    resumed = f"; went on after {size_text(resumed_bytes)}" if resumed_bytes else ""
    typer.echo(printable(f"{line}, {seconds:.1f} s{resumed}"))
    for title, listed in names.items():
        if listed:
            more = ", ..." if len(listed) > 20 else ""
            typer.echo(printable(f"{title.replace('_', ' ')}: {', '.join(listed[:20])}{more}"))


def parse_size(text: str) -> int:
    """A size with a unit, as people write it. Raises what typer shows."""
    found = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _UNITS or found[1].count(".") > 1 or found[1] == ".":
        raise typer.BadParameter(f"{text!r} is not a size; write 256MiB or 2GB")
    return int(float(found[1]) * _UNITS[found[2]])


Budget = Annotated[
    int, typer.Option("--budget", parser=parse_size, metavar="SIZE", help="Memory for bytes on their way.")
]


@contextmanager
def chosen_cluster(on_ray: bool) -> Iterator[Cluster | None]:
    """The cluster of Ray that is to do the work; None for this process."""
    if not on_ray:
        yield None
        return
    from flowstone.cluster import ray_cluster

    with ray_cluster() as cluster:
        yield cluster


@contextmanager
def errors_reported(as_json: bool, *, writes: bool = False) -> Iterator[None]:
    """Exit with the error's own text, without a traceback, and with its status: DAMAGE or ERROR.

    writes  the verb also writes: an error about a missing or existing file may concern its target
    """
    try:
        yield
    except FlowstoneError as error:
        is_of_target = writes and isinstance(error, StorageError)
        _fail(error, as_json, ERROR if is_of_target else status_of(error))
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader has closed the pipe: there is no error to report
        _fail(refused(error), as_json, ERROR)


def status_of(error: FlowstoneError) -> int:
    """DAMAGE where stored bytes are not what was written, or some are missing; ERROR for any other reason."""
    return DAMAGE if is_damage(error) or isinstance(error, CoverageError) else ERROR


def refused(error: OSError) -> StorageError:
    """The error for a refusal outside of any store: a report's file, a terminal, a working directory."""
    what = f" for {os.fsdecode(error.filename)}" if error.filename else ""
    return StorageError(f"the system refused: {error.strerror}{what}", errno=error.errno or 0, next="give another path")


def _fail(error: FlowstoneError, as_json: bool, status: int) -> NoReturn:
    if as_json:
        facts = {key: str(value) for key, value in error.facts.items()}
        print_json({"error": type(error).__name__, "message": error.message, "facts": facts})
    else:
        typer.echo(printable(f"{type(error).__name__}: {error}"), err=True)
    raise typer.Exit(status)


def local_time(created: str) -> str:
    """When a checkpoint was made, in local time."""
    return created.replace("T", " ").replace("+00:00", " UTC")


def told(run: RunStatus) -> str:
    """What the memory agent holds of a run, on one line."""
    flushed = f"step {run.flushed_step} is there" if run.flushed_step >= 0 else "no step is there yet"
    flush = f"flushed to {run.flush_to}: {flushed}" if run.flush_to else "flushed nowhere"
    under_way = ", a flush is under way" if run.is_flushing else ""
    failed = f", the last flush failed: {run.flush_error.splitlines()[0]}" if run.flush_error else ""
    memory = f"{size_text(run.held_bytes)} of memory, {size_text(run.pooled_bytes)} of it free for the next save"
    return f"{memory}; {run.jobs} process(es) connected; {flush}{under_way}{failed}"
