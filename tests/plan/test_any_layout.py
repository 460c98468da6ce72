"""Any layout loads any layout: ranks load a state of other ranks, in one process, with a dictionary as disk.

The complete plan is executed byte by byte: writers, slots, the index, chunks and their digests, the chunks to read for
each box. Chunks are small here, so that tensors have many. A failure prints LAYOUT=<number>;
`LAYOUT=<number> pytest tests/plan/test_any_layout.py` repeats exactly that case.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest

import layouts
from flowstone import _native
from flowstone.coordination.messages import PlanTerms, assignment_of, parts_of
from flowstone.format.index import Index, decode_index
from flowstone.format.manifest import SegmentRow
from flowstone.plan.assign_writers import WriterAssignment, assign_writers
from flowstone.plan.global_index import global_index
from flowstone.plan.read import plan_reads
from flowstone.plan.write import WritePlan, Writer, data_offsets, plan_writes
from flowstone.table.box import Box
from flowstone.table.pieces import Layout, Piece, Pieces
from layouts import Case, inside

SHORT, ALL = 250, 2000
CHUNK_BYTES, PACKED_BELOW_BYTES = 256, 700
POISON = 0xA5
ONLY = int(os.environ["LAYOUT"]) if "LAYOUT" in os.environ else None


@contextmanager
def small_chunks() -> Iterator[None]:
    """Chunks of 256 bytes, and a slot for every piece of 700 and more, wherever the numbers are used."""
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            for limit, value in (("CHUNK_BYTES", CHUNK_BYTES), ("PACKED_BELOW_BYTES", PACKED_BELOW_BYTES)):
                layers = "flowstone.plan.", "flowstone.format.", "flowstone.table."
                if name.startswith(layers) and hasattr(module, limit):
                    patches.enter_context(mock.patch.object(module, limit, value))
        yield


@dataclass
class Disk:
    """What ranks have written: the bytes of each segment, and the index of all."""

    segments: dict[str, bytearray]
    rows: list[SegmentRow]
    index: Index


def pieces_of(case: Case, layout: layouts.Layout, rank: int) -> Pieces:
    return Pieces.of([
        Piece(tensor.name, tensor.dtype, tensor.shape, box)
        for tensor, lies in zip(case.tensors, layout.lies, strict=True) for box in lies.boxes[rank]
    ])


def shared_out(ranks: Sequence[Pieces], chance: random.Random) -> WriterAssignment:
    """Who writes what, replicas cut or not; sometimes as it is shared out again, on other nodes, among those that have
    not begun."""
    held, nodes = [rank.compact() for rank in ranks], [chance.randrange(3) for _ in ranks]
    assigned = assign_writers(
        held, nodes, worth_bytes=chance.choice((1, 1 << 30)), block_bytes_min=chance.choice((1, 100, 1000))
    )
    if chance.random() < 0.3:
        begun = [rank for rank in range(len(ranks)) if chance.random() < 0.5]
        kept = {rank: assigned.writes[rank] for rank in begun}
        again = assign_writers(held, nodes[::-1], kept, begun_split=assigned.split if begun else None)
        assert all(np.array_equal(again.writes[rank], assigned.writes[rank]) for rank in begun)
        return again
    return assigned


def digests_of(data: bytes) -> list[int]:
    return [_native.xxh3_64(data[offset : offset + CHUNK_BYTES]) for offset in range(0, len(data), CHUNK_BYTES)]


def save(case: Case, values: dict[str, np.ndarray], chance: random.Random) -> Disk:
    """Every rank writes its part of the plan."""
    ranks = [pieces_of(case, case.source, rank) for rank in range(case.source.size)]
    shared = shared_out(ranks, chance)
    segments: dict[str, bytearray] = {}
    rows: list[SegmentRow] = []
    offsets, digests, numbers = [], [], []
    for rank, (pieces, part) in enumerate(zip(ranks, parts_of(shared), strict=True)):
        assert part.positions is not None
        writes = assignment_of(PlanTerms("plan", "job", 0, None), Layout(pieces, (), ()), part)
        mine = pieces.take(writes.positions.tolist(), writes.blocks)
        position = chance.choice((1 << 20, 1 << 20, 8192))
        plan = plan_writes(mine, writer=Writer(rank), is_complete=False, header_bytes_max=position)
        where = data_offsets(plan, np.array([chance.randrange(4096) for _ in mine], np.uint64))
        numbers.append(plan.segment + np.uint32(len(rows)))
        for file in plan.segments:
            segments[file.name] = bytearray([POISON]) * file.bytes
            rows.append(SegmentRow(len(rows), None, file.name, file.bytes, file.header_bytes, ""))
        offsets.append(where)
        digests += put(plan, where, mine, values, segments)
    frame, piece_order, chunk_order = global_index(shared.layouts, shared.writes, (), np.concatenate(numbers))
    data = frame.fill(np.concatenate(offsets)[piece_order], np.array(digests, np.uint64)[chunk_order])
    return Disk(segments, rows, decode_index(data, segments=rows, path="index"))


def put(
    plan: WritePlan, offsets: np.ndarray, pieces: Pieces, values: dict[str, np.ndarray], segments: dict[str, bytearray]
) -> list[int]:
    """The bytes of each piece to where the plan has them; the digests of its chunks."""
    collected = []
    for index, piece in enumerate(pieces):
        data, begin = values[piece.name][inside(piece.box)].tobytes(), int(offsets[index])
        file = plan.segments[int(plan.segment[index])]
        assert file.header_bytes <= begin <= begin + len(data) <= file.bytes
        segments[file.name][begin : begin + len(data)] = data
        collected += digests_of(data)
    return collected


def load(case: Case, disk: Disk, rank: int) -> None:
    """What a rank of the target reads is what was saved, in every bit, and each element comes once."""
    expected = pieces_of(case, case.target, rank)
    index, values = disk.index, case.values()
    plan = plan_reads(index, expected, [index.rows()[name] for name in expected.names])
    fetched: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, Box]] = {}
    total = 0
    for row in range(len(plan.piece)):
        piece, target = int(plan.piece[row]), int(plan.target[row])
        box = index.pieces.box(piece)
        length = int(index.chunks.length[piece])
        known = fetched.setdefault(
            (piece, target), (np.full(length, POISON, np.uint8), np.zeros(length, bool), plan.common.get(row, box))
        )
        assert known[2] == plan.common.get(row, box), "all runs of a piece fill one region"
        for chunk in range(int(plan.first[row]), int(plan.last[row])):
            begin, stop = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, length)
            data = chunk_of(disk, piece, chunk, begin, stop)
            assert not known[1][begin:stop].any(), "a chunk is read twice for one target"
            known[0][begin:stop], known[1][begin:stop] = data, True
            total += stop - begin
    assert total == plan.bytes
    for number, item in enumerate(expected):
        actual = np.full((*item.box.shape, item.dtype.item_bytes), POISON, np.uint8)
        times = np.zeros(item.box.shape, int)
        for (piece, target), (data, there, region) in fetched.items():
            if target == number:
                source, within = index.pieces.box(piece), inside(region.within(item.box))
                lies = inside(region.within(source))
                shape = (*source.shape, item.dtype.item_bytes)
                assert there.reshape(shape)[lies].all(), "a chunk that is needed is not read"
                actual[within] = data.reshape(shape)[lies]
                times[within] += 1
        assert (times == 1).all(), f"{item.name} {item.box} on rank {rank}"
        assert np.array_equal(actual, values[item.name][inside(item.box)]), f"{item.name} {item.box} on rank {rank}"


def chunk_of(disk: Disk, piece: int, chunk: int, begin: int, stop: int) -> np.ndarray:
    """A chunk of a stored piece, verified."""
    index = disk.index
    offset = int(index.chunks.offset[piece])
    data = bytes(disk.segments[disk.rows[int(index.chunks.segment[piece])].name][offset + begin : offset + stop])
    number = int(index.chunks.first[piece]) + chunk
    run = np.array([piece]), np.array([chunk]), np.array([chunk + 1])
    assert index.chunks.stored_bytes(*run).tolist() == [stop - begin]
    assert int(index.chunks.digest[number]) == _native.xxh3_64(data)
    return np.frombuffer(data, np.uint8)


def play(seed: int) -> None:
    case = layouts.make(seed)
    try:
        with small_chunks():
            disk = save(case, case.values(), random.Random(seed))
            for rank in range(case.target.size):
                load(case, disk, rank)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{case}\nrepeat with LAYOUT={seed}") from error


@pytest.mark.skipif(ONLY is not None, reason="LAYOUT repeats one case")
def test_any_layout_loads_any_layout() -> None:
    for seed in range(SHORT):
        play(seed)


@pytest.mark.soak
def test_two_thousand_pairs_of_layouts() -> None:
    for seed in range(ALL):
        play(seed)


@pytest.mark.skipif(ONLY is None, reason="set LAYOUT to the number of a case")
def test_case_of_layout() -> None:
    assert ONLY is not None
    play(ONLY)


def test_the_cases_are_as_awkward_as_they_should_be() -> None:
    cases = [layouts.make(seed) for seed in range(SHORT)]
    lies = [
        (tensor, lying, layout.size) for case in cases for layout in (case.source, case.target)
        for tensor, lying in zip(case.tensors, layout.lies, strict=True)
    ]
    ranks = set(range(1, layouts.RANKS_MAX + 1))
    assert {case.source.size for case in cases} == {case.target.size for case in cases} == ranks
    assert {lying.how.partition(" ")[0] for _, lying, _ in lies} == {"mesh", "flat", "tiles", "whole", "everywhere"}
    assert {len(tensor.shape) for tensor, _, _ in lies} == {0, 1, 2, 3, 4}
    sides = {n for tensor, _, _ in lies for n in tensor.shape}
    assert {0, 1, 2, 3, 7, 13, 31} <= sides, "nothing, ones, primes"
    assert sum(0 < box.shape[0] < size for box, _, size in lies if box.shape) > SHORT // 2, "fewer rows than ranks"
    strided = [lying for _, lying, _ in lies if lying.mesh and any(p.factor > 1 for p in lying.mesh.placements)]
    assert sum(max(map(len, lying.boxes)) > 1 for lying in strided) > SHORT // 10, "several boxes on one rank"
    replicas = [lying for _, lying, _ in lies if len(set(sum(lying.boxes, ()))) < sum(map(len, lying.boxes))]
    assert len(replicas) > SHORT // 2
    idle = [lying for _, lying, _ in lies if not all(lying.boxes)]
    assert len(idle) > SHORT // 4, "ranks that hold nothing"
