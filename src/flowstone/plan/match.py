"""Strict comparison of what a state requests with what a checkpoint stores, before any byte moves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import NoReturn, Protocol

import msgspec

from flowstone.errors import MismatchError
from flowstone.rules import Cast, Init, Rename, Rule, Skip
from flowstone.table.pieces import Alias, Piece, Pieces, TensorColumns

_LISTED_MAX = 50  # differences of one kind that a message lists; the counts include all


class StoredTable(Protocol):
    """Stored tensors by rows: an index, or what rules make of one."""

    @property
    def tensors(self) -> TensorColumns: ...

    def rows(self) -> Mapping[str, int]:
        """Every name to its tensor's row."""

    def same_bytes(self, one: int, other: int) -> bool:
        """Whether two are known to have the same bytes in row-major order, with any shapes."""

    def equal(self, one: int, other: int) -> bool:
        """Whether two are known to have the same dtype, shape and bytes."""


def _no_words(_: int) -> str:
    return ""


class Match(msgspec.Struct, frozen=True):
    """Which stored tensor to read for which requested piece.

    wanted  positions among the requested pieces, of those to be read
    rows    the table's row for each of them
    cast    names whose values are converted; initialised, skipped: names that Init and Skip allowed
    """

    wanted: tuple[int, ...]
    rows: tuple[int, ...]
    cast: tuple[str, ...]
    initialised: tuple[str, ...]
    skipped: tuple[str, ...]


class Requested(msgspec.Struct, frozen=True):
    """What a state requests from a checkpoint.

    aliases   further names of some of the pieces
    sections  the requested top-level entries; others are ignored
    """

    pieces: Sequence[Piece]
    aliases: Sequence[Alias]
    sections: Sequence[str]

    def names(self) -> Sequence[str]:
        return Pieces.of(self.pieces).names


class Available(msgspec.Struct, frozen=True):
    """What a checkpoint holds.

    names     stored tensor names, after rules, to rows of the table
    sections  the top-level entries that are equal on all ranks
    words     how rules have made the tensor of a row, for messages
    """

    table: StoredTable
    names: Mapping[str, int]
    sections: Collection[str] = ()
    words: Callable[[int], str] = _no_words


def section_of(name: str, sections: Container[str]) -> str:
    """The top-level entry of a name: the longest of `sections` that is its prefix; sections may contain dots."""
    end = len(name)
    while end != -1:
        if name[:end] in sections:
            return name[:end]
        end = name.rfind(".", 0, end)
    return name.partition(".")[0].partition("@")[0]


def renamed(names: Mapping[str, int], rules: Sequence[Rule]) -> Mapping[str, int]:
    """Stored names, after the Rename rules, to rows; MismatchError if two become the same."""
    renames = [rule for rule in rules if isinstance(rule, Rename)]
    if not renames:
        return names
    result: dict[str, int] = {}
    for name, row in names.items():
        new = rename(name, renames)
        if new in result:
            raise MismatchError(f"rename rules give two stored tensors the name {new!r}", next="correct the rules")
        result[new] = row
    return result


def rename(name: str, rules: Sequence[Rule]) -> str:
    """`name` after every Rename among `rules`, in order."""
    for rule in rules:
        if isinstance(rule, Rename):
            name = rule.apply(name)
    return name


def match(
    requested: Requested, available: Available, rules: Sequence[Rule], *, differences: Sequence[str] = (),
    elsewhere: Container[str] = (), remedy: str = "",
) -> Match:
    """Find each requested piece among the stored ones, and account for every stored tensor.

    differences  already found in values that are not tensors; raised together with ours
    elsewhere    names that other ranks request
    remedy       how to resolve the differences, if their cause is known
    raises       MismatchError that lists every difference
    """
    names = available.names
    pieces, aliases = Pieces.of(requested.pieces), requested.aliases
    alike = tuple(names) == pieces.names  # the usual case: the state that was saved, and nothing else
    rows = _rows_of(pieces, available, alike=alike)
    compared = _compare(pieces, rows, available, rules)
    unexpected = () if alike else _unexpected(requested, available, elsewhere)
    skipped = tuple(name for name in unexpected if allowed(rules, Skip, name))
    left = set(unexpected).difference(skipped)
    faults = [*differences, *compared.faults, *_untied(aliases, names, available.table, rules)]
    faults += [f"unexpected  {name}: in the checkpoint, not in your state" for name in unexpected if name in left]
    if faults and remedy:
        refuse(faults, next=remedy)
    if faults:
        refuse(faults)
    tied = [alias.name for alias in aliases if alias.name not in names and allowed(rules, Init, alias.name)]
    if isinstance(rows, range):
        wanted = stored = tuple(rows)
    else:
        wanted = tuple([position for position, row in enumerate(rows) if row is not None])
        stored = tuple([row for row in rows if row is not None])
    return Match(wanted, stored, tuple(compared.cast), (*compared.initialised, *tied), skipped)


