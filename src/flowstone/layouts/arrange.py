"""A checkpoint's tensors after layout rules, and which regions of stored tensors fill the tensors of a state.

A box is a rectangular region of a tensor. A rule makes a tensor from boxes of stored tensors, at other offsets and with
dimensions in another order (`rearrange.py`). So a tensor of the state is filled from a few boxes of stored tensors,
each read into a view of its memory. Neither the read plan nor the engine has to know rules (docs/decisions/014).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from flowstone.format.index import Index
from flowstone.layouts.layout_rules import ConversionRule, Fuse, LayoutRule, LoadRule, RuleSet, Split, Stack, Unstack
from flowstone.layouts.rearrange import Followers, Origin, rearrange
from flowstone.layouts.views import strides_of
from flowstone.plan.match import section_of
from flowstone.rules.load_rules import STATE, Cast, Init, Rename, Rule, Skip
from flowstone.rules.name_patterns import bind
from flowstone.table.box import Box
from flowstone.table.pieces import Memory, Piece, Pieces, Places, TensorColumns
from flowstone.table.stored import SourceTensor, StoredBox, row_major

_SECTION = "model"  # the section to which a rule set without a prefix applies, as in imports and exports


class StoredReads(msgspec.Struct, frozen=True, eq=False):
    """The reads that fill tensors of a state.

    pieces  boxes of stored tensors, with the names of the state's tensors that they fill
    places  for each of these boxes, the part of the state's memory that it fills
    rows    for each of these boxes, the index row of its stored tensor
    zeros   memory that no stored tensor fills, because it is padding
    """

    pieces: Pieces
    places: Places
    rows: tuple[int, ...]
    zeros: tuple[Memory, ...]


class _ArrangedBox(msgspec.Struct, frozen=True):
    """A region (box) of a tensor that rules have made, and where it is in a stored tensor.

    row     index row of the stored tensor; None: the box is not stored, and all zeros
    offset  where the box begins in the stored tensor: an index for each dimension
    dims    for each dimension of the stored tensor, which dimension of the box runs along it; -1: none,
            because the box has only one element there
    """

    box: Box
    row: int | None
    offset: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()


class Arrangement:
    """The tensors of a checkpoint after layout rules: a table like the index, with one row for each tensor.

    names    every name after the rules -> number of the tensor's row
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
            tuple(names), tuple(tensor.dtype for tensor in self._made), tuple(tensor.shape for tensor in self._made)
        )
        self._parts: dict[int, Sequence[_ArrangedBox]] = {}
        self._results: dict[int, list[str]] = {}  # index row -> names of the tensors that are made from it
        for name, row in self.names.items():
            for stored in {box.file for box in self._made[row].boxes if box.file is not None}:
                self._results.setdefault(stored, []).append(name)

    def rows(self) -> Mapping[str, int]:
        """For every name after the rules, the number of its tensor's row."""
        return self.names

    def results_of(self, name: str) -> Sequence[str]:
        """The names of the tensors that are made from the stored tensor `name`. Empty if that has no elements, or is
        not a tensor.
        """
        row = self._index.rows().get(name)
        return () if row is None else self._results.get(row, ())

    def sources(self, name: str) -> tuple[str, ...]:
        """The stored tensors from which a tensor is made."""
        rows = dict.fromkeys(box.file for box in self._made[self.names[name]].boxes if box.file is not None)
        return tuple(self._index.tensors.names[row] for row in rows)

    def is_unchanged(self, name: str) -> bool:
        """Whether the tensor with this name exists and no layout rule has changed it, except its name."""
        return name in self.names and self._whole(self.names[name]) is not None

    def rearranged(self, names: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The tensors of `names` that layout rules have changed, each with the stored tensors from which it is made."""
        return tuple(
            (name, self.sources(name)) for name in dict.fromkeys(names) if self._whole(self.names[name]) is None
        )

    def describe_origin(self, row: int) -> str:
        """A text for messages that says which rule made the tensor in `row` from which tensors; "" if none did."""
        if self._whole(row) is not None:
            return ""
        name = self.tensors.names[row]
        sources = self.sources(name)
        rule = next((rule for rule in reversed(self._flat_rules()) if _makes(rule, name)), None)
        shown = ", ".join(sources[:3]) + ", ..." * (len(sources) > 3)
        return f", which {'rules make' if rule is None else f'{rule} makes'} from {shown}"

    def same_bytes(self, row: int, other_row: int) -> bool:
        """Whether the tensors in two rows are known to have the same bytes in row-major order. Shapes may differ."""
        return row == other_row or self._compared(self._index.same_bytes, row, other_row)

    def equal(self, row: int, other_row: int) -> bool:
        """Whether two tensors are known to have the same dtype, shape and bytes."""
        a, b = self._made[row], self._made[other_row]
        is_same = (a.dtype, a.shape, a.boxes) == (b.dtype, b.shape, b.boxes)
        return is_same or self._compared(self._index.equal, row, other_row)

    def stored_reads(self, requested: Pieces, places: Places, rows: Sequence[int]) -> StoredReads:
        """The reads that fill the requested pieces of the state. `places`: their memory. `rows`: for each piece, the
        row of its tensor in this table.
        """
        pieces: list[Piece] = []
        memories: list[Memory] = []
        stored: list[int] = []
        zeros: list[Memory] = []
        for position, row in enumerate(rows):
            piece = requested[position]
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
                memories.append(_in_stored_order(view, part.dims))
                stored.append(part.row)
        return StoredReads(Pieces.of(pieces), Places.of(memories), tuple(stored), tuple(zeros))

    def _flat_rules(self) -> list[ConversionRule]:
        return [flat for rule in self._rules for flat in (rule.rules if isinstance(rule, RuleSet) else (rule,))]

    def _compared(self, compare: Callable[[int, int], bool], row: int, other_row: int) -> bool:
        a, b = self._whole(row), self._whole(other_row)
        return a is not None and b is not None and compare(a, b)

    def _whole(self, row: int) -> int | None:
        """The index row of a tensor that no layout rule has changed; None for a tensor that rules have made."""
        made = self._made[row]
        if not made.boxes:  # a tensor without elements, for which nothing is read
            row_of = self._index.rows().get(made.name)
            return row_of if row_of is not None and self._index.tensors.shapes[row_of] == made.shape else None
        stored = made.boxes[0]
        if len(made.boxes) > 1 or stored.file is None or stored.strides is not None or stored.offset_bytes:
            return None
        shape = self._index.tensors.shapes[stored.file]
        return stored.file if made.shape == stored.box.shape == shape else None

    def _parts_of(self, row: int) -> Sequence[_ArrangedBox]:
        if row not in self._parts:
            made = self._made[row]
            self._parts[row] = [part for stored in made.boxes for part in self._parts_in(stored, made.dtype.item_bytes)]
        return self._parts[row]

    def _parts_in(self, stored: StoredBox, item_bytes: int) -> Iterator[_ArrangedBox]:
        """Divide `stored` into boxes of its stored tensor. The offset and strides of `stored` tell which elements it
        contains.
        """
        if stored.file is None:
            yield _ArrangedBox(stored.box, None)
            return
        shape = self._index.tensors.shapes[stored.file]
        dense = row_major(shape)
        offset, rest = [], stored.offset_bytes // item_bytes
        for stride in dense:
            start, rest = divmod(rest, stride)
            offset.append(start)
        dims = [-1] * len(shape)
        for dim, (side, stride) in enumerate(zip(stored.box.shape, strides_of(stored), strict=True)):
            if side == 1:
                continue
            along = next(d for d in range(len(shape)) if shape[d] > 1 and dense[d] <= stride)
            remaining = shape[along] - offset[along]
            if dense[along] != stride:  # the box has only every n-th element, so each becomes a box of its own
                cuts = range(1, side)
            elif side > remaining:  # the box continues beyond the end of this dimension of the stored tensor
                cuts = range(remaining, side, shape[along])
            else:
                dims[along] = dim
                continue
            for cut in _cut(stored, dim, cuts, item_bytes):
                yield from self._parts_in(cut, item_bytes)
            return
        yield _ArrangedBox(stored.box, stored.file, tuple(offset), tuple(dims))


def arrange(
    index: Index, rules: Sequence[ConversionRule | RuleSet], location: str, sections: Collection[str],
    skipped: Sequence[Skip] = (),
) -> Arrangement:
    """Apply rules to the tensors of an index, and to the state tensors of optimizers in the `sections` of a state.

    skipped  Skip rules: a RuleSet that must be complete need not match the tensors that these rules match
    raises   NoTensorError, CollisionError, MismatchError, as `rearrange` does
    """
    columns = index.tensors
    stored = [
        SourceTensor(name, dtype, shape, (StoredBox(Box.whole(shape), row, 0),) if 0 not in shape else ())
        for row, (name, dtype, shape) in enumerate(zip(columns.names, columns.dtypes, columns.shapes, strict=True))
    ]
    renames = [rule for rule in rules if isinstance(rule, Rename)]

    def is_wanted(optimizer: str) -> bool:
        later = optimizer
        for rule in renames:
            later = rule.apply(later)
        return any(section_of(name, sections) in sections for name in (optimizer, later))

    def equal(tensor: SourceTensor, other: SourceTensor) -> bool:
        a, b = [box.file for box in tensor.boxes], [box.file for box in other.boxes]
        return tensor.boxes == other.boxes or (
            len(a) == len(b) == 1 and a[0] is not None and b[0] is not None and index.same_bytes(a[0], b[0])
        )

    origin = Origin(location, followers=Followers(is_wanted, equal), is_lenient=True)
    tensors: Mapping[str, SourceTensor] = {name: stored[row] for name, row in index.rows().items()}
    for rule in rules:
        prefix = rule.prefix if isinstance(rule, RuleSet) else None
        is_spare = partial(_is_spare, prefix=prefix or "", skipped=skipped)
        tensors = rearrange(tensors, [rule], replace(origin, is_spare=is_spare))
    return Arrangement(index, tensors, rules)


def arrange_for_load(
    index: Index, location: str, rules: Sequence[LoadRule], sections: Sequence[str]
) -> tuple[tuple[Rule, ...], Arrangement]:
    """Returns the rules of a load that are about names or differences (Rename, Skip, Init, Cast), and the stored
    tensors after all rules. See `arrange`.
    """
    prefix = f"{_SECTION}." if any(name.startswith(f"{_SECTION}.") for name in index.rows()) else ""
    steps = [rule.below(prefix) if isinstance(rule, RuleSet) else rule for rule in rules]
    simple: list[Rule] = []
    for rule in steps:
        parts = rule.rules if isinstance(rule, RuleSet) else (rule,)
        simple += [part for part in parts if isinstance(part, Rule)]
    skipped = [rule for rule in simple if isinstance(rule, Skip)]
    made = [rule for rule in steps if not isinstance(rule, Skip | Init | Cast)]
    return tuple(simple), arrange(index, made, location, sections, skipped)


def _is_spare(name: str, prefix: str, skipped: Sequence[Skip]) -> bool:
    return not name.startswith(prefix) or any(rule.allows(name) for rule in skipped)


def _makes(rule: ConversionRule, name: str) -> bool:
    """Whether a tensor with this name may be a result of the rule."""
    if not isinstance(rule, LayoutRule):
        return False
    targets = (
        rule.targets if isinstance(rule, Split) else (rule.target,) if isinstance(rule, Fuse | Stack | Unstack) else
        (rule.name,)
    )
    path = name.partition(STATE)[2].rpartition(".")[0] if STATE in name else name
    return any(bind(target, path) is not None for target in targets)


def _cut(stored: StoredBox, dim: int, cuts: Sequence[int], item_bytes: int) -> Iterator[StoredBox]:
    """Cut the box along dimension `dim` into several boxes. `cuts`: the index before which each cut is made, ascending.
    """
    offset, shape, strides = stored.box.offset, stored.box.shape, strides_of(stored)
    for begin, end in pairwise((0, *cuts, shape[dim])):
        box = Box(
            (*offset[:dim], offset[dim] + begin, *offset[dim + 1 :]), (*shape[:dim], end - begin, *shape[dim + 1 :])
        )
        skipped = begin * strides[dim] * item_bytes
        yield replace(stored, box=box, offset_bytes=stored.offset_bytes + skipped, strides=strides)


def _view(memory: Memory, box: Box) -> Memory:
    """The part of a piece's memory that belongs to `box`, whose indices count from the piece's beginning."""
    skipped = sum(start * stride for start, stride in zip(box.offset, memory.strides_bytes, strict=True))
    return replace(memory, address=memory.address + skipped, shape=box.shape)


def _in_stored_order(memory: Memory, dims: Sequence[int]) -> Memory:
    """The same memory, with its dimensions in the order of the stored tensor."""
    shape = tuple(1 if dim < 0 else memory.shape[dim] for dim in dims)
    strides = tuple(memory.item_bytes if dim < 0 else memory.strides_bytes[dim] for dim in dims)
    return replace(memory, shape=shape, strides_bytes=strides)


def _stored_box(part: _ArrangedBox, common: Box) -> Box:
    """The region `common` of an arranged box, in the coordinates of the stored tensor."""
    inside = common.within(part.box)
    offset = [start + (0 if dim < 0 else inside.offset[dim]) for start, dim in zip(part.offset, part.dims, strict=True)]
    return Box(tuple(offset), tuple(1 if dim < 0 else inside.shape[dim] for dim in part.dims))
