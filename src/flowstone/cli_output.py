"""What the verbs of the command line have in common: tables or JSON, and errors as both."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console

from flowstone.errors import FlowstoneError


def make_console() -> Console:
    # Piped output is for programs: not cut to a terminal's width.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def size_text(count: object) -> str:
    """Bytes in a unit that reads well."""
    size = float(count) if isinstance(count, int) else 0.0
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@contextmanager
def told(as_json: bool) -> Iterator[None]:
    """End with status 1 and the error's own text, without a traceback."""
    try:
        yield
    except FlowstoneError as error:
        _fail(error, as_json)


def _fail(error: FlowstoneError, as_json: bool) -> NoReturn:
    if as_json:
        facts = {key: str(value) for key, value in error.facts.items()}
        print_json({"error": type(error).__name__, "message": error.message, "facts": facts})
    else:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
    raise typer.Exit(1)
