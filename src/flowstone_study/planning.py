"""Plan the cells (combinations of settings) that a study measures.

There are tens of thousands of combinations. A study measures a base point, the combinations in the paper, and
variations of every other setting alone. Each topic below is one plot of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from flowstone.config import BLOCK_BYTES, KIB, MIB
from flowstone_study.records import DIRECTIONS, ENGINES, LAYOUTS, MEMORIES, Cell, MixName, Probe

CHUNK_BYTES_MAX = 128 * MIB  # the paper's length of a chunk; smaller studies have chunks of an eighth of a rank's bytes
BYTES_MIN = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which values of the settings a study measures.

    bytes          how many bytes a cell moves, in all processes together
    requests_max   how many requests a cell makes at most, so that cells with small requests move fewer bytes
    layout_mixes   the mixes of tensor sizes for which all layouts are combined with coalescing and buffering
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
    """The cells of each topic; a cell may belong to several topics. "x" means all combinations of the values.

    grid      request size x depth
    layouts   layout x coalesced x direct, with the most processes, for each of `layout_mixes`
    mixes     mix x coalesced, with a file for each rank and the most processes
    engines   engine x memory x processes
    sizes     bytes x direct
    pages     memory x huge pages
    reserving whether the blocks of files are reserved x direct, only for writes
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
        """All cells, each once, in the order of the topics."""
        topics = (getattr(self, field.name) for field in fields(self) if field.name != "base")
        return tuple(dict.fromkeys(cell for topic in topics for cell in topic))


def full_scope(bytes: int, processes: int, mixes: Sequence[MixName]) -> Scope:
    """The scope of a full study, which takes half an hour on a device with 2 GB/s."""
    return Scope(
        bytes=bytes, processes=processes, mixes=tuple(mixes), layout_mixes=tuple(mixes),
        request_bytes=tuple(size * KIB for size in (4, 16, 64, 256, 1024, 4096, 8192, 16384, 65536)),
        queue_depths=(1, 2, 4, 8, 16, 32, 64, 128), process_counts=(1, 2, 3, 4), size_divisors=(64, 16, 4, 1),
        requests_max=32_768,
    )


def quick_scope(bytes: int, processes: int, mixes: Sequence[MixName]) -> Scope:
    """The scope of a quick study: few values of each setting, and layouts only for one mix, the first model."""
    first = next((mix for mix in mixes if mix != "synthetic"), mixes[0])
    return Scope(
        bytes=bytes, processes=processes, mixes=tuple(mixes), layout_mixes=(first,),
        request_bytes=tuple(size * KIB for size in (4, 64, 1024, 4096, 16384)), queue_depths=(1, 4, 16, 64),
        process_counts=(1, 4), size_divisors=(8, 1), requests_max=4096,
    )


def base_cell(probe: Probe, bytes: int) -> Cell:
    """The cell with the base values of all settings that a topic does not vary. They are close to Flowstone's defaults,
    if these work here.
    """
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
    """The cell that writes the files for the restore `cell`: with the settings of `base`, in the layout of `cell`."""
    return replace(
        base, direction="write", layout=cell.layout, processes=cell.processes, mix=cell.mix, bytes=cell.bytes,
        chunk_bytes=cell.chunk_bytes,
    )


def _grid(base: Cell, scope: Scope) -> tuple[Cell, ...]:
    cells = []
    for direction, request, depth in product(DIRECTIONS, scope.request_bytes, scope.queue_depths):
        size = min(scope.bytes, request * scope.requests_max)
        # otherwise the queue would never be full, and the cell would not measure this depth
        if size >= request * depth:
            cells.append(
                replace(base, direction=direction, request_bytes=request, queue_depth=depth, bytes=size)
            )
    return tuple(cells)


def _layouts(base: Cell, scope: Scope) -> tuple[Cell, ...]:
    cells = []
    crossing = product(scope.layout_mixes, DIRECTIONS, LAYOUTS, (True, False), (True, False))
    for mix, direction, layout, coalesced, direct in crossing:
        if layout == "tensor" and coalesced:
            continue  # no request can contain bytes of two files
        if layout in ("pair", "shared") and scope.processes == 1:
            continue  # a single process shares its file with no other, so this equals a file for each rank
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
        if engine == "io_uring" or memory != "registered"  # only io_uring registers memory
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
