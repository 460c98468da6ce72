"""Rank 0's part of a save by N ranks: collect layouts and write reports, assign writers, publish."""

from __future__ import annotations

import secrets
import zlib
from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._version import __version__
from flowstone.commit import publish
from flowstone.commit.read import join_objects
from flowstone.config import DEVICE_REPLICAS_COMPARED_MAX, INDEX_ROWS_KEPT_MAX, PLANS_REMEMBERED
from flowstone.coordination.messages import (
    Assignment,
    DifferingObjects,
    PackedLayout,
    PlanTerms,
    Proposal,
    WriteReport,
    WriterShare,
    from_steps,
    numbers,
    parts_of,
    tensors_of,
)
from flowstone.errors import CollisionError, RankError, StorageError, UnsupportedStateError
from flowstone.format.codec import CAST, features_of
from flowstone.format.index import ChunkForms, ChunkPlaces, IndexTemplate
from flowstone.format.manifest import COPIES, DELTA, IoRecord, Manifest, SegmentRow
from flowstone.format.merge_points import MergeMap, merge
from flowstone.plan.assign_writers import WriterAssignment, assign_writers, check_replicas
from flowstone.plan.global_index import global_index
from flowstone.plan.replicas import ReplicaSets, differ
from flowstone.ranks import Decision
from flowstone.store.base import Store
from flowstone.table.chunks import CODEC_XOR, ChunkBases
from flowstone.table.pieces import Alias, Pieces, TensorColumns

if TYPE_CHECKING:
    from flowstone.codecs.unmatched_rules import UnmatchedRules


class _GlobalIndex(msgspec.Struct, frozen=True, eq=False):
    """The index of a plan, kept for the next save with the same plan. `segment`: for each piece, the number of the
    segment file into which it was written.
    """

    plan: str
    is_delta: bool
    is_coded: bool
    has_bases: bool
    segment: NDArray[np.uint32]
    frame: IndexTemplate
    piece_order: NDArray[np.int64]
    chunk_order: NDArray[np.int64]


def _critical(places: ChunkPlaces | None, *, copies: bool) -> tuple[str, ...]:
    """The names of the format's features that a reader must know to read chunks in these places. `places` None: the
    chunks of each piece follow each other in one file.
    """
    if places is None:
        return ()
    codecs = () if places.forms is None else features_of(places.forms.codec)
    return (DELTA, *((COPIES,) if copies else ()), *codecs)


def _numbered_from(count: int, forms: ChunkForms) -> ChunkForms:
    """The same descriptions of how chunks are stored, with `count` added to the segment numbers of their bases."""
    if forms.bases is None or not count:
        return forms
    near = forms.codec == CODEC_XOR
    segment = forms.bases.segment + np.where(near, count, 0).astype(np.uint32)
    return msgspec.structs.replace(forms, bases=msgspec.structs.replace(forms.bases, segment=segment))


def _all_bases(forms: Sequence[ChunkForms]) -> ChunkBases | None:
    """For the chunks of all ranks: the chunks from which they are stored as differences. None: there are no such
    chunks.
    """
    if all(form.bases is None for form in forms):
        return None
    columns_of_ranks = [(form.bases or ChunkBases.empty(len(form.codec))).columns() for form in forms]
    return ChunkBases.by_columns(np.concatenate(columns) for columns in zip(*columns_of_ranks, strict=True))


