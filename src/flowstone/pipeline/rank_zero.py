"""Rank 0's part of a save by N ranks: collect what all hold and have written, assign writers, publish."""

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
from flowstone.config import FAR_COMPARED_MAX, INDEX_ROWS_KEPT_MAX, PLANS_REMEMBERED
from flowstone.errors import CollisionError, RankError, StorageError, UnsupportedStateError
from flowstone.format.codec import CAST, features_of
from flowstone.format.index import ChunkForms, ChunkPlaces, Frame
from flowstone.format.manifest import COPIES, DELTA, IoRecord, Manifest, SegmentRow
from flowstone.format.merge_points import MergeMap, merge
from flowstone.pipeline.base import planned_places, raw_forms
from flowstone.pipeline.messages import (
    Apart,
    Assignment,
    PackedLayout,
    Part,
    Proposal,
    Terms,
    Written,
    from_steps,
    numbers,
    parts_of,
    tensors_of,
)
from flowstone.plan.assign_writers import WriterAssignment, assign_writers, check_replicas
from flowstone.plan.global_index import global_index
from flowstone.plan.replicas import ReplicaSets, differing
from flowstone.ranks import Decision
from flowstone.store.base import Store
from flowstone.table.chunks import CODEC_XOR, ChunkBases
from flowstone.table.pieces import Alias, Pieces, TensorColumns

if TYPE_CHECKING:
    from flowstone.pipeline.unmatched_rules import UnmatchedRules


class _GlobalIndex(msgspec.Struct, frozen=True, eq=False):
    """The index of a plan whose ranks have written into these segments; `segment`: of each piece."""

    plan: str
    is_delta: bool
    is_coded: bool
    has_bases: bool
    segment: NDArray[np.uint32]
    frame: Frame
    piece_order: NDArray[np.int64]
    chunk_order: NDArray[np.int64]


def _critical(places: ChunkPlaces | None, *, copies: bool) -> tuple[str, ...]:
    """The critical features of a checkpoint whose chunks have such places; None: those of their pieces."""
    if places is None:
        return ()
    codecs = () if places.forms is None else features_of(places.forms.codec)
    return (DELTA, *((COPIES,) if copies else ()), *codecs)


def _numbered_from(count: int, forms: ChunkForms) -> ChunkForms:
    """The same, the segments of bases being numbered from there on."""
    if forms.bases is None or not count:
        return forms
    near = forms.codec == CODEC_XOR
    segment = forms.bases.segment + np.where(near, count, 0).astype(np.uint32)
    return msgspec.structs.replace(forms, bases=msgspec.structs.replace(forms.bases, segment=segment))


def _all_bases(forms: Sequence[ChunkForms]) -> ChunkBases | None:
    """The bases of all ranks' chunks; None: none has one."""
    if all(one.bases is None for one in forms):
        return None
    found = [(one.bases or ChunkBases.none(len(one.codec))).columns() for one in forms]
    return ChunkBases.by_columns(np.concatenate(columns) for columns in zip(*found, strict=True))


