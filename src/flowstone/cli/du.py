"""`flowstone du`: how much space a store occupies, and how much is freed by removing steps."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from flowstone.cli.output import AsJson, StorePath, errors_reported, print_json, print_rows, size_text
from flowstone.commit.locations import check_store
from flowstone.errors import NotAStoreError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.store.local import LocalStore
from flowstone.stores.arguments import store_at, to_store


def du(
    path: StorePath,
    steps: Annotated[
        list[int] | None, typer.Option("--step", help="Also show the space that removing these would free; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the disk space of each step, and the space that its removal would free. Reads no tensor data."""
    from flowstone.cli.disk_usage import Disk

    with errors_reported(as_json):
        store = store_at(to_store(path))
        if not store.exists() or store.exists(MANIFEST_NAME):
            fault = "is one checkpoint, not a store" if store.exists() else "does not exist"
            raise NotAStoreError(f"{store.location} {fault}", next="give the directory that contains the checkpoints")
        check_store(store)
        disk = Disk(store, store.root if isinstance(store, LocalStore) else None)
        usage, freed = disk.usage(), disk.freed_bytes(steps) if steps else None
    if as_json:
        removing = None if freed is None else {"steps": sorted(set(steps or ())), "freed_bytes": freed}
        print_json({"path": store.location, **msgspec.to_builtins(usage), "removing": removing})
        return
    titles = ("step", "size", "freed if removed alone", "freed with all before it")
    print_rows(titles, [
        [str(row.step), size_text(row.bytes), size_text(row.alone_bytes), size_text(row.up_to_bytes)]
        for row in usage.steps
    ])
    if usage.journal_bytes:
        typer.echo(f"{size_text(usage.journal_bytes)} in journals, which the next full save frees")
    other = f", {size_text(usage.other_bytes)} of it outside steps" if usage.other_bytes else ""
    typer.echo(f"{size_text(usage.bytes)} in total, shared files counted once{other}")
    if freed is not None:
        typer.echo(f"removing {len(set(steps or ()))} step(s) frees {size_text(freed)}")
