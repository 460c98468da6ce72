"""`flowstone show`: what a checkpoint holds."""

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
    local_time,
    make_console,
    marked,
    print_json,
    size_text,
)
from flowstone.commit.entries import is_journal, parse
from flowstone.config import MIB
from flowstone.format.manifest import IoRecord
from flowstone.store.local import LocalStore

if TYPE_CHECKING:
    from rich.console import Console

    from flowstone.checkpoint import Checkpoint
    from flowstone.commit.journals import JournalMakeup

_SHOWN_TENSORS = 40  # rows that `show` prints unless asked for all
_INT_SHOWN = 10**300  # larger ones are no numbers for JSON readers, nor for Python from 4,300 digits on
_TEXT_MAX = 60  # characters of a plain value in a table


def show(
    path: StorePath,
    step: Step = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every tensor, not only the first.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds: tensors, objects, files."""
    from rich.table import Table

    from flowstone.checkpoint import open_checkpoint

    with errors_reported(as_json):
        checkpoint = open_checkpoint(path, step)
        tensors, objects = checkpoint.tensors, checkpoint.objects
        per_rank = checkpoint.contents.per_rank
        following = _journals(checkpoint)
    if as_json:
        print_json(_shown(checkpoint) | {"journals": [msgspec.to_builtins(one) for one in following]})
        return
    console, manifest = make_console(), checkpoint.manifest
    console.print(f"[bold]step {manifest.step}[/] in {marked(checkpoint.path)}")
    console.print(
        f"saved {marked(local_time(manifest.created))} by {marked(manifest.writer)} from {manifest.ranks} rank(s); "
        f"{manifest.tensors:,} tensors, {size_text(manifest.data_bytes)} in {len(manifest.segments)} segment(s)"
    )
    console.print(f"written by {_io(manifest.io)}", markup=False)
    if manifest.io.compress is not None:
        console.print(f"compress {marked(manifest.io.compress)}")
    for row in manifest.lossy or ():
        console.print(
            f"lossy: what is {marked(row.codec)} is off by at most {row.relative:.2g} of an element, or "
            f"{row.of_block:.2g} of the largest of its block"
        )
    for one in following:
        frames = f"{one.frames:,} frame(s) of {one.ranks} rank(s), {size_text(one.bytes)}"
        frames += f", each durable {one.lag_steps} steps later at most" if one.lag_steps > 1 else ""
        steps = f"replays steps {one.first} to {one.last}" if one.first is not None else "replays no step yet"
        console.print(f"{marked(one.name)} {steps}: {frames}")
    _print_makeup(console, checkpoint)
    table = Table("tensor", "dtype", "shape", "size", "pieces")
    names = list(tensors)
    for name in names if everything else names[:_SHOWN_TENSORS]:
        entry = tensors[name]
        place = str(entry.pieces) if entry.alias_of is None else f"is {marked(entry.alias_of)}"
        shape = "x".join(map(str, entry.shape)) or "scalar"
        table.add_row(marked(name), entry.dtype, shape, size_text(entry.bytes), place)
    console.print(table)
    if len(names) > _SHOWN_TENSORS and not everything:
        console.print(f"... and {len(names) - _SHOWN_TENSORS:,} more tensors (--all shows them)")
    table = Table("object", "value")
    for section, value in objects.items():
        table.add_row(marked(section), marked(_summary(value)))
    for section, values in per_rank.items():
        table.add_row(marked(section), f"one for each of {len(values)} rank(s)")
    console.print(table)


def _journals(checkpoint: Checkpoint) -> tuple[JournalMakeup, ...]:
    """The journals that lead on from a checkpoint of a store; none where it stands alone."""
    directory = Path(checkpoint.path)
    if not checkpoint.path.startswith("/") or parse(directory.name) is None or not directory.parent.is_dir():
        return ()
    store = LocalStore(directory.parent)
    if not any(map(is_journal, store.names())):
        return ()
    from flowstone.commit import journals  # imported here: most stores have none

    return journals.following(store, checkpoint.manifest)


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
            msgspec.structs.asdict(one) | {
                "ratio": round(one.ratio, 3), "ratios": {codec: round(ratio, 3) for codec, ratio in one.ratios.items()},
            } for one in checkpoint.sections
        ],
        "objects": {section: _plain(value) for section, value in checkpoint.objects.items()},
        "per_rank": {section: [_plain(v) for v in vs] for section, vs in checkpoint.contents.per_rank.items()},
        "io": {"direct": manifest.io.alignment > 1} | msgspec.structs.asdict(manifest.io),
        "lossy": [msgspec.structs.asdict(row) for row in manifest.lossy or ()],
    }


def _print_makeup(console: Console, checkpoint: Checkpoint) -> None:
    """A line for each section: written by its own save, in files of earlier ones, and how coded, as a ratio of all and
    by codec.
    """
    from rich.table import Table

    table = Table("section", "tensors", "size", "written", "referred to", "derived", "coded")
    for one in checkpoint.sections:
        codecs = ", ".join(f"{codec} {ratio:.2f} x" for codec, ratio in one.ratios.items())
        homes = f" in {len(one.referred)} earlier save(s)" if one.referred else ""
        near = f", with {size_text(sum(one.decoded_with.values()))} of bases" if one.decoded_with else ""
        table.add_row(
            marked(one.section), f"{one.tensors:,}", size_text(one.bytes), size_text(one.written),
            f"{size_text(sum(one.referred.values()))}{homes}",
            size_text(one.derived) if one.derived else "",
            f"{one.ratio:.2f} x: {codecs}{near}" if one.codecs.keys() - {"raw"} else "",
        )
    console.print(table)


def _plain(value: object) -> object:
    """A value in a form that JSON can show; other values as text."""
    from flowstone.format.objects import Provided

    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Provided):
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
    """The repr of a value; references and constants by their names."""
    from flowstone.format.bounds import brief
    from flowstone.format.objects import Named, Provided, TensorRef

    if isinstance(value, TensorRef):
        return f"{value.kind} {value.name}"
    if isinstance(value, Provided):
        return f"{value.kind}: {', '.join([*value.parts, *value.objects])}"
    if isinstance(value, Named):
        return f"{value.kind} {value.text}"
    try:
        return repr(value)
    except ValueError:
        return brief(value)  # Python refuses to show an int of 4,300 digits


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
    """How a checkpoint was written, as text; leaves out what the writer did not record."""
    words = [io.backend, "direct" if io.alignment > 1 else "buffered"]
    words += [f"{io.queue_depth} requests of up to {io.request_bytes / MIB:g} MiB in flight"]
    if io.workers is not None:
        words.append(f"{io.workers} worker(s)")
    if io.requests is not None:
        words.append(f"{io.requests:,} request(s) in all")
    if io.exact_bytes or io.sampled_bytes:
        exact, sampled = io.exact_bytes or 0, io.sampled_bytes or 0
        words.append(f"{exact / (exact + sampled):.0%} of what was captured late watched exactly")
        if io.huge_bytes:
            words[-1] += f" ({io.huge_bytes / (exact + sampled):.0%} in huge pages)"
        if sampled and io.sampled_because:
            words[-1] += f", the rest by samples ({io.sampled_because})"
    origin = {None: "", "default": "; default settings", "tuned": "; tuned settings", "explicit": "; explicit settings"}
    given = f", {', '.join(io.explicit)} as given" if io.explicit and io.origin != "explicit" else ""
    return ", ".join(words) + origin.get(io.origin, "") + given