class RankZero:
    """What rank 0 remembers of all ranks: the pieces that each holds, their plans, and the last index."""

    def __init__(self, size: int, unmatched: UnmatchedRules | None = None, job: str = "") -> None:
        self._unmatched = unmatched
        self.job = job or secrets.token_hex(8)
        self._plan = ""
        self._layouts: list[Pieces | None] = [None] * size
        self._aliases: list[Sequence[tuple[str, str]]] = [()] * size
        self._is_far = [False] * size
        self._assignment: WriterAssignment | None = None
        # For each rank, the newest plans in which it writes the same pieces as now. It may have begun any of them.
        self._same: list[deque[str]] = [deque(maxlen=PLANS_REMEMBERED) for _ in range(size)]
        self._tensors: dict[bytes, TensorColumns] = {}
        self._columns: dict[bytes, NDArray[np.int64]] = {}  # encoded -> decoded array; several ranks send the same
        self._index: _GlobalIndex | None = None  # the index of the last save

    def assign(self, proposals: Sequence[Proposal]) -> Decision:
        _all_equal({rank: proposal.step for rank, proposal in enumerate(proposals)}, "save step {}")
        begun = {rank for rank, proposal in enumerate(proposals) if proposal.layout is None}
        wrong = [rank for rank in begun if proposals[rank].plan not in self._same[rank]]
        if wrong:
            raise RankError(
                f"rank {wrong[0]} began to save with an older plan than the other ranks",
                rank=wrong[0], phase="plan", next="save again: the next save makes a new plan",
            )
        assignment = self._assign_anew(proposals, begun) if len(begun) < len(proposals) else self._assignment
        assert assignment is not None, "no rank has begun with the first plan"
        parts = [WriterShare(None)] * len(proposals)
        if any(proposal.plan != self._plan for proposal in proposals):  # some ranks have begun with an older plan
            parts_of_all = parts_of(assignment)
            parts = [
                msgspec.structs.replace(part, positions=None) if rank in begun else part
                for rank, part in enumerate(parts_of_all)
            ]
        terms = PlanTerms(self._plan, self.job, assignment.buffers, self._compared_share(assignment))
        return Decision(msgspec.msgpack.encode(terms), list(map(msgspec.msgpack.encode, parts)))

    def _assign_anew(self, proposals: Sequence[Proposal], begun: Set[int]) -> WriterAssignment:
        """Make a new plan in which the ranks that have begun to write keep their pieces. If that is impossible, raises,
        and nothing changes.
        """
        layouts, hosts = list(self._layouts), dict.fromkeys(entry.host for entry in proposals)
        number = {host: position for position, host in enumerate(hosts)}
        for rank, entry in enumerate(proposals):
            if entry.layout is not None:
                layouts[rank] = self._unpacked(entry.layout)
        last = self._assignment if begun else None
        assignment = assign_writers(
            [entry for entry in layouts if entry is not None], [number[entry.host] for entry in proposals],
            {rank: last.writes[rank] for rank in begun} if last else {}, begun_split=last.split if last else None,
        )
        self._layouts, self._assignment, self._plan = layouts, assignment, secrets.token_hex(8)
        for rank, entry in enumerate(proposals):
            if entry.layout is not None:
                self._aliases[rank], self._is_far[rank] = entry.layout.aliases, entry.is_far
                self._same[rank].clear()
            self._same[rank].append(self._plan)
        return assignment

    def _compared_share(self, assignment: WriterAssignment) -> float | None:
        """Which share of the replicas each save samples, between 0 and 1; None: all. Samples of device memory take time
        while `save` blocks, so successive saves sample different replicas.
        """
        if not any(self._is_far):
            return None
        most = max((int((number >= 0).sum()) for number in assignment.replicas.number), default=0)
        return min(1.0, DEVICE_REPLICAS_COMPARED_MAX / most) if most else 1.0

    def replicas_differ(self, written: Sequence[WriteReport]) -> bool:
        """Whether ranks have found different bytes in replicas."""
        assert self._assignment is not None, "a plan was assigned before the commit"
        return differ(self._assignment.replicas.sets, [report.folds for report in written])

    def raise_differing_replicas(self, messages: Sequence[bytes]) -> NoReturn:
        """Raise CollisionError naming the replicas that differ, and their ranks. `messages`: each rank's digests."""
        layouts = [layout for layout in self._layouts if layout is not None]
        for kind in range(2):
            check_replicas(
                layouts,
                [numbers(msgspec.msgpack.decode(message, type=list[bytes])[kind], np.uint64) for message in messages],
            )
        raise AssertionError("ranks reported replicas that differ, but the digests of all replicas are equal")

    def assign_whole_layout(self, assignment: Assignment) -> None:
        """Use this rank's assignment as the full plan, in a group of one."""
        if assignment.plan == self._plan:
            return
        pieces = assignment.layout.pieces.compact()
        alone = np.full(len(assignment.positions), -1, np.int32)
        self._assignment = WriterAssignment(
            [pieces], (assignment.positions,), np.zeros(1, np.int64),
            replicas=ReplicaSets([alone], [np.zeros(0, np.int32)]),
        )
        self._layouts, self._plan = [pieces], assignment.plan
        self._aliases[0] = [(alias.name, alias.target) for alias in assignment.layout.aliases]

    def commit(
        self, written: Sequence[WriteReport], apart: Sequence[DifferingObjects], store: Store, draft: publish.Draft,
        store_id: str
    ) -> Manifest:
        """Publish the files of N ranks. `apart`: for each rank, its values of sections that differ between ranks."""
        _all_equal({rank: report.plan for rank, report in enumerate(written)}, "write by plan {}")
        _all_equal({rank: report.draft for rank, report in enumerate(written)}, "write into {}")
        if self._unmatched is not None and self._unmatched.any_left:
            layouts = [layout for layout in self._layouts if layout is not None]
            known_names = dict.fromkeys(name for layout in layouts for name in layout.tensors.names)
            self._unmatched.check(self._plan, list(known_names))
        segments: list[SegmentRow] = []
        columns = []
        for rank, report in enumerate(written):
            if rank > 0:  # rank 0's own files are there in any case
                check_visible(store, draft.directory, rank, report.segments)
            columns.append(report.segment + np.uint32(len(segments)))
            segments += [
                msgspec.structs.replace(row, id=len(segments) + number) for number, row in enumerate(report.segments)
            ]
        places = self._places(written)
        index = self._index_of(_joined(columns), places)
        offsets = _joined([report.offsets for report in written])
        digests = _joined([report.digests for report in written])
        if places is not None:
            places = places.reorder(index.chunk_order)
        per_rank: dict[str, list[bytes]] = {}
        for report in written:
            for section, text in report.per_rank.items():
                per_rank.setdefault(section, []).append(text)
        replicated = {**written[0].replicated, **_merged_sections(apart)}
        return publish.publish(store, draft, store_id, publish.Publication(
            segments, index.frame.fill(offsets[index.piece_order], digests[index.chunk_order], places),
            index.frame.totals, join_objects(replicated, per_rank), io_of([report.io for report in written]),
            writer=f"flowstone {__version__}", ranks=len(written),
            critical=_critical(places, copies=any(report.copies for report in written)),
        ))

    def _places(self, written: Sequence[WriteReport]) -> ChunkPlaces | None:
        """Where all chunks are stored, rank after rank. None if no rank refers to an earlier checkpoint or encodes
        chunks, so that all are where the plan has put their pieces.
        """
        if all(entry.places is None for entry in written):
            return None
        assert self._assignment is not None, "a plan was assigned before the commit"
        segments, offsets, forms, count, chunks = [], [], [], 0, 0
        is_coded = any(entry.places is not None and entry.places.forms is not None for entry in written)
        for rank, entry in enumerate(written):
            places = entry.places
            if places is None or is_coded:
                length = self._assignment.layouts[rank].lengths()[self._assignment.writes[rank]]
            if places is None:
                places = ChunkPlaces.of_raw(entry.segment, entry.offsets, length)
            if is_coded:
                forms.append(_numbered_from(count, places.forms or ChunkForms.of_raw(length, entry.digests)))
            segments.append(places.segment + np.uint32(count))
            offsets.append(_counted_on(places, chunks))
            chunks += len(places.offset)
            count += len(entry.segments)
        return ChunkPlaces(_joined(segments), _joined(offsets), ChunkForms(
            _joined([entry.length for entry in forms]), _joined([entry.codec for entry in forms]),
            _joined([entry.digest for entry in forms]), _all_bases(forms),
        ) if is_coded else None)

    def _index_of(self, segment: NDArray[np.uint32], places: ChunkPlaces | None) -> _GlobalIndex:
        """The index of the plan's pieces, kept for the next save with the same plan. `segment`: the segment file of
        each piece.
        """
        forms = None if places is None else places.forms
        last, is_delta, is_coded = self._index, places is not None, forms is not None
        has_bases = forms is not None and forms.bases is not None
        kind = self._plan, is_delta, is_coded, has_bases
        if last is not None and (last.plan, last.is_delta, last.is_coded, last.has_bases) == kind and (
            is_delta or np.array_equal(last.segment, segment)
        ):
            return last
        assert self._assignment is not None, "a plan was assigned before the commit"
        built = _GlobalIndex(*kind, segment, *global_index(
            self._assignment.layouts, self._assignment.writes, self._all_aliases(), segment, is_delta=is_delta,
            is_coded=is_coded, has_bases=has_bases,
        ))
        self._index = built if len(segment) <= INDEX_ROWS_KEPT_MAX else None
        return built

    def _unpacked(self, layout: PackedLayout) -> Pieces:
        tensors = self._tensors.get(layout.tensors)
        if tensors is None:
            tensors = self._tensors[layout.tensors] = tensors_of(layout.tensors)
        parts, kinds = (
            self._columns[packed] if packed in self._columns else self._columns.setdefault(packed, from_steps(packed))
            for packed in (layout.parts, layout.kinds)
        )
        return Pieces(tensors, parts, numbers(layout.boxes, np.int64), kinds)

    def _all_aliases(self) -> list[Alias]:
        """The aliases of all ranks, each once. Raises CollisionError if ranks tie different tensors."""
        targets: dict[str, str] = {}
        for aliases in self._aliases:
            for name, target in aliases:
                if targets.setdefault(name, target) != target:
                    raise CollisionError(
                        f"{name!r} shares the memory of {targets[name]!r} on one rank, and of {target!r} on another",
                        next="share memory between the same parameters on every rank",
                    )
        stored = {name for layouts in self._layouts if layouts is not None for name in layouts.names}
        return [Alias(name, target) for name, target in targets.items() if name not in stored]


