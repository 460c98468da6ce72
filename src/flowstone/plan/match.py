"""Strict comparison of the tensors that a state requests with those in a checkpoint, before any byte moves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import NoReturn, Protocol

import msgspec

from flowstone.errors import MismatchError
from flowstone.rules.load_rules import Cast, Init, Rename, Rule, Skip
from flowstone.table.pieces import Alias, Piece, Pieces, TensorColumns

_LISTED_MAX = 50  # a message lists at most this many differences, and says how many there are


class StoredTable(Protocol):
    """A table of stored tensors, one row each: the index, or an Arrangement of its tensors by layout rules."""

    @property
    def tensors(self) -> TensorColumns: ...

    def rows(self) -> Mapping[str, int]:
        """For every name, the row of its tensor in this table."""

    def same_bytes(self, row: int, other_row: int) -> bool:
        """Whether two tensors are known to have the same bytes in row-major order, with any shapes."""

    def equal(self, row: int, other_row: int) -> bool:
        """Whether two tensors are known to have the same dtype, shape and bytes."""


def _no_words(_: int) -> str:
    return ""


class Match(msgspec.Struct, frozen=True):
    """Which stored tensor to read for which requested piece.

    positions    positions of the requested pieces that are read
    rows         for each of these pieces, the row of its tensor in the table of stored tensors
    cast         names of tensors whose values are converted (rule Cast)
    initialised  names of tensors that the checkpoint lacks, which the rule Init allows
    skipped      names of tensors that the state lacks, which the rule Skip allows
    """

    positions: tuple[int, ...]
    rows: tuple[int, ...]
    cast: tuple[str, ...]
    initialised: tuple[str, ...]
    skipped: tuple[str, ...]


class StateRequest(msgspec.Struct, frozen=True):
    """The tensors that a state requests from a checkpoint.

    aliases   additional names of some pieces (tied tensors)
    sections  the requested top-level entries; others are ignored
    """

    pieces: Sequence[Piece]
    aliases: Sequence[Alias]
    sections: Sequence[str]

    def names(self) -> Sequence[str]:
        return Pieces.of(self.pieces).names


class CheckpointTensors(msgspec.Struct, frozen=True):
    """The tensors of a checkpoint.

    table            the stored tensors, one row each; after layout rules, if the load has any
    names            each name of a stored tensor, after the load's rules are applied -> the tensor's row in `table`
    sections         the sections that are equal on all ranks
    describe_origin  a function of a row in `table`. It returns a text for messages: which rule made the row's tensor,
                     and from which stored tensors; "" if no rule made it
    """

    table: StoredTable
    names: Mapping[str, int]
    sections: Collection[str] = ()
    describe_origin: Callable[[int], str] = _no_words


def section_of(name: str, sections: Container[str]) -> str:
    """The section of a tensor's name: the longest of `sections` with which the name begins. Sections may contain dots.
    """
    end = len(name)
    while end != -1:
        if name[:end] in sections:
            return name[:end]
        end = name.rfind(".", 0, end)
    return name.partition(".")[0].partition("@")[0]


def apply_renames(names: Mapping[str, int], rules: Sequence[Rule]) -> Mapping[str, int]:
    """The table `names` (name -> row), with names changed by the Rename rules. Raises MismatchError if two tensors get
    the same name.
    """
    renames = [rule for rule in rules if isinstance(rule, Rename)]
    if not renames:
        return names
    result: dict[str, int] = {}
    for name, row in names.items():
        new = rename(name, renames)
        if new in result:
            raise MismatchError(
                f"rules fs.Rename give two stored tensors the name {new!r}", next="correct one of these rules"
            )
        result[new] = row
    return result


def rename(name: str, rules: Sequence[Rule]) -> str:
    """The name that `name` gets if every Rename among `rules` is applied, in order."""
    for rule in rules:
        if isinstance(rule, Rename):
            name = rule.apply(name)
    return name


def match(
    requested: StateRequest, available: CheckpointTensors, rules: Sequence[Rule], *, differences: Sequence[str] = (),
    other_rank_names: Container[str] = (), remedy: str = "",
) -> Match:
    """Find the stored tensor of each requested piece, and check that every stored tensor is requested.

    differences       differences in values that are not tensors; the error lists them together with those of tensors
    other_rank_names  names of tensors that other ranks request
    remedy            a text that says how to resolve the differences, if their cause is known; otherwise ""
    raises            MismatchError with every difference
    """
    names = available.names
    pieces, aliases = Pieces.of(requested.pieces), requested.aliases
    alike = tuple(names) == pieces.names  # usually True, as the state is usually the one that was saved
    rows = _rows_of(pieces, available, alike=alike)
    compared = _compare(pieces, rows, available, rules)
    unexpected = () if alike else _unexpected(requested, available, other_rank_names)
    skipped = tuple(name for name in unexpected if is_allowed(rules, Skip, name))
    left = set(unexpected).difference(skipped)
    faults = [*differences, *compared.faults, *_untied(aliases, names, available.table, rules)]
    faults += [f"unexpected  {name}: in the checkpoint, not in your state" for name in unexpected if name in left]
    if faults and remedy:
        raise_mismatch(faults, next=remedy)
    if faults:
        raise_mismatch(faults)
    tied = [alias.name for alias in aliases if alias.name not in names and is_allowed(rules, Init, alias.name)]
    if isinstance(rows, range):
        positions = stored = tuple(rows)
    else:
        positions = tuple([position for position, row in enumerate(rows) if row is not None])
        stored = tuple([row for row in rows if row is not None])
    return Match(positions, stored, tuple(compared.cast), (*compared.initialised, *tied), skipped)


class _Differences(msgspec.Struct, frozen=True):
    """Requested pieces that are not stored as requested: texts for those that no rule allows, and names of the others.
    """

    faults: list[str] = msgspec.field(default_factory=list)
    cast: list[str] = msgspec.field(default_factory=list)
    initialised: list[str] = msgspec.field(default_factory=list)


def _rows_of(pieces: Pieces, available: CheckpointTensors, *, alike: bool) -> Sequence[int | None]:
    """For each piece, the row of its tensor in `available.table`; None: the tensor is not stored. A `range` if the
    pieces need all rows in order.
    """
    names, table = available.names, available.table
    if alike and names is table.rows() and len(names) == len(table.tensors.names):  # there are no aliases
        return range(len(names))
    return [*names.values()] if alike else [*map(names.get, pieces.names)]


def _compare(
    pieces: Pieces, rows: Sequence[int | None], available: CheckpointTensors, rules: Sequence[Rule]
) -> _Differences:
    """Compare pieces with the tensors in `rows` of the table. A row None means that the tensor is not stored."""
    compared, tensors = _Differences(), available.table.tensors
    for position in _suspects(pieces, rows, tensors):
        piece, row = pieces[position], rows[position]
        if row is None:
            if is_allowed(rules, Init, piece.name):
                compared.initialised.append(piece.name)
            else:
                compared.faults.append(f"missing     {piece.name}: {_described(piece)}, is not in the checkpoint")
            continue
        if tensors.shapes[row] != piece.shape:
            stored = f"{tensors.shapes[row]}{available.describe_origin(row)}"
            compared.faults.append(f"shape       {piece.name}: wanted {piece.shape}, stored {stored}")
        if tensors.dtypes[row] != piece.dtype:
            if is_allowed(rules, Cast, piece.name):
                compared.cast.append(piece.name)
            else:
                stored = f"{tensors.dtypes[row].name}{available.describe_origin(row)}"
                compared.faults.append(f"dtype       {piece.name}: wanted {piece.dtype.name}, stored {stored}")
    return compared


def _unexpected(requested: StateRequest, available: CheckpointTensors, elsewhere: Container[str]) -> tuple[str, ...]:
    """Stored tensors in the requested sections that no rank requests."""
    used = set(requested.names()).union(alias.name for alias in requested.aliases)
    sections = {*requested.sections, *available.sections}
    return tuple([
        name for name in available.names if name not in used and not _is_of_a_rank(name)
        and section_of(name, sections) in requested.sections and name not in elsewhere
    ])


def _suspects(pieces: Pieces, rows: Sequence[int | None], tensors: TensorColumns) -> list[int]:
    """Positions of the pieces that are not stored, or are stored with another dtype or shape; ascending."""
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


def is_allowed(rules: Sequence[Rule], kind: type[Init | Skip | Cast], name: str) -> bool:
    """Whether a rule of that kind matches `name`."""
    return any(isinstance(rule, kind) and rule.allows(name) for rule in rules)


def _described(piece: Piece) -> str:
    return f"{piece.dtype.name} {piece.shape}"


def stored_equal(table: StoredTable, names: Mapping[str, int], name: str, other_name: str) -> bool:
    """Whether two names are known to have the same stored tensor or equal ones; also True if one is not stored."""
    a, b = names.get(name), names.get(other_name)
    return a is None or b is None or a == b or table.equal(a, b)


def _untied(aliases: Sequence[Alias], names: Mapping[str, int], table: StoredTable, rules: Sequence[Rule]) -> list[str]:
    """Texts about tensors that share memory in the state, but are not stored, or are stored separately and may have
    different values.
    """
    faults = []
    for alias in aliases:
        if alias.name not in names:
            if not is_allowed(rules, Init, alias.name):
                faults.append(f"missing     {alias.name} (shares memory with {alias.target}): is not in the checkpoint")
        elif not stored_equal(table, names, alias.name, alias.target):
            faults.append(
                f"tied        {alias.name}: shares memory with {alias.target}, but their stored values differ"
            )
    return faults


def raise_mismatch(
    faults: Sequence[str], subject: str = "state and checkpoint differ",
    next: str = "load into the model that was saved, or allow the differences by rules (fs.Rename, Skip, Init, Cast)",
) -> NoReturn:
    """Raise MismatchError with all `faults`."""
    shown = "\n".join(faults[:_LISTED_MAX])
    if len(faults) > _LISTED_MAX:
        shown += f"\n... and {len(faults) - _LISTED_MAX} more"
    raise MismatchError(
        f"{subject} in {len(faults)} place{'s' * (len(faults) > 1)}; nothing was changed",
        differences=tuple(faults), found=shown, next=next,
    )
