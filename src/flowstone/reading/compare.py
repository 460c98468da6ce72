"""Compares the tensors that a state needs with those of a checkpoint, before any byte of the state changes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone.errors import ArgumentError
from flowstone.extensions import extension
from flowstone.plan.match import (
    CheckpointTensors,
    Match,
    StateRequest,
    StoredTable,
    apply_renames,
    is_allowed,
    match,
    rename,
    section_of,
    stored_equal,
)
from flowstone.reading.checkpoint import Checkpoint
from flowstone.rules.load_rules import Init, Rename, Rule, Skip
from flowstone.stage.overlap import LoadTargets, find_overlap_groups
from flowstone.state import (
    Restoration,
    StoredState,
    TensorSpec,
    find_state_dicts,
    prepare,
    warn_state_dict_loaded,
    wrapped_sections,
)
from flowstone.state.names import strip_wrappers
from flowstone.table.pieces import Places, TensorColumns

if TYPE_CHECKING:
    from flowstone.layouts.arrange import Arrangement
    from flowstone.layouts.layout_rules import LoadRule


class LoadRequest(msgspec.Struct, frozen=True, eq=False):
    """The tensors and objects that a state needs from a checkpoint.

    rules        the Rename, Skip, Init and Cast rules, including those from rule sets
    names        name of each stored tensor, after the rules -> its row of `table`
    arrangement  the stored tensors after layout rules; None: there are no such rules
    """

    checkpoint: Checkpoint
    rules: Sequence[Rule]
    names: Mapping[str, int]
    restoration: Restoration
    arrangement: Arrangement | None = None

    @property
    def table(self) -> StoredTable:
        """The table of stored tensors, with the names and shapes that they have after layout rules."""
        return self.checkpoint.index if self.arrangement is None else self.arrangement

    def needed_names(self) -> NDArray[np.bool_]:
        """For each of `names`, in order, whether this rank needs the tensor."""
        aliases = [alias.name for alias in self.restoration.aliases]
        used = {*self.restoration.pieces.names, *aliases}
        return np.array([name in used for name in self.names], np.bool_)

    def unneeded_objects(self) -> dict[str, list[str]]:
        """For each requested section, the names of stored values that are not tensors and that this rank does not need.
        """
        names: dict[str, list[str]] = {section: [] for section in self.restoration.sections}
        for difference in self.restoration.differences:
            if difference.kind == "unexpected":
                section = section_of(difference.name, self.restoration.sections)
                names.setdefault(section, []).append(difference.name)
        return names


def request_load(
    checkpoint: Checkpoint, state: Mapping[str, object], *, rules: Sequence[LoadRule], rank: int = 0, ranks: int = 1
) -> LoadRequest:
    """Find the memory into which the checkpoint's tensors will be loaded. Changes nothing.

    raises  DamagedError, StateError; MismatchError if a rule gives two tensors the same name; with layout rules also
            NoTensorError and CollisionError
    """
    checkpoint.check()
    sections = [*checkpoint.objects, *checkpoint.contents.per_rank]
    if isinstance(state, Mapping) and not state and sections:
        raise ArgumentError(
            "load: the state is empty, so nothing would be loaded", checkpoint=", ".join(sections[:10]),
            next="pass the objects to load into, under these names: {'model': model, ...}",
        )
    if isinstance(state, Mapping):
        if idiom := find_state_dicts(state, modules=False):
            warn_state_dict_loaded(idiom)
        rules = (*rules, *map(_Unwrap, wrapped_sections(state, checkpoint.objects)))
    simple = tuple(rule for rule in rules if isinstance(rule, Rule))
    if len(simple) == len(rules):
        names = apply_renames(checkpoint.index.rows(), simple)
        stored = _stored(checkpoint, names, simple, rank)
        return LoadRequest(checkpoint, simple, names, prepare(state, stored, rank=rank, ranks=ranks))
    simple, arrangement = extension("layouts")(checkpoint.index, checkpoint.path, rules, list(state))
    stored = _stored_as(arrangement, _stored(checkpoint, arrangement.names, simple, rank))
    restoration = prepare(state, stored, rank=rank, ranks=ranks)
    return LoadRequest(checkpoint, simple, arrangement.names, restoration, arrangement)


def _stored_as(arrangement: Arrangement, stored: StoredState) -> StoredState:
    """`stored`, with the names and shapes that its tensors have after all rules, including layout rules."""
    first = dict[int, str]()
    tied = {name: first.setdefault(row, name) for name, row in arrangement.names.items()}

    def rename(name: str) -> str:
        """The name of a stored tensor in the state: if layout rules made exactly one tensor from it, the name of that
        tensor; otherwise the name by the Rename rules.
        """
        targets = arrangement.results_of(name)
        is_single = len(targets) == 1 and len(arrangement.sources(targets[0])) == 1
        return targets[0] if is_single else stored.rename(name)

    return replace(
        stored, tensors=_Tensors(arrangement.tensors, arrangement.names), rename=rename, moved=arrangement.results_of,
        tied={name: target for name, target in tied.items() if name != target},
        equal=partial(stored_equal, arrangement, arrangement.names),
    )


def compare(request: LoadRequest, elsewhere: Container[str], unwanted: Container[str] | None) -> Match:
    """Find the needed pieces among the stored ones.

    elsewhere  stored tensors that other ranks need
    unwanted   stored objects that no rank needs; None: those that this rank does not need
    raises     MismatchError that lists every difference that no rule allows
    """
    rules, restoration = request.rules, request.restoration
    left = [d for d in restoration.differences if d.kind == "unexpected"]
    skipped = tuple(d.name for d in left if is_allowed(rules, Skip, d.name))
    silent = {*skipped, *(d.name for d in left if unwanted is not None and d.name not in unwanted)}
    others = [
        f"{d.kind:<11} {d.name}: wanted {d.expected}, stored {d.stored}" for d in restoration.differences
        if d.kind != "unexpected" or d.name not in silent
    ]
    matched = match(
        StateRequest(restoration.pieces, restoration.aliases, restoration.sections),
        CheckpointTensors(request.table, request.names, request.checkpoint.contents.replicated, *_words(request)),
        rules,
        differences=others, other_rank_names=elsewhere, remedy=_remedy(request),
    )
    _check_shared(request, matched)
    return replace(matched, skipped=(*matched.skipped, *skipped))


def _words(request: LoadRequest) -> Sequence[Callable[[int], str]]:
    return () if request.arrangement is None else (request.arrangement.describe_origin,)


class _Unwrap(Rename):
    """Removes the prefixes of module wrappers from names below a section; see `wrapped_sections`."""

    def __init__(self, section: str) -> None:
        super().__init__(section, section)

    def moved(self, name: str) -> str | None:
        head = f"{self.source}."
        return head + strip_wrappers(name.removeprefix(head)) if name.startswith(head) else None


def _remedy(request: LoadRequest) -> str:
    """A text that says how to resolve the differences, if their cause is known; otherwise ""."""
    remedies, checkpoint = request.restoration.remedies, request.checkpoint
    if remedies:
        return "; ".join(dict.fromkeys(remedies))
    sections = [*checkpoint.objects, *checkpoint.contents.per_rank]
    available = {rename(section, request.rules) for section in sections}
    absent = [section for section in request.restoration.sections if section not in available]
    if not absent or not sections:
        return ""
    return (
        f"the checkpoint has no {', '.join(map(repr, absent[:5]))}; it has {', '.join(map(repr, sections[:10]))}: use "
        "these names in your state, or map them with fs.Rename(stored, wanted)"
    )


def _check_shared(request: LoadRequest, matched: Match) -> None:
    """Raise MismatchError if tensors of the state share memory and different bytes would be loaded into it. To compare
    the bytes, reads the stored tensors.
    """
    restoration, positions = request.restoration, matched.positions
    indirect = restoration.indirect and {
        number: restoration.indirect[position]
        for number, position in enumerate(positions) if position in restoration.indirect
    }
    pieces, places = restoration.pieces.take(positions), restoration.places.take(positions)
    targets = LoadTargets(pieces, places, request.table, matched.rows, indirect)
    groups = find_overlap_groups(targets)
    if not groups:
        return
    from flowstone.stage.read_pieces import read_pieces  # imported here: few states have tensors that share memory
    from flowstone.stage.shared_memory import refuse_conflicts

    def read(some: Sequence[int], fresh: Places) -> None:
        some_pieces, rows = pieces.take(some), tuple(matched.rows[position] for position in some)
        if request.arrangement is not None:
            lowered = request.arrangement.stored_reads(some_pieces, fresh, rows)
            some_pieces, fresh, rows = lowered.pieces, lowered.places, lowered.rows
        read_pieces(request.checkpoint.source, some_pieces, fresh, rows, into_state=False)

    refuse_conflicts(targets, groups, read)


class _Tensors(Mapping[str, TensorSpec]):
    """The stored tensors by their names in the state. The TensorSpec of a tensor is created when it is accessed."""

    def __init__(self, tensors: TensorColumns, rows: Mapping[str, int]) -> None:
        self._tensors, self._rows = tensors, rows

    def __getitem__(self, name: str) -> TensorSpec:
        row, tensors = self._rows[name], self._tensors
        return TensorSpec(tensors.dtypes[row], tensors.shapes[row])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def describe_stored(checkpoint: Checkpoint, rank: int) -> StoredState:
    """A checkpoint's tensors and values for rank `rank`, as they are stored: no rule of a load (Rename, Skip, Init,
    or a layout rule) is applied.
    """
    return _stored(checkpoint, checkpoint.index.rows(), (), rank)


def _stored(checkpoint: Checkpoint, names: Mapping[str, int], rules: Sequence[Rule], rank: int) -> StoredState:
    """A checkpoint's tensors (dtypes and shapes, no bytes) and all its other values, by their names after the rules."""
    index, content = checkpoint.index, checkpoint.contents
    tied = {rename(alias, rules): rename(index.tensors.names[row], rules) for alias, row in index.aliases}
    return StoredState(
        tensors=_Tensors(index.tensors, names), objects=content.replicated,
        per_rank={section: values[rank % len(values)] for section, values in content.per_rank.items() if values},
        by_rank=content.per_rank,
        rename=partial(rename, rules=rules), tied=tied, equal=partial(stored_equal, index, names),
        may_be_left=partial(is_allowed, rules, Skip), may_be_absent=partial(is_allowed, rules, Init),
    )
