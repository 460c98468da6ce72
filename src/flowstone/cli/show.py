"""`flowstone show`: shows the content of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from flowstone.cli.ls import row_of
from flowstone.cli.output import (
    AsJson,
    Step,
    StorePath,
    errors_reported,
    escape_markup,
    local_time,
    make_console,
    print_json,
    size_text,
)
from flowstone.commit.entries import parse_entry
from flowstone.commit.locations import journals_of
from flowstone.config import MIB
from flowstone.format.manifest import IoRecord
from flowstone.store.local import LocalStore

if TYPE_CHECKING:
    from rich.console import Console

    from flowstone.journal.journals import JournalComposition
    from flowstone.reading.checkpoint import Checkpoint

_SHOWN_TENSORS = 40  # how many rows of tensors are printed without --all
_INT_SHOWN = 10**300  # JSON readers do not accept larger numbers, and Python prints none with more than 4,300 digits
_TEXT_MAX = 60  # how many characters of a plain value are shown in a table


def show(
    path: StorePath,
    step: Step = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all tensors, not only the first 40.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the content of a checkpoint: tensors, objects, files."""
    from rich.table import Table

    from flowstone.reading.checkpoint import open_checkpoint

    with errors_reported(as_json):
        checkpoint = open_checkpoint(path, step)
        tensors, objects = checkpoint.tensors, checkpoint.objects
        per_rank = checkpoint.contents.per_rank
        following = _journals(checkpoint)
    if as_json:
        print_json(_shown(checkpoint) | {"journals": [msgspec.to_builtins(journal) for journal in following]})
        return
    console, manifest = make_console(), checkpoint.manifest
    console.print(f"[bold]step {manifest.step}[/] in {escape_markup(checkpoint.path)}")
    console.print(
        f"saved {escape_markup(local_time(manifest.created))} by {escape_markup(manifest.writer)} "
        f"from {manifest.ranks} rank(s); "
        f"{manifest.tensors:,} tensors, {size_text(manifest.data_bytes)} in {len(manifest.segments)} segment(s)"
    )
    console.print(f"written by {_io(manifest.io)}", markup=False)
    if manifest.io.compress is not None:
        console.print(f"compress {escape_markup(manifest.io.compress)}")
    for row in manifest.lossy or ():
        console.print(
            f"lossy: {escape_markup(row.codec)} elements differ by at most {row.relative:.2g} of their value, or "
            f"{row.of_block:.2g} of the largest in their block"
        )
    for journal in following:
        frames = f"{journal.frames:,} frame(s) of {journal.ranks} rank(s), {size_text(journal.bytes)}"
        frames += f", each durable at most {journal.lag_steps} steps later" if journal.lag_steps > 1 else ""
        has_steps = journal.first is not None
        steps = f"replays steps {journal.first} to {journal.last}" if has_steps else "has no step yet"
        console.print(f"{escape_markup(journal.name)} {steps}: {frames}")
    _print_makeup(console, checkpoint)
    table = Table("tensor", "dtype", "shape", "size", "pieces")
    names = list(tensors)
    for name in names if everything else names[:_SHOWN_TENSORS]:
        entry = tensors[name]
        pieces = str(entry.pieces) if entry.alias_of is None else f"is {escape_markup(entry.alias_of)}"
        shape = "x".join(map(str, entry.shape)) or "scalar"
        table.add_row(escape_markup(name), entry.dtype, shape, size_text(entry.bytes), pieces)
    console.print(table)
    if len(names) > _SHOWN_TENSORS and not everything:
        console.print(f"... and {len(names) - _SHOWN_TENSORS:,} more tensors (--all shows them)")
    table = Table("object", "value")
    for section, value in objects.items():
        table.add_row(escape_markup(section), escape_markup(_summary(value)))
    for section, values in per_rank.items():
        table.add_row(escape_markup(section), f"one for each of {len(values)} rank(s)")
    console.print(table)


def _journals(checkpoint: Checkpoint) -> tuple[JournalComposition, ...]:
    """The journals that begin at a checkpoint; empty if the checkpoint is not in a store."""
    directory = Path(checkpoint.path)
    if not checkpoint.path.startswith("/") or parse_entry(directory.name) is None or not directory.parent.is_dir():
        return ()
    journals = journals_of(LocalStore(directory.parent))
    return () if journals is None else journals.composition_after(checkpoint.manifest)


