"""The cells that a study measures. Pure.

All combinations would be tens of thousands, so it measures a base point, the crossings that the paper shows, and every
other axis one at a time. Each topic below is one plot of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from flowstone.config import BLOCK_BYTES, KIB, MIB
from flowstone_study.records import DIRECTIONS, ENGINES, LAYOUTS, MEMORIES, Cell, MixName, Probe

CHUNK_BYTES_MAX = 128 * MIB  # the paper's chunk; smaller studies have chunks of an eighth of a rank
BYTES_MIN = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The extent of a study.

    bytes          of a cell, all processes together
    requests_max   limit of requests per cell: cells of small requests move fewer bytes
    layout_mixes   mixes for which layouts are crossed with coalescing and buffering
    """

    bytes: int
    processes: int
    mixes: tuple[MixName, ...]
    layout_mixes: tuple[MixName, ...]
    request_bytes: tuple[int, ...]
    queue_depths: tuple[int, ...]
    process_counts: tuple[int, ...]
    size_divisors: tuple[int, ...]
    requests_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The cells of each topic; a cell may serve several.

    grid      request size x depth
    layouts   layout x coalesced x direct, with the most processes, for each of `layout_mixes`
    mixes     mix x coalesced, file per rank, with the most processes
    engines   engine x memory x processes
    sizes     bytes x direct
    pages     memory x huge pages
    reserving whether files' blocks are reserved x direct, writes only
    """

    base: Cell
    grid: tuple[Cell, ...]
    layouts: tuple[Cell, ...]
    mixes: tuple[Cell, ...]
    engines: tuple[Cell, ...]
    sizes: tuple[Cell, ...]
    pages: tuple[Cell, ...]
    reserving: tuple[Cell, ...]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Each cell once, in the order of the topics."""
        topics = (getattr(self, field.name) for field in fields(self) if field.name != "base")
        return tuple(dict.fromkeys(cell for topic in topics for cell in topic))


def full_scope(bytes: int, processes: int, mixes: Sequence[MixName]) -> Scope:
    """Everything; half an hour on a device of 2 GB/s."""
    return Scope(
        bytes=bytes, processes=processes, mixes=tuple(mixes), layout_mixes=tuple(mixes),
        request_bytes=tuple(size * KIB for size in (4, 16, 64, 256, 1024, 4096, 8192, 16384, 65536)),
        queue_depths=(1, 2, 4, 8, 16, 32, 64, 128), process_counts=(1, 2, 3, 4), size_divisors=(64, 16, 4, 1),
        requests_max=32_768,
    )


def quick_scope(bytes: int, processes: int, mixes: Sequence[MixName]) -> Scope:
    """Each axis with few points; layouts for one mix only: the first model."""
    first = next((mix for mix in mixes if mix != "synthetic"), mixes[0])
    return Scope(
        bytes=bytes, processes=processes, mixes=tuple(mixes), layout_mixes=(first,),
        request_bytes=tuple(size * KIB for size in (4, 64, 1024, 4096, 16384)), queue_depths=(1, 4, 16, 64),
        process_counts=(1, 4), size_divisors=(8, 1), requests_max=4096,
    )


def base_cell(probe: Probe, bytes: int) -> Cell:
    """The point that all but the named axes keep: close to Flowstone's defaults, as far as they work here."""
    return Cell(
        direction="write", bytes=bytes, engine="posix" if probe.io_uring_error else "io_uring",
        direct=probe.direct_alignment > 0,
    )


def plan(base: Cell, scope: Scope) -> Plan:
    return Plan(
        base=base, grid=_grid(base, scope), layouts=_layouts(base, scope), mixes=_mixes(base, scope),
        engines=_engines(base, scope), sizes=_sizes(base, scope), pages=_pages(base), reserving=_reserving(base),
    )


def fill_cell(cell: Cell, base: Cell) -> Cell:
    """The cell that writes the files of a restore: with the base's settings, into the restore's layout."""
    return replace(
        base, direction="write", layout=cell.layout, processes=cell.processes, mix=cell.mix, bytes=cell.bytes,
        chunk_bytes=cell.chunk_bytes,
    )


def _grid(base: Cell, scope: Scope) -> tuple[Cell, ...]:
    cells = []
    for direction, request, depth in product(DIRECTIONS, scope.request_bytes, scope.queue_depths):
        size = min(scope.bytes, request * scope.requests_max)
        if size >= request * depth:  # else the queue is never full, and the cell would not measure its depth
            cells.append(
                replace(base, direction=direction, request_bytes=request, queue_depth=depth, bytes=size)
            )
    return tuple(cells)


def _layouts(base: Cell, scope: Scope) -> tuple[Cell, ...]:
    cells = []
    crossing = product(scope.layout_mixes, DIRECTIONS, LAYOUTS, (True, False), (True, False))
    for mix, direction, layout, coalesced, direct in crossing:
        if layout == "tensor" and coalesced:
            continue  # no request can hold two files
        if layout in ("pair", "shared") and scope.processes == 1:
            continue  # no other process to share with: file per rank
        chunk = _chunk_bytes(scope.bytes // scope.processes) if layout == "chunk" else 0
        cells.append(
            replace(
                base, direction=direction, layout=layout, coalesced=coalesced, direct=direct, mix=mix,
                processes=scope.processes, chunk_bytes=chunk,
            )
        )
    return tuple(cells)


def _mixes(base: Cell, scope: Scope) -> tuple[Cell, ...]:
    return tuple(
        replace(base, direction=direction, mix=mix, coalesced=coalesced, processes=scope.processes)
        for direction, mix, coalesced in product(DIRECTIONS, scope.mixes, (True, False))
    )


def _engines(base: Cell, scope: Scope) -> tuple[Cell, ...]:
    counts = sorted({min(count, scope.processes) for count in scope.process_counts})
    return tuple(
        replace(
            base, direction=direction, engine=engine, memory=memory, processes=processes,
            queue_depth=1 if engine == "sync" else base.queue_depth,
        )
        for direction, engine, memory, processes in product(DIRECTIONS, ENGINES, MEMORIES, counts)
        if engine == "io_uring" or memory != "registered"  # only a ring registers
    )


def _sizes(base: Cell, scope: Scope) -> tuple[Cell, ...]:
    sizes = sorted({max(scope.bytes // divisor, MIB) for divisor in scope.size_divisors})
    return tuple(
        replace(base, direction=direction, bytes=size, direct=direct)
        for direction, size, direct in product(DIRECTIONS, sizes, (True, False))
    )


def _pages(base: Cell) -> tuple[Cell, ...]:
    return tuple(
        replace(base, direction=direction, memory=memory, huge_pages=huge)
        for direction, memory, huge in product(DIRECTIONS, MEMORIES, (True, False))
        if base.engine == "io_uring" or memory != "registered"
    )


def _reserving(base: Cell) -> tuple[Cell, ...]:
    return tuple(
        replace(base, reserved=reserved, direct=direct) for reserved, direct in product((True, False), (True, False))
    )


def _chunk_bytes(rank_bytes: int) -> int:
    return min(CHUNK_BYTES_MAX, max(1, rank_bytes // 8 // BLOCK_BYTES) * BLOCK_BYTES)
