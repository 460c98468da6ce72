"""Where the parity of nodes' segments is, and how a lost segment follows from it: docs/PEERS.md.

The nodes of a group are a ring. There are as many stripes as nodes in it. In stripe s, the nodes s, s + 1, ... keep
the rows of parity, and each of the others, the columns, has one share of what it saves there. So a node's segments are
cut into as many shares as there are columns, all nodes keep equally much, and no stripe has two shards on one node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowstone.store.peers import erasure

_NAME = re.compile(r"(\.parity-(\d+)-(\d+)-(\d+)-(\d+))-(\d+)(?:\.(\d+))?", re.ASCII)  # see `parity_name`
_PREFIX = ".parity-"


class Share(msgspec.Struct, frozen=True):
    """A share of what a node saves. Where its parity is: at the nodes that keep rows 0, 1, ... of that stripe.

    group  the first node of the group
    """

    group: int
    stripe: int
    column: int
    columns: int
    keepers: tuple[int, ...]


class Contribution(msgspec.Struct, frozen=True):
    """What a column of a stripe is: length bytes from `begin` on of these files, one after the other."""

    columns: int
    rows: int
    files: tuple[tuple[str, int], ...]
    begin: int
    length: int


class Part(msgspec.Struct, frozen=True):
    """A range of a file in the checkpoint's directory."""

    file: str
    offset: int
    length: int


class Span(msgspec.Struct, frozen=True):
    """How bytes begin..end of a lost file follow from others: those that are `shift` further, in each of the shards.

    shards  with the factor of each, and its parts in their order; behind the last of these are zeros
    """

    begin: int
    end: int
    shift: int
    shards: tuple[tuple[int, tuple[Part, ...]], ...]


class Rebuilt(msgspec.Struct, frozen=True):
    """A file that is on no node, but follows from others. Its spans have all of its bytes, in their order."""

    number: int
    size_bytes: int
    spans: tuple[Span, ...]


def is_parity(name: str) -> bool:
    return name.startswith(_PREFIX)


def column_of(name: str) -> tuple[str, int | None]:
    """The stripe and the column that a file describes, by its name; None where it describes none."""
    match = _NAME.fullmatch(name)
    return ("", None) if match is None or match[7] is None else (match[1], int(match[7]))


def parity_name(share: Share, writer: str, row: int) -> str:
    """Of the file with that row. `writer`: which of its node's files these are, as two numbers; nodes' equal ones meet.
    """
    return f"{_PREFIX}{share.group}-{share.stripe}-{writer}-{row}"


