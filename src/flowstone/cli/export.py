"""`flowstone export`: a checkpoint for other programs."""

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
    Step,
    errors_reported,
    parse_size,
    print_json,
    printable,
    size_text,
)
from flowstone.runtime.progress import terminal_progress


def export(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="A store, or one checkpoint, of any known format.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new directory, or file.")],
    to: Annotated[str, typer.Option("--to", help="hf, torch or dcp.")] = "hf",
    step: Step = None,
    section: Section = "model",
    skip: Skips = None,
    dtype: CastTo = None,
    shard_bytes: Annotated[
        int, typer.Option("--shard-size", parser=parse_size, metavar="SIZE", help="Of one file, at most.")
    ] = "5GB",  # type: ignore[assignment]
    documents: Annotated[
        Path | None, typer.Option("--documents", metavar="DIR", help="Whose config.json and tokenizer go with it.")
    ] = None,
    budget_bytes: Annotated[
        int, typer.Option("--budget", parser=parse_size, metavar="SIZE", help="Memory for bytes on their way.")
    ] = "256MiB",  # type: ignore[assignment]
    as_json: AsJson = False,
) -> None:
    """Write a section of a checkpoint for other programs. Killed, the same command goes on."""
    from flowstone.convert.export import export as run
    from flowstone.rules import Skip

    with errors_reported(as_json):
        report = run(
            source, target, to=to, step=step, section=section or None, dtype=dtype,  # type: ignore[arg-type]
            rules=[Skip(pattern) for pattern in skip or ()], shard_bytes=shard_bytes, documents=documents,
            budget_bytes=budget_bytes, on_progress=terminal_progress("exporting"),
        )
    if as_json:
        print_json(asdict(report))
        return
    typer.echo(printable(
        f"{report.path}: {len(report.tensors)} tensors, {size_text(report.bytes)}, {len(report.files)} files, "
        f"{report.seconds:.1f} s{f'; went on after {size_text(report.resumed_bytes)}' if report.resumed_bytes else ''}"
    ))
    for title, names in (("tied", [name for name, _ in report.tied]), ("left out", report.skipped)):
        if names:
            typer.echo(printable(f"{title}: {', '.join(names[:20])}{', ...' * (len(names) > 20)}"))