class RankZero:
    """What rank 0 knows of all ranks."""

    def __init__(self, size: int, unmatched: UnmatchedRules | None = None) -> None:
        self._unmatched = unmatched
        self.job = secrets.token_hex(8)
        self._plan = ""
        self._layouts: list[Pieces | None] = [None] * size
        self._aliases: list[Sequence[tuple[str, str]]] = [()] * size
        self._is_far = [False] * size
        self._assignment: WriterAssignment | None = None
        # For each rank, the plans in which it has its current part: it may have begun several saves by an older plan.
        self._same: list[deque[str]] = [deque(maxlen=PLANS_REMEMBERED) for _ in range(size)]
        self._tensors: dict[bytes, TensorColumns] = {}
        self._columns: dict[bytes, NDArray[np.int64]] = {}  # shared by several ranks
        self._index: _GlobalIndex | None = None  # of the last save

    def assign(self, said: Sequence[Proposal]) -> Decision:
        _all_equal({rank: one.step for rank, one in enumerate(said)}, "save step {}")
        begun = {rank for rank, one in enumerate(said) if one.layout is None}
        wrong = [rank for rank in begun if said[rank].plan not in self._same[rank]]
        if wrong:
            raise RankError(
                f"rank {wrong[0]} began to save with an older plan", rank=wrong[0], phase="plan",
                next="save again: the next save makes a new plan",
            )
        assignment = self._assign_anew(said, begun) if len(begun) < len(said) else self._assignment
        assert assignment is not None, "the first plan is new to all"
        parts = [Part(None)] * len(said)
        if any(one.plan != self._plan for one in said):  # tell the newest plan to ranks that have begun by an older one
            told = parts_of(assignment)
            parts = [msgspec.structs.replace(one, positions=None) if r in begun else one for r, one in enumerate(told)]
        terms = Terms(self._plan, self.job, assignment.buffers, self._compared_share(assignment))
        return Decision(msgspec.msgpack.encode(terms), list(map(msgspec.msgpack.encode, parts)))

    def _assign_anew(self, said: Sequence[Proposal], begun: Set[int]) -> WriterAssignment:
        """A plan in which the ranks that have begun keep their part. If it cannot be made, nothing changes."""
        layouts, hosts = list(self._layouts), dict.fromkeys(one.host for one in said)
        number = {host: at for at, host in enumerate(hosts)}
        for rank, one in enumerate(said):
            if one.layout is not None:
                layouts[rank] = self._unpacked(one.layout)
        known = self._assignment if begun else None
        assignment = assign_writers(
            [one for one in layouts if one is not None], [number[one.host] for one in said],
            {rank: known.writes[rank] for rank in begun} if known else {}, kept_split=known.split if known else None,
        )
        self._layouts, self._assignment, self._plan = layouts, assignment, secrets.token_hex(8)
        for rank, one in enumerate(said):
            if one.layout is not None:
                self._aliases[rank], self._is_far[rank] = one.layout.aliases, one.is_far
                self._same[rank].clear()
            self._same[rank].append(self._plan)
        return assignment

    def _compared_share(self, assignment: WriterAssignment) -> float | None:
        """Share of the replicas to sample; None: all. `save` makes the table of lines that a device gathers, so saves
        take turns.
        """
        if not any(self._is_far):
            return None
        most = max((int((number >= 0).sum()) for number in assignment.replicas.number), default=0)
        return min(1.0, FAR_COMPARED_MAX / most) if most else 1.0

    def replicas_differ(self, said: Sequence[Written]) -> bool:
        """Whether ranks have found different bytes in replicas."""
        assert self._assignment is not None, "what is committed was assigned"
        return differing(self._assignment.replicas.sets, [one.folds for one in said])

    def raise_differing_replicas(self, said: Sequence[bytes]) -> NoReturn:
        """Raise CollisionError naming the replicas that differ, and their ranks. `said`: per rank, digests of its
        pieces.
        """
        layouts = [one for one in self._layouts if one is not None]
        for kind in range(2):
            check_replicas(
                layouts, [numbers(msgspec.msgpack.decode(one, type=list[bytes])[kind], np.uint64) for one in said]
            )
        raise AssertionError("digests are equal, and numbers that are made of them differ")

    def take_everything(self, assignment: Assignment) -> None:
        """In a group of one: this rank's assignment is the whole plan."""
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
        self, said: Sequence[Written], apart: Sequence[Apart], store: Store, draft: publish.Draft, store_id: str
    ) -> Manifest:
        """Publish what N ranks have written. `apart`: per rank, its part of sections that are not equal on all ranks.
        """
        _all_equal({rank: one.plan for rank, one in enumerate(said)}, "write by plan {}")
        _all_equal({rank: one.draft for rank, one in enumerate(said)}, "write into {}")
        if self._unmatched is not None and self._unmatched.any_left:
            known = dict.fromkeys(name for one in self._layouts if one is not None for name in one.tensors.names)
            self._unmatched.check(self._plan, list(known))
        segments: list[SegmentRow] = []
        columns = []
        for rank, one in enumerate(said):
            if rank > 0:  # rank 0 has written its own already
                check_visible(store, draft.directory, rank, one.segments)
            columns.append(one.segment + np.uint32(len(segments)))
            segments += [msgspec.structs.replace(row, id=len(segments) + at) for at, row in enumerate(one.segments)]
        places = self._places(said)
        index = self._index_of(_joined(columns), places)
        offsets, digests = _joined([one.offsets for one in said]), _joined([one.digests for one in said])
        if places is not None:
            places = places.in_order(index.chunk_order)
        per_rank: dict[str, list[bytes]] = {}
        for one in said:
            for section, text in one.per_rank.items():
                per_rank.setdefault(section, []).append(text)
        replicated = {**said[0].replicated, **_merged_sections(apart)}
        return publish.publish(store, draft, store_id, publish.Publication(
            segments, index.frame.fill(offsets[index.piece_order], digests[index.chunk_order], places),
            index.frame.totals, join_objects(replicated, per_rank), io_of([one.io for one in said]),
            writer=f"flowstone {__version__}", ranks=len(said),
            critical=_critical(places, copies=any(one.copies for one in said)),
        ))

    def _places(self, said: Sequence[Written]) -> ChunkPlaces | None:
        """Where all chunks are, rank after rank; None if no rank refers to a base, or encodes."""
        if all(one.places is None for one in said):
            return None
        assert self._assignment is not None, "what is committed was assigned"
        segments, offsets, forms, count, chunks = [], [], [], 0, 0
        is_coded = any(one.places is not None and one.places.forms is not None for one in said)
        for rank, one in enumerate(said):
            places = one.places
            if places is None or is_coded:
                length = self._assignment.layouts[rank].lengths()[self._assignment.writes[rank]]
            if places is None:
                places = planned_places(one.segment, one.offsets, length)
            if is_coded:
                forms.append(_numbered_from(count, places.forms or raw_forms(length, one.digests)))
            segments.append(places.segment + np.uint32(count))
            offsets.append(_counted_on(places, chunks))
            chunks += len(places.offset)
            count += len(one.segments)
        return ChunkPlaces(_joined(segments), _joined(offsets), ChunkForms(
            _joined([one.length for one in forms]), _joined([one.codec for one in forms]),
            _joined([one.digest for one in forms]), _all_bases(forms),
        ) if is_coded else None)

    def _index_of(self, segment: NDArray[np.uint32], places: ChunkPlaces | None) -> _GlobalIndex:
        """The index of the plan's pieces in these segments; kept for the next save by the same plan."""
        forms = None if places is None else places.forms
        kept, is_delta, is_coded = self._index, places is not None, forms is not None
        has_bases = forms is not None and forms.bases is not None
        kind = self._plan, is_delta, is_coded, has_bases
        if kept is not None and (kept.plan, kept.is_delta, kept.is_coded, kept.has_bases) == kind and (
            is_delta or np.array_equal(kept.segment, segment)
        ):
            return kept
        assert self._assignment is not None, "what is committed was assigned"
        found = _GlobalIndex(*kind, segment, *global_index(
            self._assignment.layouts, self._assignment.writes, self._all_aliases(), segment, is_delta=is_delta,
            is_coded=is_coded, has_bases=has_bases,
        ))
        self._index = found if len(segment) <= INDEX_ROWS_KEPT_MAX else None
        return found

    def _unpacked(self, layout: PackedLayout) -> Pieces:
        tensors = self._tensors.get(layout.tensors)
        if tensors is None:
            tensors = self._tensors[layout.tensors] = tensors_of(layout.tensors)
        parts, kinds = (
            self._columns[one] if one in self._columns else self._columns.setdefault(one, from_steps(one))
            for one in (layout.parts, layout.kinds)
        )
        return Pieces(tensors, parts, numbers(layout.boxes, np.int64), kinds)

    def _all_aliases(self) -> list[Alias]:
        """The aliases of all ranks, each once; CollisionError if ranks tie different tensors."""
        found: dict[str, str] = {}
        for aliases in self._aliases:
            for name, target in aliases:
                if found.setdefault(name, target) != target:
                    raise CollisionError(
                        f"{name!r} is tied to {found[name]!r} on one rank, and to {target!r} on another",
                        next="tie the same parameters on every rank",
                    )
        stored = {name for layouts in self._layouts if layouts is not None for name in layouts.names}
        return [Alias(name, target) for name, target in found.items() if name not in stored]


