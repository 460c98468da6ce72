"""Explain a load before it happens: sources, differences, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowstone.arguments import to_load
from flowstone.checkpoint import Checkpoint
from flowstone.config import READ_ARENA_BYTES
from flowstone.errors import ArgumentError, MismatchError
from flowstone.layout_rules import LoadRule
from flowstone.pipeline.compare import Wanted, compare, want
from flowstone.plan.match import Match, section_of
from flowstone.plan.read import ReadPlan, plan_reads
from flowstone.ranks import rank_and_size
from flowstone.table.pieces import Pieces

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
_LISTED_MAX = 10  # names that the text lists


@dataclass(frozen=True, slots=True)
class Source:
    """A segment to be read. `bytes`: length of the needed chunks; `of_bytes`: length of the file."""

    segment: str
    bytes: int
    of_bytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What loading a checkpoint into a state would do, on this rank.

    sources      the files to be read
    bytes        length of the state's tensors that are filled
    read_bytes   length of the chunks that are read for that
    resharded    names of tensors that are assembled from several stored pieces, or from a part of one
    cast         converted from another dtype
    initialised  in the state, not in the checkpoint, left as they are
    missing      in the state, not in the checkpoint, and no rule allows it
    unwanted     in the checkpoint's requested sections, not in this state
    differences  everything for which `load` would raise MismatchError; empty if it would not
    peak_bytes   upper bound of memory beyond the state: new tensors, values being converted, the read window
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
    """Predict what loading `checkpoint` into `state` would do, on this rank; other ranks are not asked.

    Reads the checkpoint's index and objects; of tensors, only those that share memory in the state. Changes nothing.

    rules   as for `load`
    raises  what `load` raises, except MismatchError for differences: the result lists those
    """
    if not isinstance(checkpoint, Checkpoint):
        raise ArgumentError(
            f"explain: {checkpoint!r:.60} is not an open checkpoint",
            next="write fs.explain(fs.open(path, step), state)"
        )
    state, _, rules = to_load(state, None, rules, {})
    rank, ranks = rank_and_size()
    found = want(checkpoint, state, rules=rules, rank=rank, ranks=ranks)
    names, pieces, dtypes = found.names, found.restoration.pieces, found.table.tensors.dtypes
    matched, differences = _compared(found, ranks)
    rows = [names.get(name) for name in pieces.names]
    shapes = found.table.tensors.shapes
    fitting = [at for at, row in enumerate(rows) if row is not None and shapes[row] == tuple(pieces.shapes[at])]
    wanted = pieces.take(fitting)
    stored = [row for row in (rows[at] for at in fitting) if row is not None]
    plan, filled = _plan(found, fitting, wanted, stored)
    cast = [at for at, row in enumerate(stored) if dtypes[row] != wanted.dtypes[at]]
    converted = sum(wanted[at].box.elements * dtypes[stored[at]].item_bytes for at in cast)
    initialised = () if matched is None else matched.initialised
    used = {*pieces.names, *(alias.name for alias in found.restoration.aliases)}
    asked = found.restoration.sections
    sections = {*asked, *checkpoint.objects}
    return Explanation(
        step=checkpoint.step, path=checkpoint.path, sources=_sources(checkpoint, plan),
        bytes=sum(piece.bytes for piece in wanted), read_bytes=plan.bytes,
        resharded=tuple(dict.fromkeys(filled.names[int(plan.target[row])] for row in plan.common)),
        cast=tuple(wanted.names[at] for at in cast), initialised=initialised,
        missing=tuple(
            name for name, row in zip(pieces.names, rows, strict=True) if row is None and name not in initialised
        ),
        unwanted=tuple(
            name for name in names if name not in used and "@" not in name and section_of(name, sections) in asked
        ),
        differences=differences, peak_bytes=found.restoration.new_bytes + converted + READ_ARENA_BYTES,
    )


def _plan(
    found: Wanted, positions: Sequence[int], wanted: Pieces, rows: Sequence[int]
) -> tuple[ReadPlan, Pieces]:
    """The reads that fill the wanted pieces, those at `positions`; and the pieces that they fill."""
    index = found.checkpoint.index
    if found.arrangement is None:
        return plan_reads(index, wanted, rows), wanted
    lowered = found.arrangement.lower(wanted, found.restoration.places.take(positions), rows)
    return plan_reads(index, lowered.wanted, lowered.rows), lowered.wanted


def _compared(found: Wanted, ranks: int) -> tuple[Match | None, tuple[str, ...]]:
    """Compare as `load` does. In a job of several ranks, what this rank does not need may be needed by another."""
    alone = ranks == 1
    try:
        return compare(found, () if alone else found.names, None if alone else ()), ()
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
