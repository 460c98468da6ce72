"""The gather kernel's text: its results in an interpreter of PTX, and NVIDIA's assembler accepts it."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from flowstone import _native
from ptx import Kernel
from ptx_assembler import assemble_for_every_gpu

BASE, OUT, TABLE = 0x7F00_0000_0000, 0x7E00_0000_0000, 0x7D00_0000_0000


class Bytes:
    """A GPU's memory, an output, and a table, each at an address of its own; all else is out of reach."""

    def __init__(self, device: bytes, out_bytes: int, table: bytes) -> None:
        self.parts = {BASE: bytearray(device), OUT: bytearray(b"\xcd" * out_bytes), TABLE: bytearray(table)}
        self.stores = dict[int, int]()
        self.loads = 0

    def load(self, address: int, length: int) -> bytes:
        self.loads += 1
        part, offset = self._place(address, length)
        return bytes(part[offset : offset + length])

    def store(self, address: int, value: bytes) -> None:
        part, offset = self._place(address, len(value))
        assert part is self.parts[OUT], "the kernel writes into its output alone"
        for index in range(offset, offset + len(value)):
            self.stores[index] = self.stores.get(index, 0) + 1
        part[offset : offset + len(value)] = value

    def _place(self, address: int, length: int) -> tuple[bytearray, int]:
        assert address % length == 0, "misaligned"
        for base, part in self.parts.items():
            if base <= address and address + length <= base + len(part):
                return part, address - base
        raise AssertionError(f"{address:#x} is nobody's memory")


def played(runs: list[tuple[int, int, int]], device: bytes, *, blocks: int, threads: int) -> Bytes:
    """The memory after the kernel. Of each run: where it begins on the device, its length, its place in the output."""
    table = b"".join(struct.pack("<QII", BASE + start, length, offset) for start, length, offset in runs)
    memory = Bytes(device, max((offset + length for _, length, offset in runs), default=0) + 64, table)
    Kernel(_native.GATHER_PTX, "flowstone_gather").launch(blocks, threads, [TABLE, OUT, len(runs)], memory)
    return memory


def test_each_byte_of_each_run_is_written_once_and_no_other() -> None:
    chance, device = random.Random(7), random.Random(8).randbytes(6000)
    for blocks, threads in ((1, 1), (2, 3), (3, 32), (1, 128)):
        runs, offset = [], 0
        for _ in range(12):
            length = chance.choice([0, 1, 4, 15, 16, 17, 63, 64, 100, 512, chance.randrange(700)])
            runs.append((chance.choice([0, 16, 48, chance.randrange(5000)]), length, offset))
            offset += -(-length // 64) * 64
        memory = played(runs, device, blocks=blocks, threads=threads)
        expected = bytearray(b"\xcd" * len(memory.parts[OUT]))
        for start, length, offset in runs:
            expected[offset : offset + length] = device[start : start + length]
        assert memory.parts[OUT] == expected
        assert set(memory.stores.values()) <= {1}
        assert len(memory.stores) == sum(length for _, length, _ in runs)


def test_what_lies_at_sixteen_bytes_goes_by_sixteen() -> None:
    lines = [(64 * index, 64, 64 * index) for index in range(20)]
    by_sixteen = played(lines, bytes(64 * 20), blocks=4, threads=32).loads
    odd = [(start + 1, length, offset) for start, length, offset in lines]
    by_byte = played(odd, bytes(64 * 21), blocks=4, threads=32).loads
    assert by_byte - by_sixteen == 20 * (64 - 4)


def test_no_run_at_all_touches_nothing() -> None:
    assert played([], b"", blocks=1, threads=128).loads == 0


def test_the_parameters_are_those_that_the_engine_passes() -> None:
    kernel = Kernel(_native.GATHER_PTX, "flowstone_gather")
    assert [parameter.kind for parameter in kernel.parameters] == ["u64", "u64", "u32"]


def test_the_assembler_takes_the_text_for_every_gpu_that_it_knows(tmp_path: Path) -> None:
    assemble_for_every_gpu(_native.GATHER_PTX, tmp_path)
