"""Place the parity of nodes' segments (data files), and rebuild lost segments from it (docs/PEERS.md).

The nodes of a group form a ring, with as many stripes as nodes. In stripe s, the nodes s, s + 1, ... keep parity, one
row (a parity shard) each. Each other node is a column, and contributes a data shard: a share of its segments. So a
node's segments are cut into as many shares as a stripe has columns. All nodes keep the same amount of parity, and no
node has two shards of a stripe.
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


class ParityShare(msgspec.Struct, frozen=True):
    """One share of a node's segments, which is a column (data shard) of a stripe.

    group    the first node of the node's group
    stripe   number of the stripe in the group
    column   number of this share among the stripe's `columns`
    keepers  the nodes that keep rows 0, 1, ... of the stripe's parity
    """

    group: int
    stripe: int
    column: int
    columns: int
    keepers: tuple[int, ...]


class ParityContribution(msgspec.Struct, frozen=True):
    """Describes one column (data shard) of a stripe: it is `length` bytes, from `begin` on, of the node's files, as if
    these were concatenated. `columns`, `rows`: how many data and parity shards the stripe has.
    """

    columns: int
    rows: int
    files: tuple[tuple[str, int], ...]
    begin: int
    length: int


class FileRange(msgspec.Struct, frozen=True):
    """A range of a file in a checkpoint's directory."""

    file: str
    offset: int
    length: int


class RebuildSpan(msgspec.Struct, frozen=True):
    """How to compute bytes `begin` to `end` - 1 of a lost file from shards. In the shards, the position of these bytes
    is higher by `shift`.

    shards  for each shard its factor, and the ranges of files of which it consists, in order; after the last range, a
            shard has zeros
    """

    begin: int
    end: int
    shift: int
    shards: tuple[tuple[int, tuple[FileRange, ...]], ...]


class RebuildPlan(msgspec.Struct, frozen=True):
    """How to compute a file that no node has. The spans cover all its bytes, in order. `number`: the number by
    which the file is identified; see plan_rebuilds.
    """

    number: int
    size_bytes: int
    spans: tuple[RebuildSpan, ...]


def is_parity(name: str) -> bool:
    return name.startswith(_PREFIX)


def column_of(name: str) -> tuple[str, int | None]:
    """The stripe and the column in the name of a file that describes a stripe's column. ("", None) if `name` is the
    name of any other file.
    """
    match = _NAME.fullmatch(name)
    return ("", None) if match is None or match[7] is None else (match[1], int(match[7]))


def parity_name(share: ParityShare, writer: str, row: int) -> str:
    """The name of the file with parity row number `row` of a stripe.

    writer  two numbers that identify one write of a node. A parity file is computed from those writes of a
            group's nodes that have equal numbers
    """
    return f"{_PREFIX}{share.group}-{share.stripe}-{writer}-{row}"


