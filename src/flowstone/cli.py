"""The command line: one function per verb. Reading verbs import no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from flowstone._version import __version__
from flowstone.commit import catalog
from flowstone.config import MIB, Tuning
from flowstone.errors import FlowstoneError, FormatError, NotAStoreError
from flowstone.format.manifest import MANIFEST_NAME, IoRecord, step_directory
from flowstone.format.objects import Named, TensorRef
from flowstone.progress import terminal_progress
from flowstone.reader import Checkpoint, check_store, open_checkpoint
from flowstone.store.local import LocalStore

if TYPE_CHECKING:
    from flowstone.study.search import Gain
    from flowstone.study.tune import Found

app = typer.Typer(
    help="Checkpoints of large-model training: list, look into, verify.", no_args_is_help=True,
    pretty_exceptions_enable=False, add_completion=False,
)

_UNFINISHED = (catalog.SAVING, catalog.DELETING, catalog.SUPERSEDED, catalog.TUNING)
_SHOWN_TENSORS = 40  # rows that `show` prints unless asked for all
_TEXT_MAX = 60  # characters of a plain value in a table

OnTrial = Callable[[str, int, int], None]
StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="A store, or one checkpoint's own directory.")]
Step = Annotated[int | None, typer.Option("--step", help="Which step; the newest if left out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

bench_app = typer.Typer(help="Measure a file system.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """The entry point `flowstone`."""
    app(prog_name="flowstone")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"flowstone {__version__}")
        raise typer.Exit


@app.command()
def ls(path: StorePath, as_json: AsJson = False) -> None:
    """List the checkpoints of a store. Exit status 1 if one of them is damaged."""
    with _told(as_json):
        rows, leftovers = _listing(path)
    if as_json:
        _print_json({"path": str(path), "checkpoints": rows, "leftovers": leftovers})
    else:
        table = Table("step", "created", "size", "tensors", "ranks", "state")
        for row in rows:
            cells = [str(row["step"])]
            if row["error"] is None:
                cells += [_local(str(row["created"])), _size(row["bytes"]), f"{row['tensors']:,}", str(row["ranks"])]
                cells += ["ok"]
            else:
                cells += ["", "", "", "", f"[red]damaged[/]: {escape(str(row['error']).splitlines()[0])}"]
            table.add_row(*cells)
        _console().print(table)
        if leftovers:
            shown = ", ".join(leftovers)
            _console().print(f"{len(leftovers)} unfinished or set aside, never read: {shown}", markup=False)
    if any(row["error"] is not None for row in rows):
        raise typer.Exit(1)


@app.command()
def show(
    path: StorePath,
    step: Step = None,
    everything: Annotated[bool, typer.Option("--all", help="Every tensor, not only the first ones.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds: tensors, objects, files."""
    with _told(as_json):
        checkpoint = open_checkpoint(path, step)
        tensors, objects = checkpoint.tensors, checkpoint.objects
        per_rank = checkpoint.contents.per_rank
    if as_json:
        _print_json(_shown(checkpoint))
        return
    console, manifest = _console(), checkpoint.manifest
    console.print(f"[bold]step {manifest.step}[/] in {escape(checkpoint.path)}")
    console.print(
        f"saved {_local(manifest.created)} by {manifest.writer} from {manifest.ranks} rank(s); {manifest.tensors:,} "
        f"tensors, {_size(manifest.data_bytes)} in {len(manifest.segments)} segment(s)"
    )
    console.print(f"written by {_io(manifest.io)}")
    table = Table("tensor", "dtype", "shape", "size", "pieces")
    names = list(tensors)
    for name in names if everything else names[:_SHOWN_TENSORS]:
        entry = tensors[name]
        place = str(entry.pieces) if entry.alias_of is None else f"is {entry.alias_of}"
        table.add_row(escape(name), entry.dtype, "x".join(map(str, entry.shape)) or "scalar", _size(entry.bytes), place)
    console.print(table)
    if len(names) > _SHOWN_TENSORS and not everything:
        console.print(f"... and {len(names) - _SHOWN_TENSORS:,} more tensors (--all shows them)")
    table = Table("object", "value")
    for section, value in objects.items():
        table.add_row(escape(section), escape(_summary(value)))
    for section, values in per_rank.items():
        table.add_row(escape(section), f"one for each of {len(values)} rank(s)")
    console.print(table)


