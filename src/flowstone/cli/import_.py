"""`flowstone import`: converts a checkpoint of another program to one in a store."""

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
    chosen_cluster,
    errors_reported,
    print_conversion,
    print_json,
    size_text,
)
from flowstone.cli.rules import Inverse, RulesOption, conversion_rules
from flowstone.runtime.progress import terminal_progress


def import_(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="Safetensors, torch.save, DCP, Megatron, DeepSpeed, Orbax, ..."),
    ],
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A store; created if missing.")],
    step: Annotated[int, typer.Option("--step", help="Step of the new checkpoint; above all existing steps.")] = 0,
    section: Section = "model",
    skip: Skips = None,
    rules: RulesOption = None,
    inverse: Inverse = False,
    dtype: CastTo = None,
    budget_bytes: Budget = "512MiB",  # type: ignore[assignment]
    ray: OnRay = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint of another program into a store. If killed, run the same command again to continue."""
    from flowstone.convert.importing import import_checkpoint

    with errors_reported(as_json, writes=True):
        chosen = conversion_rules(rules, skip, inverse=inverse, configured=((source, None),))
        with chosen_cluster(ray) as cluster, terminal_progress("importing") as show:
            report = import_checkpoint(
                source, store, step=step, section=section, dtype=dtype, rules=chosen,
                budget_bytes=budget_bytes, on_progress=show, cluster=cluster,
            )
    if as_json:
        print_json(asdict(report))
        return
    print_conversion(
        f"{report.path}: {len(report.tensors)} tensors of {report.kind}, {size_text(report.bytes)}",
        report.seconds, report.resumed_bytes, left_out=report.skipped,
    )
