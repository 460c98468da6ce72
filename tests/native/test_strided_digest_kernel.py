"""The kernel that digests strided memory: its text in an interpreter of PTX, and NVIDIA's assembler accepts it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_gather_kernel import BASE, OUT, TABLE, Bytes
from test_pack_kernel import dense, packed

from flowstone import _native
from ptx import Kernel
from ptx_assembler import assemble_for_every_gpu

HOST_MAX = _native.DIGESTED_BY_HOST_MAX


def layout_of(item: int, shape: list[int], strides: list[int]) -> _native.GatherLayout:
    return _native.GatherLayout(item_bytes=item, shape=shape, strides_bytes=strides)


def played(
    item: int, shape: list[int], strides: list[int], parts: list[tuple[int, int]], device: bytes, *, start: int,
    blocks: int = 1, threads: int = 32,
) -> list[int]:
    """Digests of packed bytes, of which each part has the first one and their number."""
    table = b"".join(
        _native.digest_table(
            layout_of(item, shape, strides), address=BASE + start, begin=begin, bytes=length, target=8 * number
        )
        for number, (begin, length) in enumerate(parts)
    )
    memory = Bytes(device, 8 * len(parts), table)
    Kernel(_native.STRIDED_DIGEST_PTX, "flowstone_digest_strided").launch(
        blocks, threads, [TABLE, OUT, len(parts)], memory
    )
    assert set(memory.stores.values()) <= {1}
    return [int.from_bytes(memory.parts[OUT][8 * index : 8 * index + 8], "little") for index in range(len(parts))]


def expected(
    item: int, shape: list[int], strides: list[int], parts: list[tuple[int, int]], device: bytes, *, start: int
) -> list[int]:
    whole = packed(item, shape, strides, device, start)
    return [_native.xxh3_64(whole[begin : begin + length]) for begin, length in parts]


CASES = {
    "channels last": ([3, 9, 6, 7], [0, 2, 3, 1], 0),
    "a part of the channels": ([3, 9, 6, 7], [0, 2, 3, 1], 16),
    "turned": ([23, 59], [1, 0], 0),
    "columns": ([67, 19], [0, 1], 48),
    "six dimensions, two of which are one": ([4, 3, 4, 3, 4, 7], [1, 0, 2, 3, 5, 4], 0),
}


@pytest.mark.parametrize("item", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("case", CASES)
def test_a_digest_is_that_of_the_bytes_in_order(case: str, item: int) -> None:
    shape, order, spread = CASES[case]
    chance, strides = random.Random(item), dense(item, shape, order, spread)
    assert layout_of(item, shape, strides).is_shallow
    reach = sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True)) + item
    device = random.Random(9).randbytes(reach + 64)
    for start in (0, item * 3, 1):
        size = len(packed(item, shape, strides, device, start))
        parts = [(0, size)]
        for most in (600, 1300, 4000):
            length = min(chance.randrange(HOST_MAX // item + 1, most // item + 20) * item, size)
            parts.append((chance.randrange(0, size - length + 1, item), length))
        how = {"item": item, "shape": shape, "strides": strides, "parts": parts, "device": device, "start": start}
        assert played(**how) == expected(**how)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [241, 256, 257, 512, 513, 576, 577, 1023, 1024, 1025, 1088, 1089, 2048, 2049])
def test_each_length_ends_as_the_files_digest_does(length: int) -> None:
    device = random.Random(length).randbytes(6000)
    shape, strides = [50, 60], [1, 64]
    parts = [(0, length), (37, length)]
    assert played(1, shape, strides, parts, device, start=5) == expected(1, shape, strides, parts, device, start=5)


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (1, 128), (3, 64), (2, 96)])
def test_each_part_is_digested_once_whatever_the_grid(blocks: int, threads: int) -> None:
    device = random.Random(blocks).randbytes(4000)
    parts = [(index * 4, 244 + index * 4) for index in range(11)]
    actual = played(4, [20, 40], [4, 80], parts, device, start=0, blocks=blocks, threads=threads)
    assert actual == expected(4, [20, 40], [4, 80], parts, device, start=0)


def test_what_is_repeated_or_goes_backwards_is_digested_as_it_is_read() -> None:
    device = random.Random(5).randbytes(4096)
    for shape, strides, start in (([90, 5], [0, 8], 4), ([1200], [0], 0), ([30, 40], [-80, 2], 3000)):
        item = 2
        whole = b"".join(
            device[start + sum(position * stride for position, stride in zip(place, strides, strict=True)) :][:item]
            for place in places(shape)
        )
        assert played(item, shape, strides, [(0, len(whole))], device, start=start) == [_native.xxh3_64(whole)]


def places(shape: list[int]) -> list[list[int]]:
    places: list[list[int]] = [[]]
    for side in shape:
        places = [[*place, index] for place in places for index in range(side)]
    return places


def test_arrays_with_more_dimensions_apart_than_a_row_of_the_table_has_are_told() -> None:
    shape = [2, 3, 2, 2, 2, 3, 2, 2]
    assert not layout_of(4, shape, dense(4, shape, [3, 7, 1, 5, 0, 6, 2, 4])).is_shallow
    assert layout_of(4, shape, dense(4, shape, [0, 1, 2, 3, 4, 5, 6, 7])).is_shallow


def test_no_part_at_all_touches_nothing() -> None:
    assert played(4, [1], [4], [], b"", start=0, threads=128) == []


def test_the_parameters_are_those_that_the_engine_passes() -> None:
    kernel = Kernel(_native.STRIDED_DIGEST_PTX, "flowstone_digest_strided")
    assert [parameter.kind for parameter in kernel.parameters] == ["u64", "u64", "u32"]


def test_the_assembler_takes_the_text_for_every_gpu_that_it_knows(tmp_path: Path) -> None:
    assemble_for_every_gpu(_native.STRIDED_DIGEST_PTX, tmp_path)
