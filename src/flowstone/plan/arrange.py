"""A checkpoint's tensors as layout rules have them, and a state's pieces as boxes of the tensors that are stored.

What a rule makes of a tensor is boxes of it, at other places and with its dimensions in another order
(`rearrange.py`). So a piece of the state is a few boxes of stored tensors, each with a view of the piece's memory: the
read plan, and the engine, know nothing of rules (docs/decisions/014).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from flowstone.format.index import Index
from flowstone.layout_rules import ConversionRule, Fuse, LayoutRule, RuleSet, Split, Stack, Unstack
from flowstone.name_patterns import bind
from flowstone.plan.match import section_of
from flowstone.plan.rearrange import Followers, Origin, rearranged
from flowstone.plan.views import strides_of
from flowstone.rules import STATE, Rename, Skip
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Piece, Pieces, Places, TensorColumns
from flowstone.table.stored import SourceTensor, StoredBox, row_major


class Lowered(msgspec.Struct, frozen=True, eq=False):
    """What is to be read for pieces of a state.

    wanted  boxes of stored tensors, under the names that the state has for what they become
    places  parallel: views of the state's memory
    rows    parallel: of the index
    zeros   memory that no stored tensor fills: padding
    """

    wanted: Pieces
    places: Places
    rows: tuple[int, ...]
    zeros: tuple[Memory, ...]


class _Part(msgspec.Struct, frozen=True):
    """A box of an arranged tensor, and where it lies in a stored one.

    row     of the index; None: it lies nowhere, and is zero
    offset  in the stored tensor
    dims    for each dimension of the stored tensor the one that runs along it; -1: one element of it
    """

    box: Box
    row: int | None
    offset: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()


class Arrangement:
    """The tensors of a checkpoint after rules: a table like the index's, whose rows are made of rows of that.

    names    every name after the rules, to a row
    tensors  the rows
    """

    def __init__(
        self, index: Index, made: Mapping[str, SourceTensor], rules: Sequence[ConversionRule | RuleSet]
    ) -> None:
        self._index, self._rules = index, rules
        rows: dict[int, int] = {}
        self._made: list[SourceTensor] = []
        names: list[str] = []
        self.names: dict[str, int] = {}
        for name, tensor in made.items():
            row = rows.setdefault(id(tensor), len(rows))
            if row == len(self._made):
                self._made.append(tensor)
                names.append(name)
            self.names[name] = row
        self.tensors = TensorColumns(
            tuple(names), tuple(one.dtype for one in self._made), tuple(one.shape for one in self._made)
        )
        self._parts: dict[int, Sequence[_Part]] = {}
        self._moved: dict[int, list[str]] = {}  # index row -> names of what is made of it
        for name, row in self.names.items():
            for stored in {box.file for box in self._made[row].boxes if box.file is not None}:
                self._moved.setdefault(stored, []).append(name)

    def rows(self) -> Mapping[str, int]:
        """Every name to its tensor's row."""
        return self.names

    def moved(self, name: str) -> Sequence[str]:
        """The names of what is made of a stored tensor; none for what is no tensor, or has no elements."""
        row = self._index.rows().get(name)
        return () if row is None else self._moved.get(row, ())

    def sources(self, name: str) -> tuple[str, ...]:
        """The stored tensors that one is made of."""
        rows = dict.fromkeys(box.file for box in self._made[self.names[name]].boxes if box.file is not None)
        return tuple(self._index.tensors.names[row] for row in rows)

    def is_as_stored(self, name: str) -> bool:
        """Whether there is a tensor of this name, and it is one that is stored, perhaps called otherwise."""
        return name in self.names and self._whole(self.names[name]) is not None

    def rearranged(self, names: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Those of `names` that are other tensors than are stored, and what each is made of."""
        return tuple(
            (name, self.sources(name)) for name in dict.fromkeys(names) if self._whole(self.names[name]) is None
        )

    def words(self, row: int) -> str:
        """How rules have made a tensor, for messages; "" for one that is stored so."""
        if self._whole(row) is not None:
            return ""
        name = self.tensors.names[row]
        sources = self.sources(name)
        rule = next((one for one in reversed(self._flat_rules()) if _makes(one, name)), None)
        shown = ", ".join(sources[:3]) + ", ..." * (len(sources) > 3)
        return f", which {'rules make' if rule is None else f'{rule} makes'} of {shown}"

    def same_bytes(self, one: int, other: int) -> bool:
        """Whether two tensors are known to have the same bytes in row-major order, with any shapes."""
        return one == other or self._compared(self._index.same_bytes, one, other)

    def equal(self, one: int, other: int) -> bool:
        """Whether two tensors are known to have the same dtype, shape and bytes."""
        a, b = self._made[one], self._made[other]
        is_same = (a.dtype, a.shape, a.boxes) == (b.dtype, b.shape, b.boxes)
        return is_same or self._compared(self._index.equal, one, other)

    def lower(self, wanted: Pieces, places: Places, rows: Sequence[int]) -> Lowered:
        """What fills each piece. `rows`, parallel to the pieces: of this table, with their shapes."""
        pieces: list[Piece] = []
        memories: list[Memory] = []
        stored: list[int] = []
        zeros: list[Memory] = []
        for position, row in enumerate(rows):
            piece = wanted[position]
            memory = places.memory(position, piece)
            whole = self._whole(row)
            if whole is not None:
                pieces.append(piece)
                memories.append(memory)
                stored.append(whole)
                continue
            for part in self._parts_of(row):
                common = piece.box.intersect(part.box)
                if common is None:
                    continue
                view = _view(memory, common.within(piece.box))
                if part.row is None:
                    zeros.append(view)
                    continue
                shape = self._index.tensors.shapes[part.row]
                pieces.append(Piece(piece.name, piece.dtype, shape, _stored_box(part, common)))
                memories.append(_turned(view, part.dims))
                stored.append(part.row)
        return Lowered(Pieces.of(pieces), Places.of(memories), tuple(stored), tuple(zeros))

    def _flat_rules(self) -> list[ConversionRule]:
        return [one for rule in self._rules for one in (rule.rules if isinstance(rule, RuleSet) else (rule,))]

    def _compared(self, compare: Callable[[int, int], bool], one: int, other: int) -> bool:
        a, b = self._whole(one), self._whole(other)
        return a is not None and b is not None and compare(a, b)

    def _whole(self, row: int) -> int | None:
        """The stored tensor that this one is, as it is; None if rules have made it."""
        made = self._made[row]
        if not made.boxes:  # without elements: whatever rules have made of it, nothing is read
            row_of = self._index.rows().get(made.name)
            return row_of if row_of is not None and self._index.tensors.shapes[row_of] == made.shape else None
        stored = made.boxes[0]
        if len(made.boxes) > 1 or stored.file is None or stored.strides is not None or stored.offset_bytes:
            return None
        shape = self._index.tensors.shapes[stored.file]
        return stored.file if made.shape == stored.box.shape == shape else None

    def _parts_of(self, row: int) -> Sequence[_Part]:
        if row not in self._parts:
            made = self._made[row]
            self._parts[row] = [part for stored in made.boxes for part in self._parts_in(stored, made.dtype.item_bytes)]
        return self._parts[row]

    def _parts_in(self, stored: StoredBox, item_bytes: int) -> Iterator[_Part]:
        """The box as parts of its stored tensor, of which place and strides tell which elements it takes."""
        if stored.file is None:
            yield _Part(stored.box, None)
            return
        shape = self._index.tensors.shapes[stored.file]
        dense = row_major(shape)
        offset, rest = [], stored.offset_bytes // item_bytes
        for stride in dense:
            at, rest = divmod(rest, stride)
            offset.append(at)
        dims = [-1] * len(shape)
        for dim, (side, stride) in enumerate(zip(stored.box.shape, strides_of(stored), strict=True)):
            if side == 1:
                continue
            along = next(d for d in range(len(shape)) if shape[d] > 1 and dense[d] <= stride)
            room = shape[along] - offset[along]
            if dense[along] != stride:  # only every n-th element: each is a part of its own
                cuts = range(1, side)
            elif side > room:  # boxes that follow each other beyond the end of this dimension of the stored tensor
                cuts = range(room, side, shape[along])
            else:
                dims[along] = dim
                continue
            for one in _cut(stored, dim, cuts, item_bytes):
                yield from self._parts_in(one, item_bytes)
            return
        yield _Part(stored.box, stored.file, tuple(offset), tuple(dims))


def arrange(
    index: Index, rules: Sequence[ConversionRule | RuleSet], location: str, sections: Collection[str],
    skipped: Sequence[Skip] = (),
) -> Arrangement:
    """Apply rules to the tensors of an index, and to the slots of optimizers in the `sections` of a state.

    skipped  what a complete set may leave out
    raises   NoTensorError, CollisionError, MismatchError, as `rearranged` does
    """
    known = index.tensors
    stored = [
        SourceTensor(name, dtype, shape, (StoredBox(Box.whole(shape), row, 0),) if 0 not in shape else ())
        for row, (name, dtype, shape) in enumerate(zip(known.names, known.dtypes, known.shapes, strict=True))
    ]
    renames = [rule for rule in rules if isinstance(rule, Rename)]

    def is_wanted(optimizer: str) -> bool:
        later = optimizer
        for rule in renames:
            later = rule.apply(later)
        return any(section_of(name, sections) in sections for name in (optimizer, later))

    def equal(one: SourceTensor, other: SourceTensor) -> bool:
        a, b = [box.file for box in one.boxes], [box.file for box in other.boxes]
        return one.boxes == other.boxes or (
            len(a) == len(b) == 1 and a[0] is not None and b[0] is not None and index.same_bytes(a[0], b[0])
        )

    origin = Origin(location, followers=Followers(is_wanted, equal), is_lenient=True)
    tensors: Mapping[str, SourceTensor] = {name: stored[row] for name, row in index.rows().items()}
    for rule in rules:
        prefix = rule.prefix if isinstance(rule, RuleSet) else None
        is_spare = partial(_is_spare, prefix=prefix or "", skipped=skipped)
        tensors = rearranged(tensors, [rule], replace(origin, is_spare=is_spare))
    return Arrangement(index, tensors, rules)


def _is_spare(name: str, prefix: str, skipped: Sequence[Skip]) -> bool:
    return not name.startswith(prefix) or any(rule.allows(name) for rule in skipped)


def _makes(rule: ConversionRule, name: str) -> bool:
    """Whether a tensor of this name may be what the rule has made."""
    if not isinstance(rule, LayoutRule):
        return False
    targets = (
        rule.targets if isinstance(rule, Split) else (rule.target,) if isinstance(rule, Fuse | Stack | Unstack) else
        (rule.name,)
    )
    path = name.partition(STATE)[2].rpartition(".")[0] if STATE in name else name
    return any(bind(target, path) is not None for target in targets)


def _cut(stored: StoredBox, dim: int, at: Sequence[int], item_bytes: int) -> Iterator[StoredBox]:
    """The box, cut along a dimension before each of the slices numbered `at`, ascending."""
    offset, shape, strides = stored.box.offset, stored.box.shape, strides_of(stored)
    for begin, end in pairwise((0, *at, shape[dim])):
        box = Box(
            (*offset[:dim], offset[dim] + begin, *offset[dim + 1 :]), (*shape[:dim], end - begin, *shape[dim + 1 :])
        )
        skipped = begin * strides[dim] * item_bytes
        yield replace(stored, box=box, offset_bytes=stored.offset_bytes + skipped, strides=strides)


def _view(memory: Memory, box: Box) -> Memory:
    """The memory of a box of a piece, in the piece's coordinates."""
    skipped = sum(at * stride for at, stride in zip(box.offset, memory.strides_bytes, strict=True))
    return replace(memory, address=memory.address + skipped, shape=box.shape)


def _turned(memory: Memory, dims: Sequence[int]) -> Memory:
    """The same memory, by the dimensions of a stored tensor."""
    shape = tuple(1 if dim < 0 else memory.shape[dim] for dim in dims)
    strides = tuple(memory.item_bytes if dim < 0 else memory.strides_bytes[dim] for dim in dims)
    return replace(memory, shape=shape, strides_bytes=strides)


def _stored_box(part: _Part, common: Box) -> Box:
    """A region of a part's box, in the stored tensor."""
    inside = common.within(part.box)
    offset = [at + (0 if dim < 0 else inside.offset[dim]) for at, dim in zip(part.offset, part.dims, strict=True)]
    return Box(tuple(offset), tuple(1 if dim < 0 else inside.shape[dim] for dim in part.dims))
