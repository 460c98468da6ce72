"""The effect of huge pages on memory that saves write into: the times to allocate it, to copy into it, and to reuse it.

    PYTHONPATH=src python -m bench.huge_pages [--bytes 1e9] [--rounds 5]

Files in memory (memfd), like those of the memory agent, get huge pages only if an administrator allows it
(/sys/kernel/mm/transparent_hugepage/shmem_enabled). The setting is printed and not changed. Anonymous memory, like the
arena's, is measured with advice for and against huge pages. The kinds of memory take turns. Prints medians and ranges.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from flowstone import _native
from flowstone.config import MIB

_CHOSEN = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_SMALL, _HUGE = 15, 14  # MADV_NOHUGEPAGE, MADV_HUGEPAGE
_PAGE = 4096


def ways(size: int, rounds: int) -> Mapping[str, Sequence[tuple[float, float, float]]]:
    """By kind of memory: seconds of each round to allocate that size, to copy as much into it, and to copy again."""
    source = _own(size, _HUGE)
    ways: dict[str, list[tuple[float, float, float]]] = {}
    acts: dict[str, Callable[[], tuple[float, float, float]]] = {
        "file, as saves reserve it": lambda: _file(source, size, by_fallocate=False),
        "file, by fallocate": lambda: _file(source, size, by_fallocate=True),
        "own memory, huge pages": lambda: _arena(source, size, _HUGE),
        "own memory, small pages": lambda: _arena(source, size, _SMALL),
    }
    for _ in range(rounds):
        for name, act in acts.items():
            ways.setdefault(name, []).append(act())
    source.close()
    return ways


def _own(size: int, advice: int) -> mmap.mmap:
    """Touched memory of this process."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    for offset in range(0, size, _PAGE):
        memory[offset] = 1
    return memory


def _file(source: mmap.mmap, size: int, *, by_fallocate: bool) -> tuple[float, float, float]:
    fd = os.memfd_create("flowstone-bench")
    try:
        begin = time.perf_counter()
        if by_fallocate:
            os.posix_fallocate(fd, 0, size)
        else:
            _native.reserve_memory(fd, 0, size)
        mapping = _native.Mapping(fd=fd, bytes=size, writable=True)
        return _copied(source, mapping.address, size, begin)
    finally:
        os.close(fd)


def _arena(source: mmap.mmap, size: int, advice: int) -> tuple[float, float, float]:
    begin = time.perf_counter()
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    held = ctypes.c_char.from_buffer(memory)
    copied = _copied(source, ctypes.addressof(held), size, begin)
    del held
    memory.close()
    return copied


def _copied(source: mmap.mmap, target: int, size: int, begin: float) -> tuple[float, float, float]:
    held = ctypes.c_char.from_buffer(source)
    ends = [time.perf_counter()]
    for _ in range(2):
        ctypes.memmove(target, ctypes.addressof(held), size)
        ends.append(time.perf_counter())
    return ends[0] - begin, ends[1] - ends[0], ends[2] - ends[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size = int(options.bytes) // (2 * MIB) * 2 * MIB
    chosen = _CHOSEN.read_text().strip() if _CHOSEN.exists() else "not there"
    print(f"{size / 1e9:.3g} GB, {options.rounds} rounds; shmem_enabled: {chosen}; "
          f"by advice: {'yes' if _native.has_huge_pages_by_advice() else 'no'}")
    for name, rounds in ways(size, options.rounds).items():
        columns = zip(*((*row, sum(row)) for row in rounds), strict=True)
        parts = zip(("reserved", "first copy", "second copy", "all"), columns, strict=True)
        print(f"{name}: " + "; ".join(
            f"{part} {median(values):.3f} s ({min(values):.3f}-{max(values):.3f})" for part, values in parts
        ))


if __name__ == "__main__":
    main()
