"""`flowstone verify`: every byte of a checkpoint is read and checked."""

from __future__ import annotations

import typer

from flowstone.cli.output import (
    AsJson,
    OnRay,
    Step,
    StorePath,
    chosen_cluster,
    errors_reported,
    make_console,
    print_json,
    printable,
    size_text,
)
from flowstone.runtime.progress import terminal_progress


def verify(path: StorePath, step: Step = None, ray: OnRay = False, as_json: AsJson = False) -> None:
    """Read every byte of a checkpoint and check it, padding included. Exit status 1 on damage."""
    from flowstone.checkpoint import open_checkpoint

    with errors_reported(as_json):
        checkpoint = open_checkpoint(path, step)
        progress = terminal_progress(f"verifying step {checkpoint.step}")
        with chosen_cluster(ray) as cluster:
            verified = checkpoint.inspect(progress, cluster=cluster)
    if as_json:
        findings = [{"file": finding.file, "what": finding.what} for finding in verified.findings]
        print_json({
            "path": checkpoint.path, "step": verified.step, "sound": verified.sound, "findings": findings,
            "checked_bytes": verified.checked_bytes, "extra": list(verified.extra),
        })
    else:
        console = make_console()
        for finding in verified.findings:
            console.print(printable(f"{finding.file}: {finding.what}"), markup=False, style="red")
        for name in verified.extra:
            console.print(f"{printable(name)}: not part of the checkpoint (harmless)", markup=False)
        state = "every byte is as it was written" if verified.sound else f"damaged in {len(verified.findings)} place(s)"
        console.print(f"step {verified.step}: {size_text(verified.checked_bytes)} checked, {state}", markup=False)
    if not verified.sound:
        raise typer.Exit(1)
