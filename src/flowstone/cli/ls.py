"""`flowstone ls`: lists thousands of checkpoints in about Python's start-up time. Imports neither numpy nor rich."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from flowstone.arguments import memory_of, store_at, to_store
from flowstone.cli.output import (
    DAMAGE,
    ERROR,
    AsJson,
    errors_reported,
    local_time,
    print_json,
    print_rows,
    size_text,
    status_of,
    told,
)
from flowstone.commit.entries import Kind, is_journal, parse
from flowstone.commit.locations import check_store
from flowstone.commit.manifests import listing, read_manifest
from flowstone.errors import NotAStoreError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, Manifest

if TYPE_CHECKING:
    from flowstone.store.agent_wire import RunStatus

_UNFINISHED = (Kind.SAVING, Kind.DELETING, Kind.SUPERSEDED, Kind.MEASURING)


_Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="A store, or one checkpoint's own directory; or a run's stores.")
]


def ls(paths: _Paths, as_json: AsJson = False) -> None:
    """List the checkpoints of a store. Of several stores of one run, nearest first: which step is where.

    Exit status 1 if one of them is damaged, 2 if one cannot be read for another reason.
    """
    if len(paths) > 1:
        from flowstone.cli.ls_tiers import ls_tiers  # imported here: most listings are of one store

        ls_tiers(paths, as_json)
        return
    path = paths[0]
    with errors_reported(as_json):
        rows, leftovers = _listing(path)
        journal = journal_of(path)
        held = _held(path)
    if as_json:
        memory = {} if held is None else {"memory": msgspec.to_builtins(held)}
        print_json({"path": str(path), "checkpoints": rows, "leftovers": leftovers, "journal": journal, **memory})
    else:
        print_rows(("step", "created", "size", "own", "tensors", "ranks", "state"), [_cells(row) for row in rows])
        if journal is not None:
            typer.echo(f"a journal leads from step {journal['base']} on to step {journal['newest']}")
        if leftovers:
            typer.echo(f"{len(leftovers)} unfinished or set aside (never read): {', '.join(leftovers)}")
        if held is not None:
            typer.echo(told(held))
    failed = [row for row in rows if row["error"] is not None]
    if failed:
        raise typer.Exit(DAMAGE if any(row["damaged"] for row in failed) else ERROR)


def _held(path: Path) -> RunStatus | None:
    """What the memory agent holds of it; None for what is in no memory."""
    store = memory_of(path)
    return None if store is None else store.status()


def _cells(row: dict[str, object]) -> list[str]:
    step, error = str(row["step"]), row["error"]
    if error is not None:
        state = "damaged" if row["damaged"] else "not readable"
        return [step, "", "", "", "", "", f"{state}: {str(error).splitlines()[0]}"]
    created, size, own = local_time(str(row["created"])), size_text(row["bytes"]), size_text(row["own_bytes"])
    return [step, created, size, own, f"{row['tensors']:,}", str(row["ranks"]), "ok"]


def _listing(path: Path) -> tuple[list[dict[str, object]], list[str]]:
    """A row for each checkpoint, newest last, and the names of directories that are no checkpoints."""
    store = store_at(to_store(path))
    if store.exists(MANIFEST_NAME):
        return [row_of(read_manifest(store, ""), store.location)], []
    if not store.exists():
        raise NotAStoreError(f"there is nothing at {store.location}", next="check the path")
    check_store(store)
    rows = []
    for one in listing(store):
        if one.error is not None:
            damaged = status_of(one.error) == DAMAGE
            rows.append({"step": one.step, "directory": one.directory, "error": str(one.error), "damaged": damaged})
        elif one.manifest is not None:
            rows.append(row_of(one.manifest, f"{store.location}/{one.directory}"))
    return rows, [name for name in store.names() if (entry := parse(name)) is not None and entry.kind in _UNFINISHED]


def journal_of(path: Path) -> dict[str, int] | None:
    """From which checkpoint a journal leads on, and to which step; None if none does."""
    store = store_at(to_store(path))
    if not any(map(is_journal, store.names())):
        return None
    from flowstone.commit import journals  # imported here: most stores have none

    try:
        chain = journals.newest_chain(store)
    except StorageError:
        return None  # safe: the row of the checkpoint that cannot be read says why
    return None if chain is None else {"base": chain.base, "newest": chain.newest}


def row_of(manifest: Manifest, directory: str) -> dict[str, object]:
    """A checkpoint's row in a listing. Its own bytes are those that it does not share with the ones that wrote them."""
    size = sum(row.bytes for row in manifest.segments) + manifest.index.bytes + manifest.objects.bytes
    own = size - sum(row.bytes for row in manifest.segments if row.home is not None)
    return {
        "step": manifest.step, "directory": directory, "created": manifest.created, "bytes": size,
        "own_bytes": own,
        "tensors": manifest.tensors, "pieces": manifest.pieces, "ranks": manifest.ranks, "error": None,
    }