def _counted_on(places: ChunkPlaces, chunks: int) -> NDArray[np.uint64]:
    """The offsets of a rank's chunks; of those that refer to others by number, counted on from so many before."""
    if places.forms is None or not (casts := places.forms.codec == CAST.id).any():
        return places.offset
    return np.where(casts, places.offset + np.uint64(chunks), places.offset)


def differing_sections(said: Sequence[Written]) -> list[str]:
    """The replicated sections that are not equal on all ranks. Raises if ranks save different sections."""
    for rank, one in enumerate(said):
        if one.sections.keys() != said[0].sections.keys() or one.per_rank.keys() != said[0].per_rank.keys():
            raise UnsupportedStateError(
                f"rank {rank} saves different sections than rank 0",
                expected=", ".join([*said[0].sections, *said[0].per_rank]),
                found=", ".join([*one.sections, *one.per_rank]),
                next="pass a state with the same sections on every rank",
            )
    return [name for name, of in said[0].sections.items() if any(one.sections[name] != of for one in said)]


def _merged_sections(apart: Sequence[Apart]) -> dict[str, bytes]:
    """One text for each section that ranks have differently. Raises UnsupportedStateError if they cannot be merged."""
    found = {}
    for section in apart[0].texts if apart else ():
        first: dict[bytes, int] = {}  # of equal ones, the lowest rank
        for rank, one in enumerate(apart):
            first.setdefault(one.texts[section], rank)
        texts = {rank: zlib.decompress(text) for text, rank in first.items()}
        found[section] = merge(
            section, texts, {rank: cast("MergeMap", apart[rank].merge_maps[section]) for rank in texts}
        )
    return found


