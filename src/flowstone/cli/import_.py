"""`flowstone import`: a checkpoint of another program into a store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flowstone.cli.output import (
    AsJson,
    CastTo,
    Section,
    Skips,
    errors_reported,
    parse_size,
    print_json,
    printable,
    size_text,
)
from flowstone.runtime.progress import terminal_progress


def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Safetensors, torch.save, DCP.")],
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A store; made where it is missing.")],
    step: Annotated[int, typer.Option("--step", help="Of the new checkpoint; above every one that is there.")] = 0,
    section: Section = "model",
    skip: Skips = None,
    dtype: CastTo = None,
    budget_bytes: Annotated[
        int, typer.Option("--budget", parser=parse_size, metavar="SIZE", help="Memory for bytes on their way.")
    ] = "256MiB",  # type: ignore[assignment]
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of a store of what another program has saved. Killed, the same command goes on."""
    from flowstone.convert.importing import import_checkpoint
    from flowstone.rules import Skip

    with errors_reported(as_json):
        report = import_checkpoint(
            source, store, step=step, section=section, dtype=dtype, rules=[Skip(pattern) for pattern in skip or ()],
            budget_bytes=budget_bytes, on_progress=terminal_progress("importing"),
        )
    if as_json:
        print_json(asdict(report))
        return
    typer.echo(printable(
        f"{report.path}: {len(report.tensors)} tensors of {report.kind}, {size_text(report.bytes)}, "
        f"{report.seconds:.1f} s{f'; went on after {size_text(report.resumed_bytes)}' if report.resumed_bytes else ''}"
    ))
    if report.skipped:
        names = report.skipped
        typer.echo(printable(f"left out: {', '.join(names[:20])}{', ...' * (len(names) > 20)}"))