def _counted_on(places: ChunkPlaces, chunks: int) -> NDArray[np.uint64]:
    """The offsets of a rank's chunks. The offset of a rounded chunk (codec `cast`) is the number of its source chunk
    among the rank's chunks; `chunks`, the number of chunks of lower ranks, is added to it.
    """
    if places.forms is None or not (casts := places.forms.codec == CAST.id).any():
        return places.offset
    return np.where(casts, places.offset + np.uint64(chunks), places.offset)


def differing_sections(written: Sequence[WriteReport]) -> list[str]:
    """The replicated sections that are not equal on all ranks. Raises if ranks save different sections."""
    for rank, report in enumerate(written):
        if report.sections.keys() != written[0].sections.keys() or report.per_rank.keys() != written[0].per_rank.keys():
            raise UnsupportedStateError(
                f"rank {rank} saves different sections than rank 0",
                expected=", ".join([*written[0].sections, *written[0].per_rank]),
                found=", ".join([*report.sections, *report.per_rank]),
                next="pass a state with the same sections on every rank",
            )
    return [name for name, of in written[0].sections.items() if any(report.sections[name] != of for report in written)]


def _merged_sections(apart: Sequence[DifferingObjects]) -> dict[str, bytes]:
    """A merged text for each section that differs between ranks. Raises UnsupportedStateError if that is impossible."""
    merged = {}
    for section in apart[0].texts if apart else ():
        first: dict[bytes, int] = {}  # text -> the lowest rank with this text
        for rank, sections in enumerate(apart):
            first.setdefault(sections.texts[section], rank)
        texts = {rank: zlib.decompress(text) for text, rank in first.items()}
        merged[section] = merge(
            section, texts, {rank: cast("MergeMap", apart[rank].merge_maps[section]) for rank in texts}
        )
    return merged


