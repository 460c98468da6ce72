"""Places and requests: complete, disjoint, and as many as the layout requires."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from flowstone.config import BLOCK_BYTES, KIB, MIB
from flowstone_study.placing import files, parts, payload_bytes, requests, run_bytes, slots
from flowstone_study.records import LAYOUTS, MIXES, Cell, Layout, MixName


def cell(layout: Layout, mix: MixName = "3B", **changed: object) -> Cell:
    chunk = 640 * KIB if layout == "chunk" else 0
    base = Cell(direction="write", layout=layout, mix=mix, bytes=12 * MIB, processes=3, chunk_bytes=chunk)
    return replace(base, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_fill_run_and_files_without_overlap(layout: Layout, mix: MixName) -> None:
    of_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    sizes: dict[str, set[int]] = defaultdict(set)
    for rank in range(3):
        own = parts(cell(layout, mix), rank)
        ends = [part.start_bytes + part.length_bytes for part in own]
        assert [0, *ends] == [*(part.start_bytes for part in own), run_bytes(cell(layout, mix))]
        for part in own:
            of_file[part.file].append((part.offset_bytes, part.offset_bytes + part.length_bytes))
            sizes[part.file].add(part.size_bytes)
    assert tuple(sorted(of_file)) == tuple(sorted(files(cell(layout, mix))))
    for name, ranges in of_file.items():
        ranges.sort()
        assert [0, *(end for _, end in ranges)] == [*(start for start, _ in ranges), *sizes[name]]


def test_number_of_files_is_the_layouts() -> None:
    tensors = len(slots(cell("tensor")))
    chunks = -(-run_bytes(cell("chunk")) // (640 * KIB))
    counts = {layout: len(files(cell(layout))) for layout in LAYOUTS}
    assert counts == {"tensor": 3 * tensors, "chunk": 3 * chunks, "rank": 3, "pair": 2, "shared": 1}


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("request_bytes", [4 * KIB, 20 * KIB, MIB, 64 * MIB])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_move_each_byte_once_to_its_place(layout: Layout, request_bytes: int, coalesced: bool) -> None:
    entry = cell(layout, request_bytes=request_bytes, coalesced=coalesced)
    for rank in range(3):
        own = parts(entry, rank)
        thread = requests(entry, own)
        assert thread.start[0] == 0
        assert (thread.start[1:] == (thread.start + thread.length)[:-1]).all()
        assert thread.start[-1] + thread.length[-1] == run_bytes(entry)
        assert thread.length.max() <= request_bytes
        assert not ((thread.start | thread.length | thread.offset) % np.uint64(BLOCK_BYTES)).any()
        for file, offset, start, length in zip(thread.file, thread.offset, thread.start, thread.length, strict=True):
            part = own[file]
            assert offset - part.offset_bytes == start - part.start_bytes
            assert part.start_bytes <= start <= start + length <= part.start_bytes + part.length_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_hold_bytes_of_one_tensor_unless_coalesced(layout: Layout) -> None:
    entry = cell(layout, coalesced=False, request_bytes=256 * KIB)
    requested = requests(entry, parts(entry, 0))
    starts = np.array([slot.start_bytes for slot in slots(entry)], dtype=np.uint64)
    first = np.searchsorted(starts, requested.start, side="right")
    last = np.searchsorted(starts, requested.start + requested.length - np.uint64(1), side="right")
    assert (first == last).all()


@pytest.mark.parametrize("layout", ["chunk", "rank", "pair", "shared"])
def test_coalescing_lowers_the_number_of_requests(layout: Layout) -> None:
    joined, split = cell(layout), cell(layout, coalesced=False)
    assert len(requests(joined, parts(joined, 0)).file) < len(requests(split, parts(split, 0)).file)


def test_payload_is_without_padding() -> None:
    sizes = [slot.tensor_bytes for slot in slots(cell("rank"))]
    assert payload_bytes(cell("rank")) == 3 * sum(sizes) < 3 * run_bytes(cell("rank"))


@pytest.mark.parametrize(
    "wrong",
    [{"request_bytes": 6 * KIB}, {"request_bytes": 128 * MIB}, {"queue_depth": 0}, {"queue_depth": 129},
     {"processes": 5}, {"layout": "heap"}, {"chunk_bytes": MIB}, {"layout": "chunk"}, {"bytes": KIB}],
)
def test_cells_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        Cell(direction="write", **wrong)  # type: ignore[arg-type]
