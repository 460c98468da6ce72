"""`flowstone export`: writes a checkpoint for other programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flowstone.cli.output import (
    AsJson,
    Budget,
    CastTo,
    OnRay,
    Section,
    Skips,
    Step,
    chosen_cluster,
    errors_reported,
    parse_size,
    print_conversion,
    print_json,
    size_text,
)
from flowstone.cli.rules import Inverse, RulesOption, conversion_rules
from flowstone.runtime.progress import terminal_progress


def export(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="A store, or one checkpoint, of any known format.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new directory or file.")],
    to: Annotated[str, typer.Option("--to", help="hf, torch, dcp or universal.")] = "hf",
    step: Step = None,
    section: Section = "model",
    skip: Skips = None,
    rules: RulesOption = None,
    inverse: Inverse = False,
    dtype: CastTo = None,
    shard_bytes: Annotated[
        int, typer.Option("--shard-size", parser=parse_size, metavar="SIZE", help="Largest size of one file.")
    ] = "5GB",  # type: ignore[assignment]
    documents: Annotated[
        Path | None, typer.Option("--documents", metavar="DIR", help="Copy config.json and tokenizer from here.")
    ] = None,
    budget_bytes: Budget = "512MiB",  # type: ignore[assignment]
    ray: OnRay = False,
    as_json: AsJson = False,
) -> None:
    """Write a section of a checkpoint for other programs. If killed, run the same command again to continue."""
    from flowstone.convert.export import export as run

    with errors_reported(as_json, writes=True):
        chosen = conversion_rules(rules, skip, inverse=inverse, configured=((documents, None), (source, step)))
        with chosen_cluster(ray) as cluster, terminal_progress("exporting") as show:
            report = run(
                source, target, to=to, step=step, section=section, dtype=dtype,  # type: ignore[arg-type]
                rules=chosen, shard_bytes=shard_bytes, documents=documents,
                budget_bytes=budget_bytes, on_progress=show, cluster=cluster,
            )
    if as_json:
        print_json(asdict(report))
        return
    print_conversion(
        f"{report.path}: {len(report.tensors)} tensors, {size_text(report.bytes)}, {len(report.files)} file(s)",
        report.seconds, report.resumed_bytes, tied=[name for name, _ in report.aliases], left_out=report.skipped,
    )