def check_one_attempt(written: Sequence[WriteReport]) -> None:
    """Check that all ranks have called `save` for this step equally often, as the number of calls determines the name
    of the directory into which they write.
    """
    for rank, report in enumerate(written):
        if report.tries != written[0].tries:
            raise RankError(
                f"rank {rank} is at attempt {report.tries} to save this step, but rank 0 is at attempt "
                f"{written[0].tries}", rank=rank, phase="commit", tries=max(other.tries for other in written),
                next="save again: all ranks then continue with the same attempt",
            )


_Number = TypeVar("_Number", bound=np.generic)


def _joined(columns: Sequence[NDArray[_Number]]) -> NDArray[_Number]:
    """The arrays of all ranks, concatenated. A group of one gets the same array back, without a copy."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def io_of(records: Sequence[IoRecord]) -> IoRecord:
    """One record of the I/O settings and amounts of all ranks together."""

    def total(counts: Sequence[int | None]) -> int | None:
        reported = [count for count in counts if count is not None]
        return sum(reported) if reported else None

    return msgspec.structs.replace(
        records[0], copied_bytes=sum(record.copied_bytes for record in records),
        requests=total([record.requests for record in records]),
        exact_bytes=total([record.exact_bytes for record in records]),
        sampled_bytes=total([record.sampled_bytes for record in records]),
        huge_bytes=total([record.huge_bytes for record in records]),
        sampled_because=next((record.sampled_because for record in records if record.sampled_because), None),
    )


def check_visible(store: Store, directory: str, rank: int, segments: Sequence[SegmentRow]) -> None:
    """Check that rank 0 sees the files that another rank has written."""
    for row in segments:
        path = f"{directory}/{row.name}"
        if not store.exists(path) or store.size(path) != row.bytes:
            raise StorageError(
                f"rank 0 cannot see the file that rank {rank} wrote", expected=f"{row.bytes} bytes in {path}",
                found=f"{store.size(path)} bytes" if store.exists(path) else "no such file",
                next="use one directory that every node sees, with changes visible at once",
            )


def _all_equal(values: Mapping[int, object], words: str) -> None:
    for rank, value in values.items():
        if value != values[0]:
            raise RankError(
                f"rank {rank} is about to {words.format(value)}, but rank 0 is about to {words.format(values[0])}",
                rank=rank, phase="plan", next="call save() with the same step on every rank",
            )