def ring(node: int, nodes: int, size: int) -> tuple[int, int]:
    """The first node and the length of a node's group: of `size`, or more, as evenly as they can be."""
    count = max(1, nodes // size)
    least, more = divmod(nodes, count)
    bounds = [at * least + min(at, more) for at in range(count + 1)]
    at = next(at for at in range(count) if node < bounds[at + 1])
    return bounds[at], bounds[at + 1] - bounds[at]


def shares(node: int, nodes: int, columns: int, rows: int) -> tuple[Share, ...]:
    """The shares of what a node saves, in their order. None if it is alone. Fewer rows where there are fewer nodes."""
    first, length = ring(node, nodes, columns + rows)
    rows = min(rows, length - 1)
    if not rows:
        return ()
    found = []
    for column in range(length - rows):
        stripe = (node - first - rows - column) % length
        keepers = tuple(first + (stripe + row) % length for row in range(rows))
        found.append(Share(first, stripe, column, length - rows, keepers))
    return tuple(found)


def contributions(
    files: Sequence[tuple[str, int]], columns: int, rows: int
) -> Iterator[Contribution]:
    """Cut files, by name and size, into as many shares; the last ones may be empty."""
    whole = sum(size_bytes for _, size_bytes in files)
    each = -(-whole // (64 * columns)) * 64  # shards are multiplied by whole words
    for column in range(columns):
        begin = min(whole, column * each)
        yield Contribution(columns, rows, tuple(files), begin, min(whole, begin + each) - begin)


def parts(of: Contribution) -> tuple[Part, ...]:
    """The ranges of files that a column has."""
    found, begin, end = [], of.begin, of.begin + of.length
    at = 0
    for name, size_bytes in of.files:
        low, high = max(begin, at), min(end, at + size_bytes)
        if low < high:
            found.append(Part(name, low - at, high - low))
        at += size_bytes
    return tuple(found)


def rebuilt(
    missing: Mapping[str, int], available: Mapping[str, int], described: Mapping[str, Contribution],
    number_of: Callable[[str], int],
) -> dict[str, Rebuilt]:
    """Those of the missing files, by name and size, that follow from files that are available.

    described  contributions, by the name of their description: of what could be read. Each row has one of each column
    number_of  a file that is available: tells one checkpoint's from another's
    """
    stripes: dict[str, dict[int, Contribution]] = {}
    rows: dict[str, list[int]] = {}
    columns = {(stripe, column) for stripe, column in map(column_of, available) if column is not None}
    for name in available:
        match = _NAME.fullmatch(name)
        if match is not None and match[7] is None:
            rows.setdefault(match[1], []).append(int(match[6]))
        elif match is not None and name in described:
            stripes.setdefault(match[1], {})[int(match[7])] = described[name]
    spans: dict[str, list[Span]] = {name: [] for name in missing}
    for stripe, known in stripes.items():
        if all(column in known for other, column in columns if other == stripe):  # else it would be taken for zeros
            _solve(stripe, known, sorted(rows.get(stripe, ())), available, spans)
    found = {}
    for name, size_bytes in missing.items():
        ordered = sorted(spans[name], key=lambda span: span.begin)
        ends = [0, *(span.end for span in ordered)]
        if [span.begin for span in ordered] == ends[:-1] and ends[-1] == size_bytes:
            number = number_of(next(filter(is_parity, available)))
            found[name] = Rebuilt(number, size_bytes, tuple(ordered))
    return found


def _solve(
    stripe: str, columns: Mapping[int, Contribution], rows: Sequence[int], available: Mapping[str, int],
    spans: Mapping[str, list[Span]],
) -> None:
    """Add what the lost columns of one stripe have of missing files, if there is parity enough, and columns agree."""
    some = next(iter(columns.values()))
    agree = all((one.columns, one.rows) == (some.columns, some.rows) for one in columns.values())
    if not agree or max(columns) >= some.columns or max(rows, default=0) >= some.rows:
        return
    longest = max(one.length for one in columns.values())
    whole = [row for row in rows if available[f"{stripe}-{row}"] >= longest]
    has = {
        column: all(available.get(part.file) == dict(one.files)[part.file] for part in parts(one))
        for column, one in columns.items()
    }
    lost = [column for column, is_whole in has.items() if not is_whole]
    if not lost or len(lost) > len(whole):
        return
    used = whole[: len(lost)]
    there = [column for column in range(some.columns) if has.get(column, True)]  # what is no column's is zero
    numbers = (*there, *(some.columns + row for row in used))
    shards = [parts(columns[column]) if column in columns else () for column in there]
    shards += [(Part(f"{stripe}-{row}", 0, longest),) for row in used]
    for column in lost:
        factors = erasure.factors_for(some.columns, some.rows, numbers, column)
        counted = tuple((factor, shard) for factor, shard in zip(factors, shards, strict=True) if factor and shard)
        at = 0
        for part in parts(columns[column]):
            if part.file in spans:
                spans[part.file].append(Span(part.offset, part.offset + part.length, at - part.offset, counted))
            at += part.length


def rebuild(
    of: Rebuilt, offset: int, target: memoryview, read: Callable[[Part, memoryview], None], room: memoryview
) -> int:
    """Fill `target` with a lost file's bytes from `offset` on. Returns how many there are. Raises what `read` does.

    room  for a part of one shard, writable: all the memory that this takes, however many shards there are
    """
    end = min(of.size_bytes, offset + len(target))
    into = np.frombuffer(target, np.uint8)
    for span in of.spans:
        low, high = max(offset, span.begin), min(end, span.end)
        for begin in range(low, high, len(room)) if low < high else ():  # else there may be no room either
            _add_up(span, begin, into[begin - offset : min(high, begin + len(room)) - offset], read, room)
    return max(0, end - offset)


def _add_up(
    span: Span, begin: int, into: NDArray[np.uint8], read: Callable[[Part, memoryview], None], room: memoryview
) -> None:
    """The file's bytes from `begin` on, shard by shard."""
    into[:] = 0
    part = room[: len(into)]
    source = np.frombuffer(part, np.uint8)
    for factor, shard in span.shards:
        if _read_shard(shard, begin + span.shift, part, read):
            erasure.accumulate(factor, source.ctypes.data, into.ctypes.data, len(into))


def _read_shard(
    shard: Sequence[Part], begin: int, target: memoryview, read: Callable[[Part, memoryview], None]
) -> bool:
    """A shard's bytes from `begin` on, with zeros behind it. Whether it has some there."""
    end, at, has_bytes = begin + len(target), 0, False
    for part in shard:
        low, high = max(begin, at), min(end, at + part.length)
        if low < high:
            if not has_bytes:
                np.frombuffer(target, np.uint8)[:] = 0
            read(Part(part.file, part.offset + low - at, high - low), target[low - begin : high - begin])
            has_bytes = True
        at += part.length
    return has_bytes
