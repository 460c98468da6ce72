"""Any bytes of a tensor can be read from any boxes, in any order, through memory of any size."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flowstone.config import MIB
from flowstone.convert.fetch import Fetcher, FetchRequest, linear_boxes
from flowstone.convert.layout import Output
from flowstone.convert.source import SourceCheckpoint, source_file
from flowstone.errors import DamagedError
from flowstone.format.digest import chunk_digests
from flowstone.table.box import Box
from flowstone.table.dtype import DTYPES
from flowstone.table.stored import DigestedRun, SourceTensor, StoredBox

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=5).map(tuple)


@given(shapes, st.data())
def test_linear_boxes_are_the_elements_in_their_order(shape: tuple[int, ...], draw: st.DataObject) -> None:
    count = math.prod(shape)
    begin = draw.draw(st.integers(0, count))
    end = draw.draw(st.integers(begin, count))
    numbers = np.arange(count).reshape(shape)
    actual = linear_boxes(shape, begin, end)
    parts = [numbers[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))].ravel() for box in actual]
    assert np.concatenate([np.zeros(0, int), *parts]).tolist() == list(range(begin, end))
    assert len(actual) <= 2 * len(shape) + 1


def cut(draw: st.DataObject, box: Box, depth: int = 0) -> list[Box]:
    """Boxes that fill a box, however they lie."""
    dims = [dim for dim, n in enumerate(box.shape) if n > 1]
    if not dims or depth > 3 or not draw.draw(st.booleans()):
        return [box]
    dim = draw.draw(st.sampled_from(dims))
    position = draw.draw(st.integers(1, box.shape[dim] - 1))
    low, high, offset = list(box.shape), list(box.shape), list(box.offset)
    low[dim], high[dim] = position, box.shape[dim] - position
    offset[dim] += position
    return cut(draw, Box(box.offset, tuple(low)), depth + 1) + cut(draw, Box(tuple(offset), tuple(high)), depth + 1)


@settings(max_examples=150, deadline=None)
@given(shapes, st.sampled_from([1, 2, 4, 8, 16]), st.data())
def test_any_bytes_come_from_any_boxes(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], item: int, draw: st.DataObject
) -> None:
    kind = {1: "int8", 2: "bfloat16", 4: "float32", 8: "int64", 16: "complex128"}[item]
    values = np.random.default_rng(7).integers(0, 256, (*shape, item), np.uint8)
    content, boxes = bytearray(draw.draw(st.integers(0, 40))), []
    for box in cut(draw, Box.whole(shape)):
        part = values[(*(slice(o, e) for o, e in zip(box.offset, box.end, strict=True)), slice(None))]
        order = draw.draw(st.permutations(range(len(shape))))
        stored = part.transpose((*order, len(shape)))
        dense = [math.prod(stored.shape[index + 1 : -1]) for index in range(len(shape))]
        strides = tuple(dense[order.index(dim)] for dim in range(len(shape)))
        is_plain = list(order) == list(range(len(shape))) and draw.draw(st.booleans())
        boxes.append(StoredBox(box, 0, len(content), None if is_plain else strides))
        content += stored.tobytes() + bytes(draw.draw(st.integers(0, 9)))
    path = tmp_path_factory.mktemp("fetch") / "file"
    path.write_bytes(content)
    tensor = SourceTensor("t", DTYPES[kind], shape, tuple(boxes))
    begin = draw.draw(st.integers(0, values.size))
    end = draw.draw(st.integers(begin, values.size))
    value = np.zeros(end - begin, np.uint8)
    fetcher = Fetcher(SourceCheckpoint("test", "here", (source_file(path),), (tensor,)), 4 * MIB)
    fetcher.fetch([FetchRequest(Output("t", tensor, tensor.dtype), begin, end, value)])
    fetcher.close()
    assert value.tobytes() == values.tobytes()[begin:end]


def test_a_tensor_that_lies_transposed_goes_through_little_memory(tmp_path: Path) -> None:
    values = np.random.default_rng(7).integers(0, 1 << 32, (1500, 2100), np.uint32)
    path = tmp_path / "file"
    path.write_bytes(values.T.tobytes())
    tensor = SourceTensor("t", DTYPES["uint32"], (1500, 2100), (StoredBox(Box.whole((1500, 2100)), 0, 0, (1, 1500)),))
    fetcher = Fetcher(SourceCheckpoint("test", "here", (source_file(path),), (tensor,)), 4 * MIB)
    value = np.zeros(values.nbytes, np.uint8)
    fetcher.fetch([FetchRequest(Output("t", tensor, tensor.dtype), 0, values.nbytes, value)])
    assert value.tobytes() == values.tobytes()


def _tensor_in_a_file(path: Path, megabytes: int) -> tuple[SourceCheckpoint, Output, bytes]:
    content = np.random.default_rng(7).integers(0, 256, megabytes * MIB, np.uint8).tobytes()
    path.write_bytes(content)
    shape = (len(content),)
    tensor = SourceTensor("t", DTYPES["uint8"], shape, (StoredBox(Box.whole(shape), 0, 0),))
    return SourceCheckpoint("test", "here", (source_file(path),), (tensor,)), Output("t", tensor, tensor.dtype), content


def test_chunks_that_have_digests_are_read_once_where_memory_cuts_a_tensor(tmp_path: Path) -> None:
    plain, _, content = _tensor_in_a_file(tmp_path / "file", 70)
    box = replace(plain.tensors[0].boxes[0], digested=DigestedRun(0, len(content), 0))
    tensor = replace(plain.tensors[0], boxes=(box,))
    digests = np.array([int(digest, 16) for digest in chunk_digests(content)], np.uint64)
    source = replace(plain, tensors=(tensor,), digests=digests)
    fetcher = Fetcher(source, 64 * MIB)
    actual = np.zeros(33 * MIB + 9, np.uint8)
    begin = 2 * MIB + 5
    request = FetchRequest(Output("t", tensor, tensor.dtype), begin, begin + len(actual), actual)
    reads = [(read.run.begin // MIB, read.run.end // MIB) for read in fetcher._all_reads([request], [])]
    assert reads == [(2, 14), (14, 25), (25, 36)], "three that are about equal, of whole chunks"
    fetcher.fetch([request])
    fetcher.close()
    assert actual.tobytes() == content[begin : begin + len(actual)]


@pytest.mark.parametrize("memory_bytes", [4 * MIB, 8 * MIB, 32 * MIB])
def test_groups_are_asked_for_ahead_and_filled_in_their_turn(tmp_path: Path, memory_bytes: int) -> None:
    source, output, content = _tensor_in_a_file(tmp_path / "file", 24)
    fetcher = Fetcher(source, memory_bytes)
    memory = [np.zeros(length, np.uint8) for length in (3 * MIB, 0, 9 * MIB, 12 * MIB)]
    begins = [0, 3 * MIB, 3 * MIB, 12 * MIB]
    asked = []

    def groups() -> Iterator[list[FetchRequest]]:
        for number, (begin, item) in enumerate(zip(begins, memory, strict=True)):
            asked.append(number)
            yield [FetchRequest(output, begin, begin + len(item), item)] if len(item) else []

    for number, _ in enumerate(fetcher.fetch_each(groups())):
        begin = begins[number]
        assert memory[number].tobytes() == content[begin : begin + len(memory[number])]
        assert not any(tensor.any() for tensor in memory[number + 1 :]), "memory of a later group is touched"
        if memory_bytes == 32 * MIB:
            assert len(asked) >= 3, "nothing is read ahead"
    assert asked == [0, 1, 2, 3]
    fetcher.close()


def test_what_fails_ahead_is_raised_in_its_turn(tmp_path: Path) -> None:
    source, output, content = _tensor_in_a_file(tmp_path / "file", 24)
    fetcher = Fetcher(source, 16 * MIB)
    memory = [np.zeros(4 * MIB, np.uint8) for _ in range(6)]
    filled = fetcher.fetch_each(
        [FetchRequest(output, n * 4 * MIB, (n + 1) * 4 * MIB, array)] for n, array in enumerate(memory)
    )
    next(filled)
    os.truncate(tmp_path / "file", 10 * MIB)  # the first groups may have been read before
    with pytest.raises(DamagedError, match=r"became shorter|changed while it was being converted"):
        for _ in filled:
            pass
    fetcher.close()
    assert memory[0].tobytes() == content[: 4 * MIB]
    assert not memory[5].any()


def test_what_is_left_in_the_middle_ends_before_and_after_the_fetcher_is_closed(tmp_path: Path) -> None:
    source, output, content = _tensor_in_a_file(tmp_path / "file", 48)
    memory = np.zeros(12 * MIB, np.uint8)
    for closed_first in (False, True):
        fetcher = Fetcher(source, 32 * MIB)
        filled = fetcher.fetch_each(
            [FetchRequest(output, begin, begin + len(memory), memory)] for begin in range(0, len(content), len(memory))
        )
        next(filled)
        if closed_first:
            fetcher.close()
            filled.close()
        else:
            filled.close()
            fetcher.fetch([FetchRequest(output, 0, len(memory), memory)])
            fetcher.close()
        assert memory.tobytes() == content[: len(memory)]


def test_padding_of_a_later_group_waits_for_its_turn_too(tmp_path: Path) -> None:
    source, _, content = _tensor_in_a_file(tmp_path / "file", 1)
    length = len(content)
    boxes = (StoredBox(Box((0,), (length,)), 0, 0), StoredBox(Box((length,), (length,)), None, 0))
    output = Output("t", SourceTensor("t", DTYPES["uint8"], (2 * length,), boxes), DTYPES["uint8"])
    memory = [np.full(length, 255, np.uint8) for _ in range(2)]
    fetcher = Fetcher(source, 32 * MIB)
    groups = ([FetchRequest(output, index * length, (index + 1) * length, array)] for index, array in enumerate(memory))
    turns = fetcher.fetch_each(groups)
    next(turns)
    assert memory[0].tobytes() == content
    assert (memory[1] == 255).all()
    next(turns)
    assert not memory[1].any()
    fetcher.close()
