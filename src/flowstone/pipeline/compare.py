"""Compare what a state needs with what a checkpoint holds, before a byte of the state changes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flowstone.checkpoint import Checkpoint
from flowstone.errors import ArgumentError
from flowstone.plan.match import (
    Available,
    Match,
    Requested,
    StoredTable,
    allowed,
    match,
    rename,
    renamed,
    section_of,
    stored_equal,
)
from flowstone.rules import Cast, Init, Rename, Rule, Skip
from flowstone.stage.overlap import LoadTargets, candidates
from flowstone.state import Restoration, Stored, StoredTensor, found_in, prepare, warn_of_load, wrapped_sections
from flowstone.state.names import strip_wrappers
from flowstone.table.pieces import Places, TensorColumns

if TYPE_CHECKING:
    from flowstone.layout_rules import LoadRule
    from flowstone.plan.arrange import Arrangement


class Wanted(msgspec.Struct, frozen=True, eq=False):
    """What a state needs of a checkpoint.

    rules        about names and differences; those of sets too
    names        stored tensor names, after rules, to rows of `table`
    arrangement  what rules about layouts make of the index; None: there are none
    """

    checkpoint: Checkpoint
    rules: Sequence[Rule]
    names: Mapping[str, int]
    restoration: Restoration
    arrangement: Arrangement | None = None

    @property
    def table(self) -> StoredTable:
        """The tensors as the state is to find them."""
        return self.checkpoint.index if self.arrangement is None else self.arrangement

    def names_used(self) -> NDArray[np.bool_]:
        """A mask over the stored names: which of them this rank needs."""
        aliases = [alias.name for alias in self.restoration.aliases]
        used = {*self.restoration.pieces.names, *aliases}
        return np.array([name in used for name in self.names], np.bool_)

    def unwanted(self) -> dict[str, list[str]]:
        """By requested section: names of stored objects that are not tensors and that this rank does not need."""
        found: dict[str, list[str]] = {section: [] for section in self.restoration.sections}
        for difference in self.restoration.differences:
            if difference.kind == "unexpected":
                section = section_of(difference.name, self.restoration.sections)
                found.setdefault(section, []).append(difference.name)
        return found


def want(
    checkpoint: Checkpoint, state: Mapping[str, object], *, rules: Sequence[LoadRule], rank: int = 0, ranks: int = 1
) -> Wanted:
    """Find the memory that the checkpoint's bytes are to be loaded into. Changes nothing.

    raises  DamagedError, StateError, MismatchError (two names become the same); with rules about layouts also
            NoTensorError, CollisionError
    """
    checkpoint.check()
    sections = [*checkpoint.objects, *checkpoint.contents.per_rank]
    if isinstance(state, Mapping) and not state and sections:
        raise ArgumentError(
            "load: the state is empty, so nothing would be loaded", checkpoint=", ".join(sections[:10]),
            next="pass the objects to load into, under these names: {'model': model, ...}",
        )
    if isinstance(state, Mapping):
        if idiom := found_in(state, modules=False):
            warn_of_load(idiom)
        rules = (*rules, *map(_Unwrap, wrapped_sections(state, checkpoint.objects)))
    simple = tuple(rule for rule in rules if isinstance(rule, _SIMPLE))
    if len(simple) == len(rules):
        names = renamed(checkpoint.index.rows(), simple)
        stored = _stored(checkpoint, names, simple, rank)
        return Wanted(checkpoint, simple, names, prepare(state, stored, rank=rank, ranks=ranks))
    simple, arrangement = _arranged(checkpoint, rules, list(state))
    stored = _stored_as(arrangement, _stored(checkpoint, arrangement.names, simple, rank))
    restoration = prepare(state, stored, rank=rank, ranks=ranks)
    return Wanted(checkpoint, simple, arrangement.names, restoration, arrangement)


_SIMPLE = (Rename, Skip, Init, Cast)
_SECTION = "model"  # of whose tensors a set speaks, as in imports and exports


def _arranged(
    checkpoint: Checkpoint, rules: Sequence[LoadRule], sections: Sequence[str]
) -> tuple[tuple[Rule, ...], Arrangement]:
    """The rules about names and differences, and what all of them make of the stored tensors."""
    from flowstone.layout_rules import RuleSet  # imported here: most loads have no such rules
    from flowstone.plan.arrange import arrange

    index = checkpoint.index
    prefix = f"{_SECTION}." if any(name.startswith(f"{_SECTION}.") for name in index.rows()) else ""
    steps = [rule.below(prefix) if isinstance(rule, RuleSet) else rule for rule in rules]
    simple: list[Rule] = []
    for rule in steps:
        of = rule.rules if isinstance(rule, RuleSet) else (rule,)
        simple += [one for one in of if isinstance(one, _SIMPLE)]
    skipped = [rule for rule in simple if isinstance(rule, Skip)]
    made = [rule for rule in steps if not isinstance(rule, Skip | Init | Cast)]
    return tuple(simple), arrange(index, made, checkpoint.path, sections, skipped)


def _stored_as(arrangement: Arrangement, stored: Stored) -> Stored:
    """The same, by the names and shapes that the rules make."""
    first = dict[int, str]()
    tied = {name: first.setdefault(row, name) for name, row in arrangement.names.items()}

    def rename(name: str) -> str:
        """Of what is made of several tensors, or several of one, no name says where it is now."""
        found = arrangement.moved(name)
        return found[0] if len(found) == 1 and len(arrangement.sources(found[0])) == 1 else stored.rename(name)

    return replace(
        stored, tensors=_Tensors(arrangement.tensors, arrangement.names), rename=rename, moved=arrangement.moved,
        tied={name: target for name, target in tied.items() if name != target},
        equal=partial(stored_equal, arrangement, arrangement.names),
    )


def compare(found: Wanted, elsewhere: Container[str], unwanted: Container[str] | None) -> Match:
    """Find the needed pieces among the stored ones.

    elsewhere  stored tensors that other ranks need
    unwanted   stored objects that no rank needs; None: this rank alone decides
    raises     MismatchError for every difference that no rule allows
    """
    rules, restoration = found.rules, found.restoration
    left = [d for d in restoration.differences if d.kind == "unexpected"]
    skipped = tuple(d.name for d in left if allowed(rules, Skip, d.name))
    silent = {*skipped, *(d.name for d in left if unwanted is not None and d.name not in unwanted)}
    others = [
        f"{d.kind:<11} {d.name}: wanted {d.expected}, stored {d.found}" for d in restoration.differences
        if d.kind != "unexpected" or d.name not in silent
    ]
    matched = match(
        Requested(restoration.pieces, restoration.aliases, restoration.sections),
        Available(found.table, found.names, found.checkpoint.contents.replicated, *_words(found)), rules,
        differences=others, elsewhere=elsewhere, remedy=_remedy(found),
    )
    _check_shared(found, matched)
    return replace(matched, skipped=(*matched.skipped, *skipped))


def _words(found: Wanted) -> Sequence[Callable[[int], str]]:
    return () if found.arrangement is None else (found.arrangement.words,)


class _Unwrap(Rename):
    """Removes from names below a section what module wrappers have added; see `wrapped_sections`."""

    def __init__(self, section: str) -> None:
        super().__init__(section, section)

    def moved(self, name: str) -> str | None:
        head = f"{self.source}."
        return head + strip_wrappers(name.removeprefix(head)) if name.startswith(head) else None


def _remedy(found: Wanted) -> str:
    """How to resolve differences with a known cause; "" if it is unknown."""
    remedies, checkpoint = found.restoration.remedies, found.checkpoint
    if remedies:
        return "; ".join(dict.fromkeys(remedies))
    sections = [*checkpoint.objects, *checkpoint.contents.per_rank]
    known = {rename(section, found.rules) for section in sections}
    absent = [section for section in found.restoration.sections if section not in known]
    if not absent or not sections:
        return ""
    return (
        f"the checkpoint has no {', '.join(map(repr, absent[:5]))}; it has {', '.join(map(repr, sections[:10]))}: use "
        "these names in your state, or map them with fs.Rename(stored, wanted)"
    )


def _check_shared(found: Wanted, matched: Match) -> None:
    """Raise MismatchError if different bytes would be loaded into the same memory. Reads tensors that share memory."""
    restoration, positions = found.restoration, matched.wanted
    indirect = restoration.indirect and {
        at: restoration.indirect[position] for at, position in enumerate(positions) if position in restoration.indirect
    }
    pieces, places = restoration.pieces.take(positions), restoration.places.take(positions)
    targets = LoadTargets(pieces, places, found.table, matched.rows, indirect)
    groups = candidates(targets)
    if not groups:
        return
    from flowstone.stage.read_pieces import read_pieces  # imported here: most states have no views
    from flowstone.stage.shared_memory import refuse_conflicts

    def read(some: Sequence[int], fresh: Places) -> None:
        wanted, rows = pieces.take(some), tuple(matched.rows[at] for at in some)
        if found.arrangement is not None:
            lowered = found.arrangement.lower(wanted, fresh, rows)
            wanted, fresh, rows = lowered.wanted, lowered.places, lowered.rows
        read_pieces(found.checkpoint.source, wanted, fresh, rows, into_state=False)

    refuse_conflicts(targets, groups, read)


class _Tensors(Mapping[str, StoredTensor]):
    """The stored tensors by their names in the state; records are made on access."""

    def __init__(self, tensors: TensorColumns, rows: Mapping[str, int]) -> None:
        self._tensors, self._rows = tensors, rows

    def __getitem__(self, name: str) -> StoredTensor:
        row, tensors = self._rows[name], self._tensors
        return StoredTensor(tensors.dtypes[row], tensors.shapes[row])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def stored_of(checkpoint: Checkpoint, rank: int) -> Stored:
    """A checkpoint's content as it is, without rules."""
    return _stored(checkpoint, checkpoint.index.rows(), (), rank)


def _stored(checkpoint: Checkpoint, names: Mapping[str, int], rules: Sequence[Rule], rank: int) -> Stored:
    """What the state layer needs to know about a checkpoint before a byte is read."""
    index, content = checkpoint.index, checkpoint.contents
    tied = {rename(alias, rules): rename(index.tensors.names[row], rules) for alias, row in index.aliases}
    return Stored(
        tensors=_Tensors(index.tensors, names), objects=content.replicated,
        per_rank={section: values[rank % len(values)] for section, values in content.per_rank.items() if values},
        by_rank=content.per_rank,
        rename=partial(rename, rules=rules), tied=tied, equal=partial(stored_equal, index, names),
        may_be_left=partial(allowed, rules, Skip), may_be_absent=partial(allowed, rules, Init),
    )