def ring(node: int, nodes: int, size: int) -> tuple[int, int]:
    """The first node of the group of `node`, and the number of nodes in that group. The nodes are divided as evenly as
    possible into groups of at least `size` nodes.
    """
    count = max(1, nodes // size)
    least, more = divmod(nodes, count)
    bounds = [index * least + min(index, more) for index in range(count + 1)]
    index = next(index for index in range(count) if node < bounds[index + 1])
    return bounds[index], bounds[index + 1] - bounds[index]


def shares(node: int, nodes: int, columns: int, rows: int) -> tuple[ParityShare, ...]:
    """The shares into which the segments of `node` are cut, in the order of their bytes. Empty in a job of one node, as
    no other node can keep parity.

    nodes    number of nodes of the job; with fewer than columns + rows nodes, a stripe has fewer shards
    columns  number of data shards of a stripe; in a group of more than columns + rows nodes, a stripe has more
    rows     number of parity shards of a stripe
    """
    first, length = ring(node, nodes, columns + rows)
    rows = min(rows, length - 1)
    if not rows:
        return ()
    result = []
    for column in range(length - rows):
        stripe = (node - first - rows - column) % length
        keepers = tuple(first + (stripe + row) % length for row in range(rows))
        result.append(ParityShare(first, stripe, column, length - rows, keepers))
    return tuple(result)


def contributions(
    files: Sequence[tuple[str, int]], columns: int, rows: int
) -> Iterator[ParityContribution]:
    """Cut files (name and size in bytes) into `columns` shares of equal length. The last shares may be shorter or
    empty.
    """
    whole = sum(size_bytes for _, size_bytes in files)
    each = -(-whole // (64 * columns)) * 64  # shards are multiplied in units of 64 bytes
    for column in range(columns):
        begin = min(whole, column * each)
        yield ParityContribution(columns, rows, tuple(files), begin, min(whole, begin + each) - begin)


def parts(contribution: ParityContribution) -> tuple[FileRange, ...]:
    """The ranges of files of which a column (data shard) consists."""
    ranges, begin, end = [], contribution.begin, contribution.begin + contribution.length
    offset = 0
    for name, size_bytes in contribution.files:
        low, high = max(begin, offset), min(end, offset + size_bytes)
        if low < high:
            ranges.append(FileRange(name, low - offset, high - low))
        offset += size_bytes
    return tuple(ranges)


def plan_rebuilds(
    missing: Mapping[str, int], available: Mapping[str, int], described: Mapping[str, ParityContribution],
    number_of: Callable[[str], int],
) -> dict[str, RebuildPlan]:
    """For each missing file that can be computed from available files: how to do that. Files are given as name -> size
    in bytes.

    described  name of a description file -> its content (a column of a stripe). Each parity row has a description of
               each column
    number_of  returns the number of an available file. A rebuilt file gets the number of a parity file of its
               checkpoint, so that files of two checkpoints have different numbers
    """
    stripes: dict[str, dict[int, ParityContribution]] = {}
    rows: dict[str, list[int]] = {}
    columns = {(stripe, column) for stripe, column in map(column_of, available) if column is not None}
    for name in available:
        match = _NAME.fullmatch(name)
        if match is not None and match[7] is None:
            rows.setdefault(match[1], []).append(int(match[6]))
        elif match is not None and name in described:
            stripes.setdefault(match[1], {})[int(match[7])] = described[name]
    spans: dict[str, list[RebuildSpan]] = {name: [] for name in missing}
    for stripe, by_column in stripes.items():
        # Without its description, a column would wrongly count as zeros.
        if all(column in by_column for other, column in columns if other == stripe):
            _solve(stripe, by_column, sorted(rows.get(stripe, ())), available, spans)
    plans = {}
    for name, size_bytes in missing.items():
        ordered = sorted(spans[name], key=lambda span: span.begin)
        ends = [0, *(span.end for span in ordered)]
        if [span.begin for span in ordered] == ends[:-1] and ends[-1] == size_bytes:
            number = number_of(next(filter(is_parity, available)))
            plans[name] = RebuildPlan(number, size_bytes, tuple(ordered))
    return plans


def _solve(
    stripe: str, columns: Mapping[int, ParityContribution], rows: Sequence[int], available: Mapping[str, int],
    spans: Mapping[str, list[RebuildSpan]],
) -> None:
    """Add to `spans` how to compute missing files in the lost columns of a stripe, if there is enough parity, and all
    descriptions of the columns agree.
    """
    first = next(iter(columns.values()))
    shapes = {(contribution.columns, contribution.rows) for contribution in columns.values()}
    if len(shapes) > 1 or max(columns) >= first.columns or max(rows, default=0) >= first.rows:
        return
    longest = max(contribution.length for contribution in columns.values())
    whole = [row for row in rows if available[f"{stripe}-{row}"] >= longest]
    has = {
        column: all(available.get(part.file) == dict(contribution.files)[part.file] for part in parts(contribution))
        for column, contribution in columns.items()
    }
    lost = [column for column, is_whole in has.items() if not is_whole]
    if not lost or len(lost) > len(whole):
        return
    used = whole[: len(lost)]
    # a column without a file consists of zeros
    present = [column for column in range(first.columns) if has.get(column, True)]
    numbers = (*present, *(first.columns + row for row in used))
    shards = [parts(columns[column]) if column in columns else () for column in present]
    shards += [(FileRange(f"{stripe}-{row}", 0, longest),) for row in used]
    for column in lost:
        factors = erasure.factors_for(first.columns, first.rows, numbers, column)
        counted = tuple((factor, shard) for factor, shard in zip(factors, shards, strict=True) if factor and shard)
        position = 0
        for part in parts(columns[column]):
            if part.file in spans:
                spans[part.file].append(
                    RebuildSpan(part.offset, part.offset + part.length, position - part.offset, counted)
                )
            position += part.length


def rebuild(
    plan: RebuildPlan, offset: int, target: memoryview, read: Callable[[FileRange, memoryview], None],
    buffer: memoryview
) -> int:
    """Compute the bytes of a lost file from `offset` on, and write them to `target`. Returns their number. Raises the
    errors of `read`.

    buffer  writable memory for a part of one shard; no other memory is used
    """
    end = min(plan.size_bytes, offset + len(target))
    output = np.frombuffer(target, np.uint8)
    for span in plan.spans:
        low, high = max(offset, span.begin), min(end, span.end)
        # `buffer` may be empty if there is nothing to do
        for begin in range(low, high, len(buffer)) if low < high else ():
            _add_up(span, begin, output[begin - offset : min(high, begin + len(buffer)) - offset], read, buffer)
    return max(0, end - offset)


def _add_up(
    span: RebuildSpan, begin: int, output: NDArray[np.uint8], read: Callable[[FileRange, memoryview], None],
    buffer: memoryview
) -> None:
    """Compute a lost file's bytes from `begin` on: add up the shards, each times its factor, in `output`."""
    output[:] = 0
    part = buffer[: len(output)]
    source = np.frombuffer(part, np.uint8)
    for factor, shard in span.shards:
        if _read_shard(shard, begin + span.shift, part, read):
            erasure.accumulate(factor, source.ctypes.data, output.ctypes.data, len(output))


def _read_shard(
    shard: Sequence[FileRange], begin: int, target: memoryview, read: Callable[[FileRange, memoryview], None]
) -> bool:
    """Read the bytes of a shard from `begin` on. After the shard's end, `target` is filled with zeros. Returns False if
    the shard ends before `begin`.
    """
    end, position, has_bytes = begin + len(target), 0, False
    for part in shard:
        low, high = max(begin, position), min(end, position + part.length)
        if low < high:
            if not has_bytes:
                np.frombuffer(target, np.uint8)[:] = 0
            read(FileRange(part.file, part.offset + low - position, high - low), target[low - begin : high - begin])
            has_bytes = True
        position += part.length
    return has_bytes
