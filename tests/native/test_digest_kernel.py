"""The digest kernel's text: its results in an interpreter of PTX, and NVIDIA's assembler accepts it."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from flowstone import _native
from ptx import Kernel
from ptx_assembler import assemble_for_every_gpu

BASE, OUT, TABLE = 0x7F00_0000_0000, 0x7E00_0000_0000, 0x7D00_0000_0000
HOST_MAX = _native.DIGESTED_BY_HOST_MAX


class Bytes:
    """A GPU's memory, of which words with a byte of a part may be read; a table; an output."""

    def __init__(self, device: bytes, parts: list[tuple[int, int]]) -> None:
        self._device, self._parts = device + bytes(-len(device) % 16), parts
        self._table = b"".join(struct.pack("<QII", BASE + o, size, number) for number, (o, size) in enumerate(parts))
        self.out, self.loads = dict[int, int](), 0

    def load(self, address: int, length: int) -> bytes:
        assert address % length == 0, "misaligned"
        if TABLE <= address < TABLE + len(self._table):
            return self._table[address - TABLE : address - TABLE + length]
        offset, self.loads = address - BASE, self.loads + 1
        has_part = any(offset < start + size and start < offset + length for start, size in self._parts)
        assert has_part, "no byte of a part is there"
        return self._device[offset : offset + length]

    def store(self, address: int, value: bytes) -> None:
        number, left = divmod(address - OUT, 8)
        assert (left, len(value)) == (0, 8)
        assert number not in self.out, "written twice"
        self.out[number] = int.from_bytes(value, "little")


def played(device: bytes, parts: list[tuple[int, int]], *, blocks: int = 1, threads: int = 32) -> Bytes:
    """The memory after the kernel. Of each part: where it begins, and its length."""
    memory = Bytes(device, parts)
    Kernel(_native.DIGEST_PTX, "flowstone_digest").launch(blocks, threads, [TABLE, OUT, len(parts)], memory)
    return memory


def expected(device: bytes, parts: list[tuple[int, int]]) -> dict[int, int]:
    return {number: _native.xxh3_64(device[offset : offset + size]) for number, (offset, size) in enumerate(parts)}


@pytest.mark.parametrize("skew", [0, 1, 2, 4, 7, 8, 12])
def test_a_digest_is_that_of_the_file_for_each_length_and_place(skew: int) -> None:
    device = random.Random(skew).randbytes(9000)
    lengths = (HOST_MAX + 1, 256, 1024, 1025, 1088, 2047, 2048, 2049, 3009)
    parts = [(skew + 16 * index, size) for index, size in enumerate(lengths)]
    assert played(device, parts).out == expected(device, parts)


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (1, 128), (3, 64), (2, 96)])
def test_each_part_is_digested_once_whatever_the_grid(blocks: int, threads: int) -> None:
    chance = random.Random(blocks * threads)
    device = chance.randbytes(4000)
    parts = []
    for _ in range(11):
        size = chance.randrange(HOST_MAX + 1, 1500)
        parts.append((chance.randrange(len(device) - size), size))
    assert played(device, parts, blocks=blocks, threads=threads).out == expected(device, parts)


def test_what_lies_at_sixteen_bytes_is_read_by_sixteen_up_to_the_last_block() -> None:
    device = random.Random(1).randbytes(8193)
    whole, last = 7 * 1024 // 16, 15 * 64 // 16 + 64 // 16  # 8,191 bytes have 127 whole stripes, sixteen in a block
    assert played(device, [(0, 8192)]).loads == whole + 2 * last
    assert played(device, [(8, 8184)]).loads == 2 * (whole + last)
    assert played(device, [(1, 8192)]).loads == 3 * (whole + last)


def test_no_part_at_all_touches_nothing() -> None:
    memory = played(b"", [], threads=128)
    assert (memory.loads, memory.out) == (0, {})


def test_a_change_of_any_bit_and_words_that_change_places_change_the_digest() -> None:
    device = bytearray(random.Random(3).randbytes(1300))
    before = expected(bytes(device), [(0, len(device))])[0]
    for index in (0, 7, 63, 64, 1023, 1024, 1280, 1299):
        changed = device.copy()
        changed[index] ^= 1 << index % 8
        assert played(bytes(changed), [(0, len(device))]).out[0] != before
    for first, other in ((0, 8), (0, 64), (8, 1032), (64, 1216)):
        changed = device.copy()
        changed[first : first + 8], changed[other : other + 8] = device[other : other + 8], device[first : first + 8]
        assert played(bytes(changed), [(0, len(device))]).out[0] != before


def test_the_parameters_are_those_that_the_engine_passes() -> None:
    kernel = Kernel(_native.DIGEST_PTX, "flowstone_digest")
    assert [parameter.kind for parameter in kernel.parameters] == ["u64", "u64", "u32"]


def test_the_assembler_takes_the_text_for_every_gpu_that_it_knows(tmp_path: Path) -> None:
    assemble_for_every_gpu(_native.DIGEST_PTX, tmp_path)
