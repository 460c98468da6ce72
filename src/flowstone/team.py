"""A team: the ranks of a job that save into one store as one.

    share    each rank says what it holds; rank 0 shares out who writes what     (each save, in the background)
    commit   each rank says what it has written, or what failed; rank 0 publishes

A rank whose layout is what it was keeps its part of the plan, and begins to write when `save` is called. One that is
new waits for the others, in the background, and for what rank 0 makes of it. Each plan is proved to be whole.
"""

from __future__ import annotations

import logging
import lzma
import math
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone._version import __version__
from flowstone.commit import publish
from flowstone.commit.contents import join_objects
from flowstone.config import CATCH_UP_CALLS
from flowstone.errors import CollisionError, RankError, StorageError, UnsupportedStateError
from flowstone.format.digest import digest
from flowstone.format.joints import Spine, join, spine_of
from flowstone.format.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    OBJECTS_NAME,
    IoRecord,
    Manifest,
    SegmentRow,
    decode_manifest,
    encode_manifest,
)
from flowstone.pieces import DTYPES, Alias, Block, Layout
from flowstone.plan.cut import Blocks
from flowstone.plan.held import Held, Names
from flowstone.plan.listing import index_of_team
from flowstone.plan.share import Share, share
from flowstone.ranks import Agreed, Agreement, Decision
from flowstone.store.base import Receipt, Store

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Number = TypeVar("_Number", bound=np.generic)
_log = logging.getLogger(__name__)


