"""Explain a load before it happens: which files it reads, how state and checkpoint differ, how much memory it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowstone.config import READ_ARENA_BYTES
from flowstone.errors import ArgumentError, MismatchError
from flowstone.plan.match import Match, section_of
from flowstone.plan.read import ReadPlan, plan_reads
from flowstone.ranks import rank_and_size
from flowstone.reading.checkpoint import Checkpoint
from flowstone.reading.compare import LoadRequest, compare, request_load
from flowstone.stores.arguments import to_load
from flowstone.table.pieces import Pieces

if TYPE_CHECKING:
    from flowstone.layouts.layout_rules import LoadRule

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
_LISTED_MAX = 10  # the text lists at most this many names, or differences


@dataclass(frozen=True, slots=True)
class Source:
    """A segment file of which a load reads chunks. `bytes`: length of these chunks; `of_bytes`: length of the file."""

    segment: str
    bytes: int
    of_bytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The predicted effect of loading a checkpoint into a state, on this rank.

    sources      the files to be read
    bytes        length of the state's tensors that are filled
    read_bytes   length of the chunks that are read for that
    resharded    names of tensors that are assembled from several stored pieces, or from a part of one
    cast         names of tensors that are converted from another dtype
    initialised  names of tensors in the state that the checkpoint lacks, and that a rule leaves as they are
    missing      names of tensors in the state that the checkpoint lacks, although no rule allows that
    unwanted     names of tensors in the checkpoint that the state lacks, although the state has their section
    differences  every difference for which `load` would raise MismatchError; empty if it would not raise
    peak_bytes   upper bound of the memory that the load needs in addition to the state: for new tensors, for values
                 that are converted, and for the bytes being read
    """

    step: int
    path: str
    sources: tuple[Source, ...]
    bytes: int
    read_bytes: int
    resharded: tuple[str, ...]
    cast: tuple[str, ...]
    initialised: tuple[str, ...]
    missing: tuple[str, ...]
    unwanted: tuple[str, ...]
    differences: tuple[str, ...]
    peak_bytes: int

    def __str__(self) -> str:
        lines = [f"step {self.step} of {self.path}", f"  fills      {_size(self.bytes)}"]
        lines.append(f"  reads      {_size(self.read_bytes)} from {len(self.sources)} of its segments")
        lines += [f"             {s.segment}: {_size(s.bytes)} of {_size(s.of_bytes)}" for s in self.sources]
        lines.append(f"  memory     {_size(self.peak_bytes)} beyond the state, at most")
        for title, names in (
            ("resharded", self.resharded), ("cast", self.cast), ("as they are", self.initialised),
            ("missing", self.missing), ("unwanted", self.unwanted),
        ):
            if names:
                shown = ", ".join(names[:_LISTED_MAX]) + (", ..." if len(names) > _LISTED_MAX else "")
                lines.append(f"  {title:<10} {len(names)}: {shown}")
        lines += [f"  refused    {difference}" for difference in self.differences[:_LISTED_MAX]]
        if len(self.differences) > _LISTED_MAX:
            lines.append(f"             ... and {len(self.differences) - _LISTED_MAX} more")
        return "\n".join(lines)


def explain(
    checkpoint: Checkpoint, state: Mapping[str, object], *, rules: LoadRule | Sequence[LoadRule] = ()
) -> Explanation:
    """Predict the effect of loading `checkpoint` into `state` on this rank, without the other ranks.

    Reads the checkpoint's index and objects, and tensors that share memory in the state. Changes nothing.

    rules   the rules that would be passed to `load`
    raises  the errors of `load`, but no MismatchError for differences: the result lists them
    """
    if not isinstance(checkpoint, Checkpoint):
        raise ArgumentError(
            f"explain: {checkpoint!r:.60} is not an open checkpoint",
            next="write fs.explain(fs.open(path, step), state)"
        )
    state, _, rules = to_load(state, None, rules, {})
    rank, ranks = rank_and_size()
    compared = request_load(checkpoint, state, rules=rules, rank=rank, ranks=ranks)
    names, pieces, dtypes = compared.names, compared.restoration.pieces, compared.table.tensors.dtypes
    matched, differences = _compared(compared, ranks)
    rows = [names.get(name) for name in pieces.names]
    shapes = compared.table.tensors.shapes
    fitting = [
        piece for piece, row in enumerate(rows) if row is not None and shapes[row] == tuple(pieces.shapes[piece])
    ]
    selected = pieces.take(fitting)
    stored = [row for row in (rows[number] for number in fitting) if row is not None]
    plan, filled = _plan(compared, fitting, selected, stored)
    cast = [number for number, row in enumerate(stored) if dtypes[row] != selected.dtypes[number]]
    converted = sum(selected[number].box.elements * dtypes[stored[number]].item_bytes for number in cast)
    initialised = () if matched is None else matched.initialised
    used = {*pieces.names, *(alias.name for alias in compared.restoration.aliases)}
    asked = compared.restoration.sections
    sections = {*asked, *checkpoint.objects}
    return Explanation(
        step=checkpoint.step, path=checkpoint.path, sources=_sources(checkpoint, plan),
        bytes=sum(piece.bytes for piece in selected), read_bytes=plan.bytes,
        resharded=tuple(dict.fromkeys(filled.names[int(plan.target[row])] for row in plan.common)),
        cast=tuple(selected.names[number] for number in cast), initialised=initialised,
        missing=tuple(
            name for name, row in zip(pieces.names, rows, strict=True) if row is None and name not in initialised
        ),
        unwanted=tuple(
            name for name in names if name not in used and "@" not in name and section_of(name, sections) in asked
        ),
        differences=differences, peak_bytes=compared.restoration.new_bytes + converted + READ_ARENA_BYTES,
    )


def _plan(
    needed: LoadRequest, positions: Sequence[int], selected: Pieces, rows: Sequence[int]
) -> tuple[ReadPlan, Pieces]:
    """The reads that fill the requested pieces at `positions`, and these pieces."""
    index = needed.checkpoint.index
    if needed.arrangement is None:
        return plan_reads(index, selected, rows), selected
    lowered = needed.arrangement.stored_reads(selected, needed.restoration.places.take(positions), rows)
    return plan_reads(index, lowered.pieces, lowered.rows), lowered.pieces


def _compared(request: LoadRequest, ranks: int) -> tuple[Match | None, tuple[str, ...]]:
    """Compare as `load` does. Returns the matching pieces, or None, and the differences. In a job of several ranks, a
    tensor that this rank lacks is no difference, as other ranks may need it.
    """
    alone = ranks == 1
    try:
        return compare(request, () if alone else request.names, None if alone else ()), ()
    except MismatchError as error:
        return None, error.differences


def _sources(checkpoint: Checkpoint, plan: ReadPlan) -> tuple[Source, ...]:
    segments = checkpoint.manifest.segments
    read = checkpoint.index.chunks.bytes_by_segment(plan.piece, plan.first, plan.last, len(segments))
    return tuple(
        Source(row.name, int(n), row.bytes) for row, n in zip(segments, read.tolist(), strict=True) if n
    )


def _size(n: int) -> str:
    unit, name = next((unit, name) for unit, name in _UNITS if n >= unit or unit == 1)
    return f"{n / unit:.1f} {name}" if unit > 1 else f"{n} {name}"
