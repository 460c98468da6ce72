"""`flowstone ls`: lists thousands of checkpoints in about the time that Python takes to start. So it imports neither
numpy nor rich.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from flowstone.cli.output import (
    DAMAGE,
    ERROR,
    AsJson,
    errors_reported,
    local_time,
    print_json,
    print_rows,
    run_status_text,
    size_text,
    status_of,
)
from flowstone.commit.entries import EntryKind, parse_entry
from flowstone.commit.locations import check_store, journals_of
from flowstone.commit.manifests import list_steps, read_manifest
from flowstone.errors import NotAStoreError, StorageError
from flowstone.format.manifest import MANIFEST_NAME, Manifest
from flowstone.stores.arguments import memory_of, store_at, to_store

if TYPE_CHECKING:
    from flowstone.store.memory.agent_wire import RunStatus

_UNFINISHED = (EntryKind.SAVING, EntryKind.DELETING, EntryKind.SUPERSEDED, EntryKind.MEASURING)


_Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="A store, or a checkpoint's directory; or all stores of a run.")
]


def ls(paths: _Paths, as_json: AsJson = False) -> None:
    """List the checkpoints of a store. For several stores of one run, nearest first: show which store has which step.

    Exit status 1 if a checkpoint is damaged, 2 if a checkpoint cannot be read for another reason.
    """
    if len(paths) > 1:
        from flowstone.cli.ls_tiers import ls_tiers  # imported here, as most listings are of one store

        ls_tiers(paths, as_json)
        return
    path = paths[0]
    with errors_reported(as_json):
        rows, leftovers = _listing(path)
        journal = journal_of(path)
        status = _memory_status(path)
    if as_json:
        memory = {} if status is None else {"memory": msgspec.to_builtins(status)}
        print_json({"path": str(path), "checkpoints": rows, "leftovers": leftovers, "journal": journal, **memory})
    else:
        print_rows(("step", "created", "size", "own", "tensors", "ranks", "state"), [_cells(row) for row in rows])
        if journal is not None:
            typer.echo(f"a journal continues from step {journal['base']} to step {journal['newest']}")
        if leftovers:
            typer.echo(f"{len(leftovers)} unfinished or set aside (never read): {', '.join(leftovers)}")
        if status is not None:
            typer.echo(run_status_text(status))
    failed = [row for row in rows if row["error"] is not None]
    if failed:
        raise typer.Exit(DAMAGE if any(row["damaged"] for row in failed) else ERROR)


def _memory_status(path: Path) -> RunStatus | None:
    """The status of the run in the memory agent. None if `path` is not a store in memory."""
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
    """The rows of the listing, one for each checkpoint, newest last; and the names of directories that are unfinished
    or were set aside.
    """
    store = store_at(to_store(path))
    if store.exists(MANIFEST_NAME):
        return [row_of(read_manifest(store, ""), store.location)], []
    if not store.exists():
        raise NotAStoreError(f"{store.location} does not exist", next="check the path")
    check_store(store)
    rows = []
    for step in list_steps(store):
        if step.error is not None:
            damaged = status_of(step.error) == DAMAGE
            rows.append({"step": step.step, "directory": step.directory, "error": str(step.error), "damaged": damaged})
        elif step.manifest is not None:
            rows.append(row_of(step.manifest, f"{store.location}/{step.directory}"))
    return rows, [
        name for name in store.names() if (entry := parse_entry(name)) is not None and entry.kind in _UNFINISHED
    ]


def journal_of(path: Path) -> dict[str, int] | None:
    """The step of the full checkpoint from which the journals begin, and the newest journaled step. None if there is no
    journal.
    """
    journals = journals_of(store_at(to_store(path)))
    if journals is None:
        return None
    try:
        chain = journals.newest_chain()
    except StorageError:
        return None  # the row of the checkpoint that cannot be read says why
    return None if chain is None else {"base": chain.base, "newest": chain.newest}


def row_of(manifest: Manifest, directory: str) -> dict[str, object]:
    """A checkpoint's row in a listing. `own_bytes`: how many of its bytes are in files that its own save wrote."""
    size = sum(row.bytes for row in manifest.segments) + manifest.index.bytes + manifest.objects.bytes
    own = size - sum(row.bytes for row in manifest.segments if row.home is not None)
    return {
        "step": manifest.step, "directory": directory, "created": manifest.created, "bytes": size,
        "own_bytes": own,
        "tensors": manifest.tensors, "pieces": manifest.pieces, "ranks": manifest.ranks, "error": None,
    }