def check_one_try(said: Sequence[Written]) -> None:
    """Check that all ranks have called `save` of this step equally often; else they write into different drafts."""
    for rank, one in enumerate(said):
        if one.tries != said[0].tries:
            raise RankError(
                f"rank {rank} is at attempt {one.tries} of this step, rank 0 at attempt {said[0].tries}", rank=rank,
                phase="commit", tries=max(other.tries for other in said),
                next="save again: all ranks then continue with the same attempt",
            )


_Number = TypeVar("_Number", bound=np.generic)


def _joined(columns: Sequence[NDArray[_Number]]) -> NDArray[_Number]:
    """The columns of all ranks, concatenated; a group of one gets its own column back."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def io_of(records: Sequence[IoRecord]) -> IoRecord:
    """How all ranks have written, as far as they report it."""

    def total(counts: Sequence[int | None]) -> int | None:
        told = [count for count in counts if count is not None]
        return sum(told) if told else None

    return msgspec.structs.replace(
        records[0], copied_bytes=sum(one.copied_bytes for one in records),
        requests=total([one.requests for one in records]),
        exact_bytes=total([one.exact_bytes for one in records]),
        sampled_bytes=total([one.sampled_bytes for one in records]),
        huge_bytes=total([one.huge_bytes for one in records]),
        sampled_because=next((one.sampled_because for one in records if one.sampled_because), None),
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


def _all_equal(found: Mapping[int, object], words: str) -> None:
    for rank, value in found.items():
        if value != found[0]:
            raise RankError(
                f"rank {rank} was to {words.format(value)}, rank 0 to {words.format(found[0])}", rank=rank,
                phase="plan", next="call save() with the same step on every rank",
            )
