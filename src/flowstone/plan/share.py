"""Sharing: which rank writes which of the pieces that the ranks of a job hold.

Equal boxes of one tensor on several ranks are replicas: one of them is written, and the choice spreads the bytes over
nodes and over their ranks (balanced writers: ByteCheckpoint, arXiv 2407.20143). Buffers of modules, which each rank
may have updated by its own batch, are all taken from the lowest rank that holds them. That every element is written
exactly once is proved here, for the very plan that is used. Tensors that are cut alike everywhere are looked at once,
all of them together: 8,192 ranks with 4,500 pieces each are a dozen classes of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from flowstone.config import CUT_BLOCK_BYTES_MIN, CUT_WORTH_BYTES
from flowstone.errors import CollisionError, CoverageError
from flowstone.pieces import Box
from flowstone.plan.boxes import check_tiling, tiles
from flowstone.plan.cut import Blocks, Cut, cut_up
from flowstone.plan.held import WHOLE, Form, Held, Names, Tensors, classes, forms
from flowstone.plan.replicas import ReplicaSets
from flowstone.plan.spread import Replicas, spread

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)  # odd constants of golden ratio and XXH64
_EVEN = 0.01  # of the least that the largest writer can have: so much more is even
_BLOCK = 1 / 128  # of the same: blocks are so long
_STRANDS_REMEMBERED = 256  # of a form: with so few, most of its ranks write the same, and share one array


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Who writes what.

    held    what each rank holds: long replicas in blocks, where one writer would have too much of them
    writes  for each rank, positions of its pieces in `held`, ascending; ranks that write alike share one array
    bytes   for each rank, of those pieces
    blocks  for each rank, how `held` comes from what it holds; empty where nothing is cut
    cut     what is cut
    buffers how many boxes of modules' buffers are held by several ranks, and written by the lowest
    replicas  which pieces several ranks hold, which have to be the same
    """

    held: Sequence[Held]
    writes: tuple[NDArray[np.int64], ...]
    bytes: NDArray[np.int64]
    blocks: Sequence[Blocks] = ()
    cut: Cut | None = None
    buffers: int = 0
    replicas: ReplicaSets = field(default_factory=lambda: ReplicaSets((), ()))


def share(
    held: Sequence[Held], nodes: Sequence[int] | None = None,
    kept: Mapping[int, NDArray[np.int64]] = MappingProxyType({}), *,
    kept_cut: Cut | None = None, worth_bytes: int = CUT_WORTH_BYTES, block_bytes_min: int = CUT_BLOCK_BYTES_MIN,
) -> Share:
    """Choose a writer for each distinct piece.

    nodes     the node of each rank; None: all on one
    kept      rank -> what it writes, whatever the others do: it has begun, by a plan that cut `kept_cut`
    worth_bytes, block_bytes_min  replicas are cut, into blocks of about so much and more, if the largest writer then
                                  has so much less
    raises    CollisionError  two ranks give one tensor different dtypes or shapes
              CoverageError   a tensor's boxes overlap without being equal, or leave a hole; or what is kept leaves one
    """
    node = np.zeros(len(held), np.int64) if nodes is None else np.asarray(nodes, np.int64)
    if kept_cut is not None:
        return replace(_cut_share(held, node, kept, kept_cut), replicas=_replicas_of(held))
    found = _Sharing(held, node, kept)
    cut = None if kept else found.to_cut(worth_bytes, block_bytes_min)
    if cut is None:
        return found.share
    # Less may be gained than seemed possible: nodes of few ranks have as much to write as those of many.
    in_blocks = _cut_share(held, node, kept, cut)
    gained = int(found.share.bytes.max()) - int(in_blocks.bytes.max())
    return replace(in_blocks, replicas=found.share.replicas) if gained >= worth_bytes else found.share


def _cut_share(
    held: Sequence[Held], node: NDArray[np.int64], kept: Mapping[int, NDArray[np.int64]], cut: Cut
) -> Share:
    cut_held, blocks = cut_up(held, cut)
    return replace(_Sharing(cut_held, node, kept).share, blocks=blocks, cut=cut)


def _replicas_of(held: Sequence[Held]) -> ReplicaSets:
    table = _Table(held, {})
    for number in range(table.count):
        one = table.strand(number)
        table.note_replicas(one, _groups(one.box)[0])
    return table.replicas(len(held))