class _Compared(msgspec.Struct, frozen=True):
    """Requested pieces that are not stored as requested: differences, and names that rules allow."""

    faults: list[str] = msgspec.field(default_factory=list)
    cast: list[str] = msgspec.field(default_factory=list)
    initialised: list[str] = msgspec.field(default_factory=list)


def _rows_of(pieces: Pieces, available: Available, *, alike: bool) -> Sequence[int | None]:
    """The table's row of each piece; None: not stored. All rows in order are a range."""
    names, table = available.names, available.table
    if alike and names is table.rows() and len(names) == len(table.tensors.names):  # no aliases
        return range(len(names))
    return [*names.values()] if alike else [*map(names.get, pieces.names)]


def _compare(
    pieces: Pieces, rows: Sequence[int | None], available: Available, rules: Sequence[Rule]
) -> _Compared:
    """Compare pieces with the tensors at `rows` of the table; None: not stored."""
    found, tensors = _Compared(), available.table.tensors
    for position in _suspects(pieces, rows, tensors):
        piece, row = pieces[position], rows[position]
        if row is None:
            if allowed(rules, Init, piece.name):
                found.initialised.append(piece.name)
            else:
                found.faults.append(f"missing     {piece.name}: {_described(piece)}, is not in the checkpoint")
            continue
        if tensors.shapes[row] != piece.shape:
            stored = f"{tensors.shapes[row]}{available.words(row)}"
            found.faults.append(f"shape       {piece.name}: wanted {piece.shape}, stored {stored}")
        if tensors.dtypes[row] != piece.dtype:
            if allowed(rules, Cast, piece.name):
                found.cast.append(piece.name)
            else:
                stored = f"{tensors.dtypes[row].name}{available.words(row)}"
                found.faults.append(f"dtype       {piece.name}: wanted {piece.dtype.name}, stored {stored}")
    return found


def _unexpected(requested: Requested, available: Available, elsewhere: Container[str]) -> tuple[str, ...]:
    """Stored tensors in the requested sections that no rank requests."""
    used = set(requested.names()).union(alias.name for alias in requested.aliases)
    known = {*requested.sections, *available.sections}
    return tuple([
        name for name in available.names if name not in used and not _is_of_a_rank(name)
        and section_of(name, known) in requested.sections and name not in elsewhere
    ])


def _suspects(pieces: Pieces, rows: Sequence[int | None], tensors: TensorColumns) -> list[int]:
    """Positions of the pieces that are not stored as requested, ascending."""
    if isinstance(rows, range):
        if (tensors.shapes, tensors.dtypes) == (pieces.shapes, pieces.dtypes):
            return []
    elif len(stored := [row for row in rows if row is not None]) == len(rows):
        shapes, dtypes = map(tensors.shapes.__getitem__, stored), map(tensors.dtypes.__getitem__, stored)
        if (tuple(shapes), tuple(dtypes)) == (pieces.shapes, pieces.dtypes):
            return []
    requested = zip(rows, pieces.shapes, pieces.dtypes, strict=True)
    return [
        position for position, (row, shape, dtype) in enumerate(requested)
        if row is None or (tensors.shapes[row], tensors.dtypes[row]) != (shape, dtype)
    ]


def _is_of_a_rank(name: str) -> bool:
    """Whether the name is in a section with per-rank values."""
    return "@" in name.partition(".")[0]


def allowed(rules: Sequence[Rule], kind: type[Init | Skip | Cast], name: str) -> bool:
    """Whether a rule of that kind matches `name`."""
    return any(isinstance(rule, kind) and rule.allows(name) for rule in rules)


def _described(piece: Piece) -> str:
    return f"{piece.dtype.name} {piece.shape}"


def stored_equal(table: StoredTable, names: Mapping[str, int], one: str, other: str) -> bool:
    """Whether two names are known to have the same stored tensor, or an equal one; True also where one is not stored.
    """
    a, b = names.get(one), names.get(other)
    return a is None or b is None or a == b or table.equal(a, b)


def _untied(aliases: Sequence[Alias], names: Mapping[str, int], table: StoredTable, rules: Sequence[Rule]) -> list[str]:
    """Differences for tensors that share memory in the state, but are stored separately and are not equal."""
    faults = []
    for alias in aliases:
        if alias.name not in names:
            if not allowed(rules, Init, alias.name):
                faults.append(f"missing     {alias.name} (tied to {alias.target}): is not in the checkpoint")
        elif not stored_equal(table, names, alias.name, alias.target):
            faults.append(f"tied        {alias.name}: shares memory with {alias.target}, stored with different values")
    return faults


def refuse(
    faults: Sequence[str], what: str = "state and checkpoint differ",
    next: str = "load into the model that was saved, or allow what differs by a rule (fs.Rename, Skip, Init, Cast)",
) -> NoReturn:
    """Raise MismatchError with all `faults`."""
    shown = "\n".join(faults[:_LISTED_MAX])
    if len(faults) > _LISTED_MAX:
        shown += f"\n... and {len(faults) - _LISTED_MAX} more"
    raise MismatchError(
        f"{what} in {len(faults)} place{'s' * (len(faults) > 1)}; nothing was changed",
        differences=tuple(faults), found=shown, next=next,
    )
