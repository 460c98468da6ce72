"""`flowstone verify`: every byte of a checkpoint is read and checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flowstone.arguments import store_at, to_store
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
from flowstone.commit.entries import is_journal
from flowstone.errors import printable
from flowstone.format.manifest import MANIFEST_NAME
from flowstone.runtime.progress import terminal_progress

if TYPE_CHECKING:
    from flowstone.commit.verify_journals import VerifiedJournals


def verify(path: StorePath, step: Step = None, ray: OnRay = False, as_json: AsJson = False) -> None:
    """Read every byte of a checkpoint and check it, padding included. Exit status 0: sound, 1: damaged, 2: an error.

    Of the newest one, without --step, the journals that lead on from it as well.
    """
    from flowstone.checkpoint import open_checkpoint

    with errors_reported(as_json):
        checkpoint = open_checkpoint(path, step)
        with chosen_cluster(ray) as cluster, terminal_progress(f"verifying step {checkpoint.step}") as show:
            verified = checkpoint.inspect(show, cluster=cluster)
        journals = _journals(path) if step is None else None
    found = (*verified.findings, *(() if journals is None else journals.findings))
    if as_json:
        findings = [{"file": finding.file, "what": finding.what} for finding in found]
        print_json({
            "path": checkpoint.path, "step": verified.step, "sound": not found, "findings": findings,
            "checked_bytes": verified.checked_bytes, "extra": list(verified.extra), "journal": _json(journals),
        })
    else:
        console = make_console()
        for finding in found:
            console.print(printable(f"{finding.file}: {finding.what}"), markup=False, style="red")
        for name in verified.extra:
            console.print(f"{printable(name)}: not part of the checkpoint (harmless)", markup=False)
        state = "every byte is as it was written" if verified.sound else f"damaged in {len(verified.findings)} place(s)"
        console.print(f"step {verified.step}: {size_text(verified.checked_bytes)} checked, {state}", markup=False)
        if journals is not None:
            damaged = f"damaged in {len(journals.findings)} place(s)"
            state = "every frame is as it was written" if journals.sound else damaged
            leads = f"a journal leads on to step {journals.newest}" if journals.newest > journals.base else "a journal"
            console.print(f"{leads}: {size_text(journals.checked_bytes)} checked, {state}", markup=False)
    if found:
        raise typer.Exit(DAMAGE)


def _journals(path: Path) -> VerifiedJournals | None:
    """Of a store that has some."""
    store = store_at(to_store(path))
    if store.exists(MANIFEST_NAME) or not any(map(is_journal, store.names())):
        return None
    from flowstone.commit.verify_journals import verify_journals  # imported here: most stores have none

    return verify_journals(store)


def _json(journals: VerifiedJournals | None) -> dict[str, int] | None:
    if journals is None:
        return None
    return {"base": journals.base, "newest": journals.newest, "checked_bytes": journals.checked_bytes}