def check_replicas(held: Sequence[Held], samples: Sequence[NDArray[np.uint16] | None]) -> None:
    """Raise CollisionError where boxes that several ranks hold are not the same, as far as their samples tell.

    samples  of each rank that has them: for each piece a digest of a few of its bytes
    """
    table = _Table(held, {})
    found: dict[str, tuple[int, list[int]]] = {}
    for number in range(table.count):
        one = table.strand(number)
        if one.tensor not in table.tensors.buffers:
            table.compare_replicas(number, _groups(one.box)[0], samples, found)
    if found:
        name = min(found, key=table.tensors.names.index)
        first, others = found[name]
        more = f"; nor are {len(found) - 1} other tensors" if len(found) > 1 else ""
        raise CollisionError(
            f"{name!r} is not the same on {_in_words(others)} as on rank {first}{more}",
            next="give what is not a replica a name of its own (stages and experts: their global names), "
            "make replicas equal before the save, or let each rank keep its own: fs.PerRank",
        )


def _in_words(ranks: Sequence[int]) -> str:
    """"rank 3", "ranks 3, 7"; not more than eight of them."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


class _Sharing:
    """A share, and whether it would be better with blocks."""

    def __init__(
        self, held: Sequence[Held], node: NDArray[np.int64], kept: Mapping[int, NDArray[np.int64]]
    ) -> None:
        self._table = table = _Table(held, kept)
        loads = np.zeros(len(held), np.int64)
        sets: dict[bytes, _Set] = {}
        buffers = 0
        for number in range(table.count):
            one = table.strand(number)
            group, first = _groups(one.box)
            _prove(table.tensors, one, first)
            table.note_replicas(one, group)
            length = _lengths(table.tensors, one, first)
            order, count = _choices(table.tensors, one, group, len(first))
            starts = np.cumsum(count) - count
            if one.tensor in table.tensors.buffers:
                buffers += one.size * int((np.bincount(group) > 1).sum())
                order, count, starts = order[starts], np.ones_like(count), np.arange(len(count))
            alone = order[starts[count == 1]]
            table.stop[one.row[alone]] = one.size
            np.add.at(loads, one.rank[alone], one.size * length[count == 1])
            for at in np.flatnonzero(count > 1).tolist():
                rows = order[starts[at] : starts[at] + count[at]]
                ranks = one.rank[rows]
                known = sets.setdefault(ranks.tobytes(), _Set(ranks))
                known.lots.append(_Lot(int(length[at]), one.size, one.row[rows], number))
        self._sets = list(sets.values())
        self._level = _spread(self._sets, loads, node, table)
        self.share = Share(
            held, table.writes(len(held)), loads, buffers=buffers, replicas=table.replicas(len(held))
        )

    def to_cut(self, worth_bytes: int, block_bytes_min: int) -> Cut | None:
        """What to cut; None where that can gain little."""
        largest = int(self.share.bytes.max(initial=0))
        if largest - self._level < max(worth_bytes, _EVEN * self._level):
            return None
        block_bytes = max(block_bytes_min, int(self._level * _BLOCK))
        shares = np.zeros(self._table.count)
        for one in self._sets:
            part = sum(lot.length * lot.size for lot in one.lots) / len(one.ranks)
            for lot in one.lots:
                if lot.length > 2 * block_bytes:
                    # What is dealt out whole leaves gaps of half a length in the mean: as much is cut to fill them.
                    shares[lot.number] = max(shares[lot.number], min(1.0, lot.length / part))
        names = self._table.some_of(shares)
        return Cut(names, 2 * block_bytes, block_bytes) if names else None


@dataclass(frozen=True, slots=True, eq=False)
class _Lot:
    """Equal boxes of all tensors of a class, as the same ranks hold them.

    length  in bytes, of each
    size    how many tensors there are
    row     of each of the ranks, where the table says which of them it writes
    number  of the class
    """

    length: int
    size: int
    row: NDArray[np.int64]
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class _Set:
    """Ranks that hold the same lots."""

    ranks: NDArray[np.int64]
    lots: list[_Lot] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Class:
    """The boxes of tensors that are cut alike, on all ranks: those of the first of them stand for all.

    tensor  that first one
    size    how many tensors there are
    row     where the table says which of them a rank writes
    box     padded
    begun   whether the rank has begun to write; wrote: whether it has these; None: nobody has begun
    """

    tensor: int
    size: int
    rank: NDArray[np.int64]
    row: NDArray[np.int64]
    box: NDArray[np.int64]
    begun: NDArray[np.bool_] | None
    wrote: NDArray[np.bool_] | None


class _Table:
    """What all ranks hold, by classes of tensors; and what they write of each, filled in as it is decided.

    A strand is a class on a rank: one position for each of its tensors, in the order of the tensors. The rank writes
    those from `start` to `stop`.
    """

    def __init__(self, held: Sequence[Held], kept: Mapping[int, NDArray[np.int64]]) -> None:
        self.tensors = Tensors.of(held)
        self._width = int(self.tensors.ndim.max(initial=0))
        self._whole = self.tensors.whole(self._width)
        self._forms = forms(held, self.tensors, self._width)
        self._written = [_written(form, kept) for form in self._forms]
        self._number = number = classes(self._forms, self.tensors, [_told_apart(of) for of in self._written])
        self.count = int(number.max(initial=-1)) + 1
        self._is_kept = np.zeros(len(held), np.bool_)
        self._is_kept[list(kept)] = True
        members = np.argsort(number, kind="stable")
        self._sizes = np.bincount(number, minlength=self.count)
        begins = np.cumsum(self._sizes) - self._sizes
        self._first = members[begins]
        self._ordinal = ordinal = np.empty(len(members), np.int64)
        ordinal[members] = np.arange(len(members)) - np.repeat(begins, self._sizes)
        self._strands = [_Strands.of(form, number, ordinal) for form in self._forms]
        counts = [len(form.ranks) * len(of.kind) for form, of in zip(self._forms, self._strands, strict=True)]
        self._base = np.cumsum([0, *counts])
        self._by_class: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        for at, strands in enumerate(self._strands):
            for strand, of in enumerate(strands.number.tolist()):
                self._by_class[of].append((at, strand))
        self.start = np.zeros(int(self._base[-1]), np.int32)
        self.stop = np.zeros(int(self._base[-1]), np.int32)
        self._set = np.full(int(self._base[-1]), -1, np.int32)  # of ranks that hold the same, for each row
        self._sets: dict[bytes, int] = {}

    def strand(self, number: int) -> _Class:
        """All boxes of a class."""
        ranks, rows, boxes, wrote = [], [], [], []
        tensor = int(self._first[number])
        for at, strand in self._by_class[number]:
            form, strands, written = self._forms[at], self._strands[at], self._written[at]
            kind = int(strands.kind[strand])
            ranks.append(form.ranks)
            rows.append(self._base[at] + np.arange(len(form.ranks)) * len(strands.kind) + strand)
            whole = np.broadcast_to(self._whole[tensor], (len(form.ranks), 2 * self._width))
            boxes.append(whole if kind == WHOLE else form.boxes[:, kind][form.variant])
            none = np.zeros(len(form.ranks), np.bool_)
            wrote.append(none if written is None else written[:, strands.first[strand]])
        rank = np.concatenate(ranks)
        begun = self._is_kept[rank]
        some = bool(begun.any())
        return _Class(
            tensor, int(self._sizes[number]), rank, np.concatenate(rows), np.concatenate(boxes),
            begun if some else None, np.concatenate(wrote) if some else None,
        )

    def some_of(self, shares: NDArray[np.float64]) -> frozenset[str]:
        """The names of so large a share of the tensors of each class, rounded up.

        None that another one is called like a block of: they would make one entry of a segment.
        """
        first = np.ceil(self._sizes * shares)
        chosen = self._ordinal < first[self._number]
        names = self.tensors.names
        like_blocks = {name.rpartition("[")[0] for name in names if name.endswith("]")}
        return frozenset(names[at] for at in np.flatnonzero(chosen).tolist()) - like_blocks

    def note_replicas(self, one: _Class, group: NDArray[np.int64]) -> None:
        """Remember which ranks hold the same box. `group`: of each row of the class."""
        count = np.bincount(group)
        if one.tensor in self.tensors.buffers or int(count.max(initial=0)) < 2:
            return
        order = np.argsort(group, kind="stable")
        starts = np.cumsum(count) - count
        for at in np.flatnonzero(count > 1).tolist():
            rows = order[starts[at] : starts[at] + count[at]]
            self._set[one.row[rows]] = self._sets.setdefault(np.sort(one.rank[rows]).tobytes(), len(self._sets))

    def replicas(self, ranks: int) -> ReplicaSets:
        """What was noted of all classes."""
        number: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * ranks
        sets: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * ranks
        for at, (form, strands) in enumerate(zip(self._forms, self._strands, strict=True)):
            noted = self._set[self._base[at] : self._base[at + 1]].reshape(len(form.ranks), len(strands.kind))
            known: dict[bytes, NDArray[np.int32]] = {}
            for row, rank in enumerate(form.ranks.tolist()):
                own, local = np.unique(noted[row], return_inverse=True)
                alone = int(np.searchsorted(own, 0))  # 1 where there is a -1
                pattern = (local.reshape(-1) - alone).astype(np.int32)
                sets[rank] = own[alone:]
                number[rank] = known.setdefault(pattern.tobytes(), pattern[strands.strand])
        return ReplicaSets(number, sets)

    def compare_replicas(
        self, number: int, group: NDArray[np.int64], samples: Sequence[NDArray[np.uint16] | None],
        found: dict[str, tuple[int, list[int]]],
    ) -> None:
        """Enter into `found` the tensors of a class that are not the same everywhere: the first rank, and the others.

        group  of each row of the class
        """
        known: dict[int, tuple[int, NDArray[np.uint16]]] = {}  # of each group, the first rank's
        row = 0
        for at, strand in self._by_class[number]:
            form, strands = self._forms[at], self._strands[at]
            positions = np.flatnonzero(strands.strand == strand)
            positions = positions[np.argsort(strands.ordinal[positions])]
            for rank in form.ranks.tolist():
                mine, row = samples[rank], row + 1
                if mine is None:
                    continue
                first, theirs = known.setdefault(int(group[row - 1]), (rank, mine[positions]))
                for wrong in np.flatnonzero(theirs != mine[positions]).tolist():
                    name = self.tensors.names[int(form.tensor[positions[wrong]])]
                    found.setdefault(name, (first, []))[1].append(rank)

    def writes(self, ranks: int) -> tuple[NDArray[np.int64], ...]:
        """The positions that each rank writes."""
        found: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * ranks
        for at, (form, strands) in enumerate(zip(self._forms, self._strands, strict=True)):
            shape = (len(form.ranks), len(strands.kind))
            part = slice(self._base[at], self._base[at + 1])
            start, stop = self.start[part].reshape(shape), self.stop[part].reshape(shape)
            known: dict[bytes, NDArray[np.int64]] = {}
            for row, rank in enumerate(form.ranks.tolist()):
                key = start[row].tobytes() + stop[row].tobytes()
                if key not in known:
                    if shape[1] > _STRANDS_REMEMBERED:
                        known.clear()
                    begin, end = start[row][strands.strand], stop[row][strands.strand]
                    known[key] = np.flatnonzero((strands.ordinal >= begin) & (strands.ordinal < end))
                found[rank] = known[key]
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Strands:
    """Of a form: the strand of each position and the place in it; of each strand its class, kind, first position."""

    strand: NDArray[np.int64]
    ordinal: NDArray[np.int64]
    number: NDArray[np.int64]
    kind: NDArray[np.int64]
    first: NDArray[np.int64]

    @classmethod
    def of(cls, form: Form, number: NDArray[np.int64], ordinal: NDArray[np.int64]) -> _Strands:
        occurrence = form.occurrences()
        key = number[form.tensor] * (int(occurrence.max(initial=0)) + 1) + occurrence
        _, first, strand = np.unique(key, return_index=True, return_inverse=True)
        return cls(strand.reshape(-1), ordinal[form.tensor], number[form.tensor[first]], form.kind[first], first)


def _written(form: Form, kept: Mapping[int, NDArray[np.int64]]) -> NDArray[np.bool_] | None:
    """Which positions each rank of a form has begun to write; None where no rank has begun."""
    begun = [(row, kept[rank]) for row, rank in enumerate(form.ranks.tolist()) if rank in kept]
    if not begun:
        return None
    written = np.zeros((len(form.ranks), len(form.kind)), np.bool_)
    for row, positions in begun:
        written[row, positions] = True
    return written


def _told_apart(written: NDArray[np.bool_] | None) -> NDArray[np.int64] | None:
    """A number for each position: equal where the same ranks have begun to write them."""
    if written is None or not written.size:
        return None
    ranks = np.ascontiguousarray(np.packbits(written, axis=0).T)
    columns = ranks.view(np.dtype((np.void, ranks.shape[1]))).reshape(-1)
    return np.unique(columns, return_inverse=True)[1].reshape(-1)


def _groups(boxes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The group of equal boxes that each row is in, and the first row of each group."""
    columns = boxes.astype(np.uint64)
    key = np.zeros(len(columns), np.uint64)
    for column in columns.T:
        key = (key ^ column) * _MIX[0]
        key ^= key >> np.uint64(29)
        key *= _MIX[1]
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    if not (columns == columns[first][group]).all():  # two keys are equal by chance
        _, first, group = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    return group.reshape(-1), first


