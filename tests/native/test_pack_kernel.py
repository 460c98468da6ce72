"""The kernel for strided memory: its text in an interpreter of PTX, and NVIDIA's assembler accepts it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from test_gather_kernel import BASE, OUT, TABLE, Bytes

from flowstone import _native
from ptx import Kernel
from ptx_assembler import assemble_for_every_gpu


def played(
    item: int, shape: list[int], strides: list[int], ranges: list[tuple[int, int, int]], device: bytes, *, start: int,
    blocks: int = 2, threads: int = 32,
) -> Bytes:
    """The memory after the kernel. ranges: packed bytes from, their number, and where they go in the output."""
    layout = _native.GatherLayout(item_bytes=item, shape=shape, strides_bytes=strides)
    table = b"".join(
        _native.pack_table(layout, address=BASE + start, begin=begin, bytes=length, target=target)
        for begin, length, target in ranges
    )
    memory = Bytes(device, max((target + length for _, length, target in ranges), default=0) + 64, table)
    Kernel(_native.PACK_PTX, "flowstone_pack").launch(blocks, threads, [TABLE, OUT, len(table) // 128], memory)
    return memory


def packed(item: int, shape: list[int], strides: list[int], device: bytes, start: int) -> bytes:
    """Row-major bytes, by numpy."""
    flat = np.frombuffer(device, np.uint8)[start:]
    return np.lib.stride_tricks.as_strided(flat, (*shape, item), (*strides, 1)).tobytes()


def dense(item: int, shape: list[int], order: list[int], spread: int = 0) -> list[int]:
    """Strides of memory in which the dimensions lie in that order, the last one innermost."""
    strides, step = [0] * len(shape), item
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim] + spread
    return strides


CASES = {
    "channels last": ([3, 5, 4, 7], [0, 2, 3, 1], 0),
    "channels last, a part of the channels": ([3, 5, 4, 7], [0, 2, 3, 1], 16),
    "turned": ([13, 29], [1, 0], 0),
    "columns": ([17, 9], [0, 1], 48),
    "six dimensions backwards": ([2, 3, 2, 3, 2, 3], [5, 4, 3, 2, 1, 0], 0),
    "more dimensions than levels": ([2, 3, 2, 2, 2, 3, 2, 2], [3, 7, 1, 5, 0, 6, 2, 4], 0),
}


@pytest.mark.parametrize("item", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("case", CASES)
def test_each_element_is_written_once_to_its_place_and_no_other(case: str, item: int) -> None:
    shape, order, spread = CASES[case]
    chance, strides = random.Random(item), dense(item, shape, order, spread)
    reach = sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True)) + item
    device = random.Random(9).randbytes(reach + 64)
    for start, threads in ((0, 32), (item * 3, 5), (1, 64)):
        whole = packed(item, shape, strides, device, start)
        length = chance.randrange(1, len(whole) // item + 1) * item
        begin = chance.randrange(0, len(whole) - length + 1, item)
        ranges = [(0, len(whole), 64), (begin, length, 128 + len(whole)), (0, 0, 0)]
        memory = played(item, shape, strides, ranges, device, start=start, threads=threads)
        expected = bytearray(b"\xcd" * len(memory.parts[OUT]))
        for first, count, target in ranges:
            expected[target : target + count] = whole[first : first + count]
        assert memory.parts[OUT] == expected
        assert set(memory.stores.values()) == {1}
        assert len(memory.stores) == len(whole) + length


def test_what_is_repeated_is_read_where_it_lies() -> None:
    device = bytes(range(64))
    memory = played(4, [5, 3, 2], [0, 8, 0], [(0, 120, 0)], device, start=4)
    assert memory.parts[OUT][:120] == packed(4, [5, 3, 2], [0, 8, 0], device, 4)


def test_bytes_that_begin_within_an_element_are_taken_one_by_one() -> None:
    device = random.Random(3).randbytes(4000)
    whole = packed(8, [20, 20], [8, 160], device, 0)
    memory = played(8, [20, 20], [8, 160], [(13, 1001, 7)], device, start=0)
    assert memory.parts[OUT][7:1008] == whole[13:1014]


def test_runs_go_by_sixteen_where_all_lies_so() -> None:
    device = bytes(20 * 96)
    by_sixteen = played(2, [20, 32], [96, 2], [(0, 1280, 0)], device, start=0).loads
    by_two = played(2, [20, 32], [96, 2], [(0, 1280, 2)], device, start=0).loads
    assert by_two - by_sixteen == 1280 // 2 - 1280 // 16


def test_a_window_of_8_mib_has_a_part_for_each_block_of_a_launch() -> None:
    layout = _native.GatherLayout(item_bytes=4, shape=[1 << 14, 1 << 10], strides_bytes=[4, 1 << 16])
    window = _native.pack_table(layout, address=BASE, begin=1 << 20, bytes=8 << 20, target=0)
    assert len(window) == 128 * 32


def test_no_part_at_all_touches_nothing() -> None:
    assert played(4, [1], [4], [], b"", start=0, blocks=1, threads=256).loads == 0


def test_the_parameters_are_those_that_the_engine_passes() -> None:
    kernel = Kernel(_native.PACK_PTX, "flowstone_pack")
    assert [parameter.kind for parameter in kernel.parameters] == ["u64", "u64", "u32"]


def test_the_assembler_takes_the_text_for_every_gpu_that_it_knows(tmp_path: Path) -> None:
    assemble_for_every_gpu(_native.PACK_PTX, tmp_path)