@app.command()
def verify(path: StorePath, step: Step = None, as_json: AsJson = False) -> None:
    """Read every byte of a checkpoint and check it, padding included. Exit status 1 on damage."""
    with _told(as_json):
        checkpoint = open_checkpoint(path, step)
        verified = checkpoint.inspect(terminal_progress(f"verifying step {checkpoint.step}"))
    if as_json:
        findings = [{"file": finding.file, "what": finding.what} for finding in verified.findings]
        _print_json({
            "path": checkpoint.path, "step": verified.step, "sound": verified.sound, "findings": findings,
            "checked_bytes": verified.checked_bytes, "extra": list(verified.extra),
        })
    else:
        console = _console()
        for finding in verified.findings:
            console.print(f"{finding.file}: {finding.what}", markup=False, style="red")
        for name in verified.extra:
            console.print(f"{name}: no part of the checkpoint (harmless)", markup=False)
        state = "every byte is as it was written" if verified.sound else f"damaged in {len(verified.findings)} place(s)"
        console.print(f"step {verified.step}: {_size(verified.checked_bytes)} checked, {state}", markup=False)
    if not verified.sound:
        raise typer.Exit(1)


@app.command()
def demo(
    directory: Annotated[Path | None, typer.Option(help="Where to work: absent or empty.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the training and the kills; a new one if left out.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the stores and logs behind.")] = False,
    small: Annotated[bool, typer.Option("--small", help="A tiny model and few kills, in seconds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a GPT, kill it again and again, resume, compare bit for bit. Exit status 0 if every claim held."""
    from flowstone.demo import acts, claims  # only this verb needs what it starts

    judged: list[claims.Claim] = []
    console = Console(highlight=False, stderr=as_json)  # standard output is the JSON's alone
    status = acts.run(directory=directory, seed=seed, keep=keep, small=small, console=console, judged=judged)
    if as_json:
        rows = [{"claim": claim.text, "held": claim.held, "found": claim.found} for claim in judged]
        _print_json({"held": status == 0, "claims": rows})
    raise typer.Exit(status)


@bench_app.command()
def tune(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A store, or any directory of the mount to be tuned.")],
    store: Annotated[bool, typer.Option("--store", help="Keep the result in the store PATH.")] = False,
    user: Annotated[bool, typer.Option("--user", help="Keep it in your own file for the whole mount.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="In less than a minute, instead of five.")] = False,
    total_bytes: Annotated[
        int | None, typer.Option("--bytes", min=2 * MIB, help="Of a trial; as many as the time allows.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and tell, keep nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find what moves a store's bytes fastest on its mount, and keep it where it beats the defaults."""
    from flowstone.study import tune as study  # only this verb needs what it measures with

    if store and user:
        raise typer.BadParameter("the result is kept by --store or by --user, not by both")
    where: Literal["store", "user"] | None = "store" if store else "user" if user else None
    with _told(as_json), _trials_shown() as on_progress:
        report = study.tune(
            path, where=where, total_bytes=total_bytes, quick=quick, dry_run=dry_run, on_progress=on_progress
        )
    if as_json:
        _print_json(msgspec.to_builtins(report))
        return
    console = _console()
    console.print(
        f"{escape(report.place)}: {_size(report.bytes)} a trial, {report.seconds:.0f} s, "
        f"{'direct I/O works' if report.direct else 'direct I/O is refused'}"
    )
    for found in (report.write, report.read):
        _console_found(console, found)
    if not report.cold:
        console.print("\nfiles could not be kept out of the page cache: reads were not, or not surely, cold")
    if report.stored is None:
        console.print("\na dry run: nothing was kept")
    else:
        console.print(f"\nkept in {report.stored}; remove it to have the defaults back", markup=False, soft_wrap=True)


def _console_found(console: Console, found: Found) -> None:
    console.print(f"\n[bold]{found.direction}[/]")
    console.print(f"  defaults  {_tuning(found.defaults)}")
    if found.best != found.defaults:
        console.print(f"  fastest   {_tuning(found.best)}")
    if found.gain is not None:
        console.print(f"  gain      {_ratio(found.gain)} times as fast as the defaults")
    for size in found.sizes:
        if size.gain.certain:
            console.print(f"  {_size(size.bytes):<9} {_ratio(size.gain)} times as fast buffered as direct")
    console.print(f"  kept      {found.verdict}")


def _ratio(gain: Gain) -> str:
    """A gain, and between what it lies with 95 % certainty."""
    return f"{gain.ratio:.2f} ({gain.low:.2f} to {gain.high:.2f})"


def _tuning(tuning: Tuning) -> str:
    """Settings in words."""
    start = tuning.direct_from_bytes
    cache = "buffered" if start is None else f"direct from {_size(start)} on" if start else "direct"
    place = ", in place" if tuning.in_place else ", through the arena"
    return (
        f"{tuning.request_bytes / MIB:.3g} MiB x {tuning.queue_depth}, {tuning.backend}, {tuning.workers} worker(s), "
        f"{cache}{place}"
    )


@contextmanager
def _trials_shown() -> Iterator[OnTrial | None]:
    """A bar on a terminal; nothing where standard error is none."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, planned: bar.update(task, description=what, completed=done, total=planned)


def _listing(path: Path) -> tuple[list[dict[str, object]], list[str]]:
    """A row for each checkpoint, newest last, and the names of what is none."""
    store = LocalStore(path)
    if store.exists(MANIFEST_NAME):
        return [_row(open_checkpoint(path))], []
    if not store.exists():
        raise NotAStoreError(f"there is nothing at {path}", next="check the path")
    check_store(store)
    rows = []
    for step in catalog.steps(store):
        try:
            rows.append(_row(open_checkpoint(path, step)))
        except FormatError as error:
            rows.append({"step": step, "directory": step_directory(step), "error": str(error)})
    leftovers = [n for n in store.names() if n.startswith(_UNFINISHED)]
    return rows, leftovers


def _row(checkpoint: Checkpoint) -> dict[str, object]:
    manifest = checkpoint.manifest
    size = sum(row.bytes for row in manifest.segments) + manifest.index.bytes + manifest.objects.bytes
    return {
        "step": manifest.step, "directory": checkpoint.path, "created": manifest.created, "bytes": size,
        "tensors": manifest.tensors, "pieces": manifest.pieces, "ranks": manifest.ranks, "error": None,
    }


def _shown(checkpoint: Checkpoint) -> dict[str, object]:
    manifest = checkpoint.manifest
    tensors = [
        {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "bytes": e.bytes, "pieces": e.pieces,
         "alias_of": e.alias_of} for e in checkpoint.tensors.values()
    ]
    files = [{"name": row.name, "bytes": row.bytes} for row in manifest.segments]
    files += [{"name": row.name, "bytes": row.bytes} for row in (manifest.index, manifest.objects)]
    return _row(checkpoint) | {
        "writer": manifest.writer, "id": manifest.id, "files": files, "tensors": tensors,
        "objects": {section: _plain(value) for section, value in checkpoint.objects.items()},
        "per_rank": {section: [_plain(v) for v in vs] for section, vs in checkpoint.contents.per_rank.items()},
        "io": {"direct": manifest.io.alignment > 1} | msgspec.structs.asdict(manifest.io),
    }


def _io(io: IoRecord) -> str:
    """How a checkpoint was written, in words; what its writer did not record is left out."""
    words = [io.backend, "direct" if io.alignment > 1 else "buffered"]
    words += [f"{io.queue_depth} requests of up to {io.request_bytes / MIB:g} MiB in flight"]
    if io.workers is not None:
        words.append(f"{io.workers} worker(s)")
    if io.requests is not None:
        words.append(f"{io.requests:,} requests in all")
    origin = {None: "", "default": "; default settings", "tuned": "; tuned settings", "explicit": "; explicit settings"}
    given = f", {', '.join(io.explicit)} as given" if io.explicit and io.origin != "explicit" else ""
    return ", ".join(words) + origin.get(io.origin, "") + given


def _plain(value: object) -> object:
    """A value as JSON can show it; what has no JSON form is shown as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and abs(value) != float("inf") and value == value:
        return value
    return _text(value)


def _text(value: object) -> str:
    """What Python shows; but what stands for a tensor or a constant, by its name."""
    if isinstance(value, TensorRef):
        return f"{value.kind} {value.name}"
    return f"{value.kind} {value.text}" if isinstance(value, Named) else repr(value)


def _summary(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{len(value)} entries: {', '.join(map(str, list(value)[:6]))}{' ...' if len(value) > 6 else ''}"
    if isinstance(value, list | tuple) and len(value) > 6:
        return f"{len(value)} values"
    text = _text(value)
    return text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + " ..."


def _size(count: object) -> str:
    size = float(count) if isinstance(count, int) else 0.0
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _local(created: str) -> str:
    return created.replace("T", " ").replace("+00:00", " UTC")


def _console() -> Console:
    # Piped output is for programs: not cut to a terminal's width.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def _told(as_json: bool) -> Iterator[None]:
    """End with status 1 and the error's own text, without a traceback."""
    try:
        yield
    except FlowstoneError as error:
        _fail(error, as_json)


def _fail(error: FlowstoneError, as_json: bool) -> NoReturn:
    if as_json:
        facts = {key: str(value) for key, value in error.facts.items()}
        _print_json({"error": type(error).__name__, "message": error.message, "facts": facts})
    else:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
    raise typer.Exit(1)
