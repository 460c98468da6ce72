"""`flowstone flush`: copies a checkpoint from memory into a directory or a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import asdict

from flowstone.cli.output import DAMAGE, AsJson, errors_reported, print_json
from flowstone.errors import ArgumentError, NoCheckpointError, printable
from flowstone.stores.arguments import memory_of, store_at, to_store

_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run in this node's memory: memory://run.")]


def flush(
    run: _Run, directory: Annotated[Path, typer.Argument(help="A store on disk, or a store's URL.")],
    as_json: AsJson = False,
) -> None:
    """Copy the newest checkpoint of a run in memory to a directory or a bucket, bit for bit, and verify the copy.

    Steps that a rewind in memory has set aside are also set aside in the directory or bucket. Exit status 1 if the
    newest checkpoint is damaged in memory, and an older one was copied.
    """
    from flowstone.tiered.newest import copy_newest

    with errors_reported(as_json, writes=True):
        source = memory_of(run)
        if source is None:
            raise ArgumentError(
                f"{run:.60} is not a run in memory",
                next="give the run as memory://NAME; `flowstone agent --status` lists the runs",
            )
        target = store_at(to_store(directory))
        try:
            copied = copy_newest(source, target, f"flowstone flush {source.location}")
        finally:
            target.close()
            source.close()
        if copied is None:
            raise NoCheckpointError(
                f"{source.location} has no checkpoint",
                next="run `flowstone agent --status` to list the runs that have one",
            )
    if as_json:
        print_json({"path": target.location, **asdict(copied)})
    else:
        why = f"; {copied.skipped_reason}" if copied.skipped_reason else ""
        typer.echo(printable(f"{target.location} has step {copied.step}{why}"))
    if copied.skipped_reason:
        raise typer.Exit(DAMAGE)
