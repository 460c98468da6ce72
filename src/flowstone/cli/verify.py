"""`flowstone verify`: reads and checks every byte of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flowstone.cli.output import (
    DAMAGE,
    AsJson,
    OnRay,
    Step,
    StorePath,
    chosen_cluster,
    errors_reported,
    make_console,
    print_json,
    size_text,
)
from flowstone.commit.locations import journals_of
from flowstone.errors import printable
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.runtime.progress import terminal_progress
from flowstone.stores.arguments import store_at, to_store

if TYPE_CHECKING:
    from flowstone.journal.verify_journals import VerifiedJournals


def verify(path: StorePath, step: Step = None, ray: OnRay = False, as_json: AsJson = False) -> None:
    """Read and check every byte of a checkpoint, padding included. Exit status 0: undamaged, 1: damaged, 2: an error.

    Without --step it checks the newest checkpoint and the journals after it.
    """
    from flowstone.reading.checkpoint import open_checkpoint

    with errors_reported(as_json):
        checkpoint = open_checkpoint(path, step)
        with chosen_cluster(ray) as cluster, terminal_progress(f"verifying step {checkpoint.step}") as show:
            verified = checkpoint.inspect(show, cluster=cluster)
        journals = _journals(path) if step is None else None
    findings = (*verified.findings, *(() if journals is None else journals.findings))
    if as_json:
        rows = [{"file": finding.file, "what": finding.what} for finding in findings]
        print_json({
            "path": checkpoint.path, "step": verified.step, "sound": not findings, "findings": rows,
            "checked_bytes": verified.checked_bytes, "extra": list(verified.extra), "journal": _json(journals),
        })
    else:
        console = make_console()
        for finding in findings:
            console.print(printable(f"{finding.file}: {finding.what}"), markup=False, style="red")
        for name in verified.extra:
            console.print(f"{printable(name)}: not part of the checkpoint (harmless)", markup=False)
        state = "all bytes are intact" if verified.sound else f"damaged in {len(verified.findings)} place(s)"
        console.print(f"step {verified.step}: {size_text(verified.checked_bytes)} checked, {state}", markup=False)
        if journals is not None:
            damaged = f"damaged in {len(journals.findings)} place(s)"
            state = "all frames are intact" if journals.sound else damaged
            leads = f"a journal up to step {journals.newest}" if journals.newest > journals.base else "a journal"
            console.print(f"{leads}: {size_text(journals.checked_bytes)} checked, {state}", markup=False)
    if findings:
        raise typer.Exit(DAMAGE)


def _journals(path: Path) -> VerifiedJournals | None:
    """The result of verifying the journals of a store. None if there are none."""
    store = store_at(to_store(path))
    journals = None if store.exists(MANIFEST_NAME) else journals_of(store)
    return None if journals is None else journals.verify()


def _json(journals: VerifiedJournals | None) -> dict[str, int] | None:
    if journals is None:
        return None
    return {"base": journals.base, "newest": journals.newest, "checked_bytes": journals.checked_bytes}