def _shown(checkpoint: Checkpoint) -> dict[str, object]:
    manifest = checkpoint.manifest
    tensors = [
        {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "bytes": e.bytes, "pieces": e.pieces,
         "alias_of": e.alias_of} for e in checkpoint.tensors.values()
    ]
    files = [{"name": row.name, "bytes": row.bytes, "home": row.home} for row in manifest.segments]
    files += [{"name": row.name, "bytes": row.bytes} for row in (manifest.index, manifest.objects)]
    return row_of(checkpoint.manifest, checkpoint.path) | {
        "writer": manifest.writer, "id": manifest.id, "files": files, "tensors": tensors,
        "sections": [
            msgspec.structs.asdict(section) | {
                "ratio": round(section.ratio, 3),
                "ratios": {codec: round(ratio, 3) for codec, ratio in section.ratios.items()},
            } for section in checkpoint.sections
        ],
        "objects": {section: _plain(value) for section, value in checkpoint.objects.items()},
        "per_rank": {section: [_plain(v) for v in vs] for section, vs in checkpoint.contents.per_rank.items()},
        "io": {"direct": manifest.io.alignment > 1} | msgspec.structs.asdict(manifest.io),
        "lossy": [msgspec.structs.asdict(row) for row in manifest.lossy or ()],
    }


def _print_makeup(console: Console, checkpoint: Checkpoint) -> None:
    """Print a line for each section: how many bytes this save wrote, how many are in files of earlier saves, and the
    compression ratio, in total and for each codec.
    """
    from rich.table import Table

    table = Table("section", "tensors", "size", "written", "referred to", "derived", "coded")
    for row in checkpoint.sections:
        codecs = ", ".join(f"{codec} {ratio:.2f} x" for codec, ratio in row.ratios.items())
        homes = f" in {len(row.referred)} earlier save(s)" if row.referred else ""
        near = f", with {size_text(sum(row.decoded_with.values()))} of bases" if row.decoded_with else ""
        table.add_row(
            escape_markup(row.section), f"{row.tensors:,}", size_text(row.bytes), size_text(row.written),
            f"{size_text(sum(row.referred.values()))}{homes}",
            size_text(row.derived) if row.derived else "",
            f"{row.ratio:.2f} x: {codecs}{near}" if row.codecs.keys() - {"raw"} else "",
        )
    console.print(table)


def _plain(value: object) -> object:
    """The value, if JSON can represent it; otherwise a text."""
    from flowstone.format.objects import ProviderRecord

    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, ProviderRecord):
        parts = {name: part.name for name, part in value.parts.items()}
        return {"provided": value.kind, "parts": parts, "objects": _plain(value.objects)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and abs(value) < _INT_SHOWN):
        return value
    if isinstance(value, float) and abs(value) != float("inf") and value == value:
        return value
    return _text(value)


def _text(value: object) -> str:
    """The repr of a value. References and constants are shown by their names."""
    from flowstone.format.bounds import short_repr
    from flowstone.format.objects import NamedConstant, ProviderRecord, TensorRef

    if isinstance(value, TensorRef):
        return f"{value.kind} {value.name}"
    if isinstance(value, ProviderRecord):
        return f"{value.kind}: {', '.join([*value.parts, *value.objects])}"
    if isinstance(value, NamedConstant):
        return f"{value.kind} {value.text}"
    try:
        return repr(value)
    except ValueError:
        return short_repr(value)  # Python refuses to print an int of more than 4,300 digits


def _summary(value: object) -> str:
    if isinstance(value, Mapping):
        keys = [key if isinstance(key, str) else _text(key) for key in list(value)[:6]]
        count = {0: "no entry", 1: "1 entry: "}.get(len(value), f"{len(value)} entries: ")
        return f"{count}{', '.join(keys)}{' ...' if len(value) > 6 else ''}"
    if isinstance(value, list | tuple) and len(value) > 6:
        return f"{len(value)} values"
    text = _text(value)
    return text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + " ..."


def _io(io: IoRecord) -> str:
    """The I/O settings with which a checkpoint was written, as text. Facts that the writer did not record are left out.
    """
    words = [io.backend, "direct" if io.alignment > 1 else "buffered"]
    words += [f"{io.queue_depth} requests of up to {io.request_bytes / MIB:g} MiB in flight"]
    if io.workers is not None:
        words.append(f"{io.workers} worker(s)")
    if io.requests is not None:
        words.append(f"{io.requests:,} request(s) in all")
    if io.exact_bytes or io.sampled_bytes:
        exact, sampled = io.exact_bytes or 0, io.sampled_bytes or 0
        words.append(f"{exact / (exact + sampled):.0%} of the lazy capture watched exactly")
        if io.huge_bytes:
            words[-1] += f" ({io.huge_bytes / (exact + sampled):.0%} in huge pages)"
        if sampled and io.sampled_because:
            words[-1] += f", the rest by samples ({io.sampled_because})"
    origin = {None: "", "default": "; default settings", "tuned": "; tuned settings", "explicit": "; explicit settings"}
    given = f", {', '.join(io.explicit)} as given" if io.explicit and io.origin != "explicit" else ""
    return ", ".join(words) + origin.get(io.origin, "") + given