def _lengths(tensors: Tensors, one: _Class, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bytes of the boxes of these rows."""
    width, ndim = one.box.shape[1] // 2, len(tensors.shapes[one.tensor])
    elements: NDArray[np.int64] = one.box[rows, width : width + ndim].prod(axis=1)
    return elements * tensors.dtypes[one.tensor].item_bytes


def _choices(
    tensors: Tensors, one: _Class, group: NDArray[np.int64], groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows that may be chosen, by group and rank, and how many there are for each group.

    One for a group that a rank has begun to write; of the others those of ranks that have not begun.
    """
    order = np.lexsort((one.rank, group))
    if one.begun is None or one.wrote is None:
        return order, np.bincount(group, minlength=groups)
    name = tensors.names[one.tensor]
    taken = np.bincount(group[one.wrote], minlength=groups)
    if (taken > 1).any():
        raise CoverageError(f"two ranks have begun to write {name!r}", next="save again: the next plan is a new one")
    usable = one.wrote | ~(one.begun | (taken > 0)[group])
    count = np.bincount(group[usable], minlength=groups)
    if (count == 0).any():
        raise CoverageError(
            f"{name!r} is held by ranks alone that have begun to write without it",
            next="save again: the next plan is a new one",
        )
    return order[usable[order]], count


def _prove(tensors: Tensors, one: _Class, first: NDArray[np.int64]) -> None:
    """Raise CoverageError unless the distinct boxes of a class hold each element of its tensors exactly once."""
    shape = tensors.shapes[one.tensor]
    width = one.box.shape[1] // 2
    offset, sides = one.box[first, : len(shape)], one.box[first, width : width + len(shape)]
    if not tiles(offset, sides, shape):
        # Seldom, and slow: boxes that do not line up. It says what is wrong, if anything is.
        boxes = [Box(tuple(o), tuple(n)) for o, n in zip(offset.tolist(), sides.tolist(), strict=True)]
        check_tiling(tensors.names[one.tensor], shape, [box for box in boxes if box.elements])


def _spread(sets: Sequence[_Set], loads: NDArray[np.int64], node: NDArray[np.int64], table: _Table) -> float:
    """Decide who writes which replicas. Fills `loads` and the table.

    Returns the bytes of the largest writer, if replicas could be cut anywhere.
    """
    found = []
    for one in sets:
        one.lots.sort(key=lambda lot: -lot.length)
        length, first = np.unique([-lot.length for lot in one.lots], return_index=True)
        size = np.add.reduceat(np.array([lot.size for lot in one.lots], np.int64), first)
        found.append(Replicas(one.ranks, -length, size))
    if not found:
        return float(loads.max(initial=0))
    chosen = spread(found, loads, node)
    for one, replicas, dealt in zip(sets, found, chosen.dealt, strict=True):
        loads[one.ranks] += replicas.length @ dealt
        _hand_out(one.lots, replicas, dealt, table)
    return chosen.level


def _hand_out(lots: Sequence[_Lot], replicas: Replicas, dealt: NDArray[np.int64], table: _Table) -> None:
    """Each rank's pieces of one length lie side by side, over all lots of that length."""
    stops = dict(zip(replicas.length.tolist(), np.cumsum(dealt, axis=1), strict=True))
    starts = {length: stops[length] - row for length, row in zip(replicas.length.tolist(), dealt, strict=True)}
    done = dict.fromkeys(stops, 0)
    for lot in lots:
        before = done[lot.length]
        table.start[lot.row] = np.clip(starts[lot.length] - before, 0, lot.size)
        table.stop[lot.row] = np.clip(stops[lot.length] - before, 0, lot.size)
        done[lot.length] += lot.size


__all__ = ["Cut", "Held", "Names", "Share", "check_replicas", "share"]
