"""`flowstone du`: what a store takes of its disk, or bucket, and what removing steps would free."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from flowstone.arguments import store_at, to_store
from flowstone.cli.output import AsJson, StorePath, errors_reported, print_json, print_rows, size_text
from flowstone.commit.locations import check_store
from flowstone.errors import NotAStoreError
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.store.local import LocalStore


def du(
    path: StorePath,
    steps: Annotated[
        list[int] | None, typer.Option("--step", help="Also: what removing these together would free; repeat.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what each step takes of the disk, and what removing it would free. Reads no data."""
    from flowstone.commit.disk_usage import Disk

    with errors_reported(as_json):
        store = store_at(to_store(path))
        if not store.exists() or store.exists(MANIFEST_NAME):
            what = "one checkpoint at" if store.exists() else "nothing at"
            raise NotAStoreError(f"there is {what} {store.location}, no store", next="give the directory of its steps")
        check_store(store)
        disk = Disk(store, store.root if isinstance(store, LocalStore) else None)
        usage, freed = disk.usage(), disk.freed(steps) if steps else None
    if as_json:
        removing = None if freed is None else {"steps": sorted(set(steps or ())), "freed_bytes": freed}
        print_json({"path": store.location, **msgspec.to_builtins(usage), "removing": removing})
        return
    titles = ("step", "holds", "frees, removed alone", "frees, with all before it")
    print_rows(titles, [
        [str(one.step), size_text(one.bytes), size_text(one.alone_bytes), size_text(one.up_to_bytes)]
        for one in usage.steps
    ])
    if usage.journal_bytes:
        typer.echo(f"{size_text(usage.journal_bytes)} in journals, which the next whole save frees")
    other = f", {size_text(usage.other_bytes)} of it in no step" if usage.other_bytes else ""
    typer.echo(f"{size_text(usage.bytes)} in all, shared files counted once{other}")
    if freed is not None:
        typer.echo(f"removing {len(set(steps or ()))} step(s) frees {size_text(freed)}")
