"""`flowstone bench tune`: finds the fastest I/O settings for a store, and stores them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from flowstone.cli.output import errors_reported, make_console, print_json, size_text
from flowstone.config import MIB, Tuning
from flowstone.runtime.progress import terminal_steps
from flowstone.stores.arguments import refuse_object_url

if TYPE_CHECKING:
    from rich.console import Console

    from flowstone_study.search import Gain
    from flowstone_study.tune import Found


def tune(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A store, or any directory of the mount to tune.")],
    store: Annotated[bool, typer.Option("--store", help="Keep the result in the store PATH.")] = False,
    user: Annotated[bool, typer.Option("--user", help="Keep it in a file of your user, for the mount.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Take less than a minute instead of five.")] = False,
    total_bytes: Annotated[
        int | None, typer.Option("--bytes", min=2 * MIB, help="Bytes per trial; default: as many as the time allows.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and report; keep nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Tune I/O for the disk of a store, and keep those settings that are measurably faster than the defaults."""
    from flowstone_study import tune as study  # imported here: only this command needs it

    if store and user:
        raise typer.BadParameter("give --store or --user, not both")
    where: Literal["store", "user"] | None = "store" if store else "user" if user else None
    with errors_reported(as_json, writes=True):
        refuse_object_url(path)
    with errors_reported(as_json, writes=True), terminal_steps() as show:
        report = study.tune(path, where=where, total_bytes=total_bytes, quick=quick, dry_run=dry_run, on_progress=show)
    if as_json:
        print_json(msgspec.to_builtins(report))
        return
    from rich.markup import escape

    console = make_console()
    console.print(
        f"{escape(report.place)}: {size_text(report.bytes)} a trial, {report.seconds:.0f} s, "
        f"{'direct I/O works' if report.direct else 'direct I/O is refused'}"
    )
    for outcome in (report.write, report.read):
        _print_direction(console, outcome)
    if not report.cold:
        console.print("\nsome files could not be dropped from the page cache: their reads may have been cached")
    if report.stored is None:
        console.print("\na dry run: nothing was kept")
    else:
        console.print(f"\nkept in {report.stored}; remove it to return to the defaults", markup=False, soft_wrap=True)


def _print_direction(console: Console, outcome: Found) -> None:
    console.print(f"\n[bold]{outcome.direction}[/]")
    console.print(f"  defaults  {_tuning(outcome.defaults)}")
    if outcome.best != outcome.defaults:
        console.print(f"  fastest   {_tuning(outcome.best)}")
    if outcome.gain is not None:
        console.print(f"  gain      {_ratio(outcome.gain)} times as fast as the defaults")
    for size in outcome.sizes:
        if size.gain.certain:
            console.print(f"  {size_text(size.bytes):<9} {_ratio(size.gain)} times as fast buffered as direct")
    console.print(f"  kept      {outcome.verdict}")


def _ratio(gain: Gain) -> str:
    """How many times as fast as the defaults the settings are, with the 95 % confidence interval, as text."""
    return f"{gain.ratio:.2f} ({gain.low:.2f} to {gain.high:.2f})"


def _tuning(tuning: Tuning) -> str:
    """Settings, as text."""
    start = tuning.direct_from_bytes
    cache = "buffered" if start is None else f"direct for at least {size_text(start)}" if start else "direct"
    target = ", in place" if tuning.in_place else ", through the arena"
    return (
        f"{tuning.request_bytes / MIB:.3g} MiB x {tuning.queue_depth}, {tuning.backend}, {tuning.workers} worker(s), "
        f"{cache}{target}"
    )