class _Tensors(msgspec.Struct, frozen=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    buffers: list[int]


class _Layout(msgspec.Struct, frozen=True):
    """A layout in few bytes, by the columns of `Held`.

    `tensors`, `parts` and `kinds` are the same on all ranks that hold parts of the same tensors, cut alike.
    """

    tensors: bytes  # _Tensors, compressed
    parts: bytes
    kinds: bytes
    boxes: bytes
    samples: bytes  # uint16: of each piece, a digest of a few of its bytes
    aliases: list[tuple[str, str]]


class _Proposal(msgspec.Struct, frozen=True):
    """What a rank says of a save: the step, and its layout if it is new; else the plan that it has begun by."""

    step: int
    host: str
    plan: str | None
    layout: _Layout | None


class _Part(msgspec.Struct, frozen=True):
    """What a rank writes, as rank 0 has decided. `positions` is None where that stays as it was.

    blocks  int64: of those that are written in part, by several ranks, position among `positions`, dimension, start
            and length; all of the one, then all of the next
    """

    positions: bytes | None
    blocks: bytes = b""


class _Written(msgspec.Struct, frozen=True):
    """What a rank has written."""

    plan: str
    draft: str
    segments: list[SegmentRow]
    segment: bytes  # uint32, of each piece that it writes
    offsets: bytes  # uint64
    digests: bytes  # uint64, of the chunks
    sections: dict[str, str]  # digest of each
    objects: bytes  # replicated sections, of rank 0 alone
    per_rank: dict[str, bytes]
    io: IoRecord


class _Apart(msgspec.Struct, frozen=True):
    """What a rank has of sections that are not the same on all. `spines`: of each, a Spine, as messages have it."""

    texts: dict[str, bytes]
    spines: dict[str, object]


class _Outcome(msgspec.Struct, frozen=True):
    """What rank 0 makes of what all have written: a manifest, or the sections that it has to see of each first."""

    manifest: bytes
    apart: list[str]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What this rank writes, by the plan of that name.

    positions  among the pieces of its layout, not descending
    blocks     of those of which it writes some rows alone
    buffers    of the whole job: how many several ranks hold, and the lowest of them writes
    """

    plan: str
    layout: Layout
    positions: NDArray[np.int64]
    blocks: tuple[Block, ...] = ()
    buffers: int = 0


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank has to commit.

    segment   of each piece that it writes, in the order of its assignment: position among `segments`
    offsets   of the same, in bytes
    objects   section to what `replicated` is the text of
    """

    segments: Sequence[SegmentRow]
    segment: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    receipt: Receipt
    replicated: Mapping[str, bytes]
    per_rank: Mapping[str, bytes]
    objects: Mapping[str, object]


class Team:
    """One rank's side of it. One thread at a time, and every rank in the same order."""

    def __init__(self, agreement: Agreement, host: str) -> None:
        self.rank, self.size = agreement.rank, agreement.size
        self._agreement, self._host = agreement, host
        self._mine: Assignment | None = None
        self._highest = -1  # step that was tried
        self._tries: dict[int, int] = {}  # of steps that were tried more than once
        self._job = ""  # the name of this run of the job, once all know it
        self._lead = _Lead(agreement.size) if agreement.rank == 0 else None

    def assignment(self, layout: Layout) -> Assignment | None:
        """What this rank writes of `layout`, where that has been planned: it may begin."""
        return self._mine if self._mine is not None and self._mine.layout is layout else None

    def begin_try(self, step: int) -> str:
        """A name for this call of `save`: ranks that call alike have the same, and none has one twice."""
        if step > self._highest:
            self._highest, tries = step, 1
        else:
            tries = self._tries[step] = self._tries.get(step, 1) + 1
        return f"{step}-{tries}"

    def draft_name(self, this_try: str) -> str:
        """The identity that a checkpoint will have: every rank knows it without asking."""
        return f"{self._job}-{this_try}"

    def share(
        self, step: int, layout: Layout, begun: Assignment | None = None, samples: NDArray[np.uint16] | None = None
    ) -> Assignment:
        """Agree on a plan for `step`.

        begun    the one that this rank has already begun by
        samples  otherwise: of each piece, a digest of a few of its bytes; replicas have equal ones
        raises   RankError; CollisionError, CoverageError on rank 0
        """
        packed = None if samples is None else _pack(layout, samples)
        proposal = _Proposal(step, self._host, begun.plan if begun else None, packed)
        lead = self._lead
        try:
            agreed = self._agree_on_plan(
                step, msgspec.msgpack.encode(proposal),
                lambda said: lead.share([_unpack(one, _Proposal) for one in said]) if lead else Decision(),
            )
        except Exception:
            self._mine = None  # the next one is made anew
            raise
        plan, self._job, buffers = msgspec.msgpack.decode(agreed.common, type=tuple[str, str, int])
        part = _unpack(agreed.own, _Part)
        if part.positions is None:
            assert begun is not None, "only what was known can stay as it was"
            self._mine = begun if plan == begun.plan else replace(begun, plan=plan, buffers=buffers)
        else:
            self._mine = replace(_assignment(plan, layout, part.positions, part.blocks), buffers=buffers)
        return self._mine

    def _agree_on_plan(
        self, step: int, mine: bytes | Exception, decide: Callable[[Sequence[bytes]], Decision]
    ) -> Agreed:
        """Where some ranks are behind, those lose their own call alone; the others wait for them to catch up."""
        for _ in range(CATCH_UP_CALLS):
            try:
                return self._agreement.agree(f"the plan of step {step}", mine, decide, place=step)
            except RankError as error:
                if error.ahead != step:
                    raise
        raise RankError(f"other ranks do not come to step {step}", rank=self.rank, phase="plan")

    def absent(self, step: int, error: Exception) -> None:
        """Tell the others that this rank does not save `step`, because of `error`."""
        self._mine = None
        try:
            self._agree_on_plan(step, error, lambda _: Decision())
        except Exception as told:
            _log.debug("step %d is not saved: %s", step, told)  # as we have said, or another rank

    def give_up(self, step: int, error: Exception) -> None:
        """Tell the others that this rank writes nothing of a `step` that was planned, because of `error`."""
        self._mine = None
        try:
            self._agreement.agree(f"the commit of step {step}", error, lambda _: Decision(), place=_before(step))
        except Exception as told:
            _log.debug("step %d is not saved: %s", step, told)

    def commit(
        self, step: int, made: Contribution | Exception, assignment: Assignment, store: Store, draft: publish.Draft,
        store_id: str,
    ) -> Manifest:
        """Publish what all ranks have written. The checkpoint is durable when this returns, on any rank.

        raises  RankError: the first failure of any of them
        """
        mine: _Written | Exception
        if isinstance(made, Exception):
            mine = made
        else:
            mine = _contribution(made, assignment.plan, draft.directory, replicated=self.rank == 0)
        mine_packed = mine if isinstance(mine, Exception) else msgspec.msgpack.encode(mine)
        written: list[_Written] = []

        def publish_it(apart: Sequence[_Apart] = ()) -> Decision:
            assert self._lead is not None
            manifest = self._lead.commit(written, apart, store, draft, store_id)
            return Decision(msgspec.msgpack.encode(_Outcome(encode_manifest(manifest), [])))

        def look(said: Sequence[bytes]) -> Decision:
            written.extend(_unpack(one, _Written) for one in said)
            _check_one_try(written)
            differing = _differing_sections(written)
            return Decision(msgspec.msgpack.encode(_Outcome(b"", differing))) if differing else publish_it()

        try:
            agreed = self._agreement.agree(f"the commit of step {step}", mine_packed, look, place=_before(step))
            outcome = _unpack(agreed.common, _Outcome)
            if outcome.apart:
                assert not isinstance(made, Exception), "who has failed agrees on nothing"
                agreed = self._agreement.agree(
                    f"the objects of step {step}", msgspec.msgpack.encode(_apart(made, outcome.apart)),
                    lambda said: publish_it([_unpack(one, _Apart) for one in said]), place=_before(step),
                )
                outcome = _unpack(agreed.common, _Outcome)
        except Exception as error:
            if isinstance(error, RankError) and "tries" in error.facts:
                self._tries[step] = max(self._tries.get(step, 1), int(str(error.facts["tries"])))
            if self._lead is not None:  # ranks that have given up do not know that they may remove theirs
                segments = [row.name for one in written for row in one.segments]
                publish.withdraw(store, draft, (INDEX_NAME, OBJECTS_NAME, MANIFEST_NAME, *segments))
            raise
        return decode_manifest(outcome.manifest, path=f"{store.location}/{draft.directory}")


class _Lead:
    """What rank 0 knows of all."""

    def __init__(self, size: int) -> None:
        self.job = secrets.token_hex(4)
        self._plan = ""
        self._held: list[Held | None] = [None] * size
        self._aliases: list[Sequence[tuple[str, str]]] = [()] * size
        self._shared: Share | None = None
        self._names: dict[bytes, Names] = {}
        self._columns: dict[bytes, NDArray[np.int64]] = {}  # that several ranks have alike

    def share(self, said: Sequence[_Proposal]) -> Decision:
        _all_equal({rank: one.step for rank, one in enumerate(said)}, "save step {}")
        begun = {rank for rank, one in enumerate(said) if one.layout is None}
        wrong = [rank for rank in begun if said[rank].plan != self._plan]
        if wrong:
            self._plan = ""
            raise RankError(
                f"rank {wrong[0]} has begun to save by an older plan", rank=wrong[0], phase="plan",
                next="save again: the next plan is a new one",
            )
        for rank, one in enumerate(said):
            if one.layout is not None:
                self._held[rank] = self._unpacked(one.layout)
                self._aliases[rank] = one.layout.aliases
        parts = [_Part(None)] * len(said)
        if len(begun) < len(said):
            hosts = {host: at for at, host in enumerate(dict.fromkeys(one.host for one in said))}
            known = self._shared if begun else None
            try:
                self._shared = share(
                    [held for held in self._held if held is not None], [hosts[one.host] for one in said],
                    {rank: known.writes[rank] for rank in begun} if known else {},
                    [None if one.layout is None else np.frombuffer(one.layout.samples, "<u2") for one in said],
                    kept_cut=known.cut if known else None,
                )
            except Exception:
                self._plan = ""
                raise
            self._plan = secrets.token_hex(8)
            told = _parts(self._shared)
            parts = [_Part(None) if rank in begun else one for rank, one in enumerate(told)]
        buffers = 0 if self._shared is None else self._shared.buffers
        common = msgspec.msgpack.encode((self._plan, self.job, buffers))
        return Decision(common, list(map(msgspec.msgpack.encode, parts)))

    def commit(
        self, said: Sequence[_Written], apart: Sequence[_Apart], store: Store, draft: publish.Draft, store_id: str
    ) -> Manifest:
        """Publish. `apart`: of each rank, what it has of sections that are not the same on all."""
        _all_equal({rank: one.plan for rank, one in enumerate(said)}, "write by plan {}")
        _all_equal({rank: one.draft for rank, one in enumerate(said)}, "write into {}")
        segments: list[SegmentRow] = []
        columns = []
        for rank, one in enumerate(said):
            _check_visible(store, draft.directory, rank, one.segments)
            columns.append(_numbers(one.segment, np.uint32) + np.uint32(len(segments)))
            segments += [msgspec.structs.replace(row, id=len(segments) + at) for at, row in enumerate(one.segments)]
        assert self._shared is not None, "what is committed was shared out"
        frame, piece_order, chunk_order = index_of_team(
            self._shared.held, self._shared.writes, self._all_aliases(), np.concatenate(columns)
        )
        offsets = np.concatenate([_numbers(one.offsets, np.uint64) for one in said])
        digests = np.concatenate([_numbers(one.digests, np.uint64) for one in said])
        per_rank: dict[str, list[bytes]] = {}
        for one in said:
            for section, text in one.per_rank.items():
                per_rank.setdefault(section, []).append(text)
        io = msgspec.structs.replace(
            said[0].io, copied_bytes=sum(one.io.copied_bytes for one in said),
            direct_bytes=sum(one.io.direct_bytes for one in said), requests=sum(one.io.requests or 0 for one in said),
        )
        replicated = msgspec.msgpack.decode(zlib.decompress(said[0].objects), type=dict[str, bytes])
        replicated |= _joined_sections(apart)
        return publish.publish(
            store, draft, store_id=store_id, segments=segments,
            index=frame.fill(offsets[piece_order], digests[chunk_order]), totals=frame.totals,
            objects=join_objects(replicated, per_rank),
            receipt=Receipt(None, digests, io), writer=f"flowstone {__version__}", ranks=len(said),
        )

    def _unpacked(self, layout: _Layout) -> Held:
        names = self._names.get(layout.tensors)
        if names is None:
            found = msgspec.msgpack.decode(lzma.decompress(layout.tensors), type=_Tensors)
            dtypes = tuple(DTYPES[name] for name in found.dtypes)
            names = Names(tuple(found.names), dtypes, tuple(found.shapes), frozenset(found.buffers))
            self._names[layout.tensors] = names
        parts, kinds = (
            self._columns[one] if one in self._columns else self._columns.setdefault(one, _from_steps(one))
            for one in (layout.parts, layout.kinds)
        )
        return Held(names, parts, _numbers(layout.boxes, np.int64), kinds)

    def _all_aliases(self) -> list[Alias]:
        """The further names of every rank, each once; CollisionError where ranks tie different tensors."""
        found: dict[str, str] = {}
        for aliases in self._aliases:
            for name, target in aliases:
                if found.setdefault(name, target) != target:
                    raise CollisionError(
                        f"{name!r} is tied to {found[name]!r} on one rank, and to {target!r} on another",
                        next="tie the same parameters on every rank",
                    )
        stored = {name for held in self._held if held is not None for name in held.names.names}
        return [Alias(name, target) for name, target in found.items() if name not in stored]


def _pack(layout: Layout, samples: NDArray[np.uint16]) -> _Layout:
    pieces = layout.pieces
    parts = sorted(pieces.parts)
    boxes = [n for at in parts for n in (*pieces.parts[at].offset, *pieces.parts[at].shape)]
    names = Names(pieces.names, pieces.dtypes, tuple(map(tuple, pieces.shapes)), layout.buffers)
    held = Held(names, np.array(parts, np.int64), np.array(boxes, np.int64)).compact()
    return _packed(held, samples, [(alias.name, alias.target) for alias in layout.aliases])


def _packed(held: Held, samples: NDArray[np.uint16], aliases: list[tuple[str, str]]) -> _Layout:
    assert held.kinds is not None, "each distinct box once"
    names = held.names
    dtypes = [dtype.name for dtype in names.dtypes]
    tensors = _Tensors(list(names.names), dtypes, list(names.shapes), sorted(names.buffers))
    return _Layout(
        lzma.compress(msgspec.msgpack.encode(tensors), preset=0), _by_steps(held.parts), _by_steps(held.kinds),
        _compressed(held.boxes), samples.astype("<u2").tobytes(), aliases,
    )


def _parts(shared: Share) -> Iterator[_Part]:
    """What each rank is told. Ranks that write alike are told the same bytes."""
    known: dict[tuple[int, int], _Part] = {}
    for rank, writes in enumerate(shared.writes):
        blocks = shared.blocks[rank] if shared.blocks else None
        key = id(writes), id(blocks)
        if key not in known:
            known[key] = _Part(_by_steps(writes)) if blocks is None else _part_of(writes, blocks)
        yield known[key]


def _part_of(writes: NDArray[np.int64], blocks: Blocks) -> _Part:
    at = np.flatnonzero(blocks.dim[writes] >= 0)
    cut = writes[at]
    columns = np.stack([at, blocks.dim[cut], blocks.start[cut], blocks.length[cut]])
    return _Part(_by_steps(blocks.source[writes]), _compressed(columns) if len(at) else b"")


def _assignment(plan: str, layout: Layout, positions: bytes, blocks: bytes) -> Assignment:
    """What a rank has been told to write of its layout."""
    writes, cut = _from_steps(positions), []
    for at, dim, start, length in _numbers(blocks, np.int64).reshape(4, -1).T.tolist() if blocks else ():
        piece = layout.pieces[int(writes[at])]
        row_bytes = math.prod(piece.box.shape[dim + 1 :]) * piece.dtype.item_bytes
        cut.append(Block(at, dim, start, length, start * row_bytes))
    return Assignment(plan, layout, writes, tuple(cut))


def _compressed(numbers: NDArray[np.int64]) -> bytes:
    return zlib.compress(numbers.astype("<i8").tobytes(), 1)


def _by_steps(numbers: NDArray[np.int64]) -> bytes:
    """Compressed by the steps between them, most of which are alike."""
    return _compressed(np.diff(numbers, prepend=0))


def _from_steps(packed: bytes) -> NDArray[np.int64]:
    return np.cumsum(_numbers(packed, np.int64))


def _contribution(made: Contribution, plan: str, draft: str, *, replicated: bool) -> _Written:
    return _Written(
        plan=plan, draft=draft, segments=list(made.segments),
        segment=zlib.compress(made.segment.astype("<u4").tobytes(), 1),
        offsets=zlib.compress(made.offsets.astype("<u8").tobytes(), 1),
        digests=zlib.compress(made.receipt.digests.astype("<u8").tobytes(), 0),
        sections={name: digest(text) for name, text in made.replicated.items()},
        objects=zlib.compress(msgspec.msgpack.encode(dict(made.replicated)), 1) if replicated else b"",
        per_rank=dict(made.per_rank), io=made.receipt.io,
    )


def _differing_sections(said: Sequence[_Written]) -> list[str]:
    """The replicated sections that are not the same on all ranks. Raises where ranks save different sections."""
    for rank, one in enumerate(said):
        if one.sections.keys() != said[0].sections.keys() or one.per_rank.keys() != said[0].per_rank.keys():
            raise UnsupportedStateError(
                f"rank {rank} saves other sections than rank 0",
                expected=", ".join([*said[0].sections, *said[0].per_rank]),
                found=", ".join([*one.sections, *one.per_rank]),
                next="hand over a state of the same sections on every rank",
            )
    return [name for name, of in said[0].sections.items() if any(one.sections[name] != of for one in said)]


def _apart(made: Contribution, sections: Sequence[str]) -> _Apart:
    texts = {name: zlib.compress(made.replicated[name], 1) for name in sections}
    return _Apart(texts, {name: spine_of(made.objects[name]) for name in sections})


def _joined_sections(apart: Sequence[_Apart]) -> dict[str, bytes]:
    """One text for each section that ranks have differently. Raises UnsupportedStateError where that cannot be."""
    found = {}
    for section in apart[0].texts if apart else ():
        first: dict[bytes, int] = {}  # of equal ones the lowest rank
        for rank, one in enumerate(apart):
            first.setdefault(one.texts[section], rank)
        texts = {rank: zlib.decompress(text) for text, rank in first.items()}
        found[section] = join(section, texts, {rank: cast("Spine", apart[rank].spines[section]) for rank in texts})
    return found


def _before(step: int) -> int:
    """The place of a commit: who plans the step once more has given it up, and waits for those who are in it yet."""
    return step - 1


def _check_one_try(said: Sequence[_Written]) -> None:
    """All have called `save` of this step equally often; else they write into different drafts."""
    tries = [int(one.draft.rpartition("-")[2]) for one in said]
    for rank, count in enumerate(tries):
        if count != tries[0]:
            raise RankError(
                f"rank {rank} has come to its try {count} of this step, rank 0 to its try {tries[0]}", rank=rank,
                phase="commit", tries=max(tries), next="save again: all ranks count on from there",
            )


def _check_visible(store: Store, directory: str, rank: int, segments: Sequence[SegmentRow]) -> None:
    """What another rank has written has to be there for rank 0, too."""
    for row in segments:
        path = f"{directory}/{row.name}"
        if not store.exists(path) or store.size(path) != row.bytes:
            raise StorageError(
                f"rank 0 does not see what rank {rank} has written", expected=f"{row.bytes} bytes in {path}",
                found=f"{store.size(path)} bytes" if store.exists(path) else "no such file",
                next="let all ranks save into one directory that every node sees at once",
            )


def _all_equal(found: Mapping[int, object], words: str) -> None:
    for rank, value in found.items():
        if value != found[0]:
            raise RankError(
                f"rank {rank} was to {words.format(value)}, rank 0 to {words.format(found[0])}", rank=rank,
                phase="plan", next="call save() with the same step on every rank",
            )


def _numbers(packed: bytes, kind: type[_Number]) -> NDArray[_Number]:
    return np.frombuffer(zlib.decompress(packed), np.dtype(kind).newbyteorder("<")).astype(kind)


def _unpack(message: bytes, kind: type[_Struct]) -> _Struct:
    return msgspec.msgpack.decode(message, type=kind)
