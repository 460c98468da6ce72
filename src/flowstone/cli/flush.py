"""`flowstone flush`: a checkpoint in memory becomes durable in a directory, or in a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import asdict

from flowstone.arguments import memory_of, store_at, to_store
from flowstone.cli.output import DAMAGE, AsJson, errors_reported, print_json
from flowstone.errors import ArgumentError, NoCheckpointError, printable

_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run in this node's memory: memory://run.")]


def flush(
    run: _Run, directory: Annotated[Path, typer.Argument(help="A store on a disk, or its URL.")],
    as_json: AsJson = False,
) -> None:
    """Copy the newest checkpoint of a run in memory to a directory or a bucket, bit for bit, and verify it there.

    Steps that a rewind in memory has set aside are set aside there, too. The exit status is 1 if the newest checkpoint
    is damaged in memory, and an older one was copied.
    """
    from flowstone.tiers.newest import copy_newest

    with errors_reported(as_json, writes=True):
        source = memory_of(run)
        if source is None:
            raise ArgumentError(f"{run:.60} is no run in memory", next="write memory://run")
        target = store_at(to_store(directory))
        try:
            copied = copy_newest(source, target, f"flowstone flush {source.location}")
        finally:
            target.close()
            source.close()
        if copied is None:
            raise NoCheckpointError(f"{source.location} holds none", next="run `flowstone agent --status`")
    if as_json:
        print_json({"path": target.location, **asdict(copied)})
    else:
        why = f"; {copied.skipped_reason}" if copied.skipped_reason else ""
        typer.echo(printable(f"{target.location} has step {copied.step}{why}"))
    if copied.skipped_reason:
        raise typer.Exit(DAMAGE)
