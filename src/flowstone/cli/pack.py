"""`flowstone pack`: copies a step that refers to files of earlier steps into a checkpoint that needs no other files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flowstone.cli.output import (
    AsJson,
    Budget,
    OnRay,
    Step,
    StorePath,
    chosen_cluster,
    errors_reported,
    print_conversion,
    print_json,
    size_text,
)
from flowstone.runtime.progress import terminal_progress


def pack(
    path: StorePath,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new directory.")],
    step: Step = None,
    budget_bytes: Budget = "512MiB",  # type: ignore[assignment]
    ray: OnRay = False,
    as_json: AsJson = False,
) -> None:
    """Copy a step into a checkpoint that needs no files of others, and verify it. If killed, run it again to resume."""
    from flowstone.convert.pack import pack as run

    with errors_reported(as_json, writes=True), chosen_cluster(ray) as cluster, terminal_progress("packing") as show:
        report = run(path, target, step=step, budget_bytes=budget_bytes, on_progress=show, cluster=cluster)
    if as_json:
        print_json(asdict(report))
        return
    line = f"{report.path}: step {report.step}, {report.tensors} tensors, {size_text(report.bytes)}"
    print_conversion(line, report.seconds, report.resumed_bytes)
