"""The effect of `EngineOptions(read_in_place=True)` on a load: seconds, processor time and memory.

    PYTHONPATH=src python -m bench.in_place DIRECTORY [--bytes 2e9] [--tensors 120] [--rounds 7]

A state of equal tensors is saved once. Each round then loads it twice, each time in a new process into new tensors:
through the arena and in place, in alternating order. The kernel is asked to drop the files from its page cache before
each load. A file system in memory (/dev/shm) ignores that, and stands for a device that is faster than a copy in
memory. Every tensor is compared with the saved one. Prints medians and ranges, and in how many pairs loading in place
was faster.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest import mock

import torch

import flowstone as fs
from bench.meter import Meter, cool, files_below, resident_bytes
from bench.script import folder_in
from flowstone.load import loading as pipeline_load

TITLES = {False: "through the arena", True: "in place"}
MINUTES_MAX = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """One load. `in_place_bytes` were read directly into tensors; `extra_peak_bytes` is beside the tensors' memory."""

    seconds: float
    cpu_s: float
    extra_peak_bytes: int
    in_place_bytes: int


def tensors_of(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """At the addresses that torch chooses, every byte written."""
    elements = options.bytes // options.tensors // 4
    return {f"layers.{index}": torch.full((elements,), -1.0) for index in range(options.tensors)}


def save(options: argparse.Namespace) -> None:
    state = tensors_of(options)
    for index, tensor in enumerate(state.values()):
        torch.arange(index, index + tensor.numel(), out=tensor)
    with fs.Checkpointer(options.directory) as checkpointer:
        checkpointer.save(1, state).committed.result()


def load(options: argparse.Namespace, in_place: bool) -> Sample:
    """In a process of its own. Raises ValueError if a loaded tensor is not the saved one."""
    state = tensors_of(options)
    cool(files_below(options.directory))
    gc.collect()
    placed: list[int] = []
    scatter = pipeline_load.scatter

    def heard(*arguments: object) -> object:
        result = scatter(*arguments)  # type: ignore[arg-type]
        placed.append(result.receipt.direct_bytes)
        return result

    before_bytes = resident_bytes()
    with mock.patch.object(pipeline_load, "scatter", heard):
        meter = Meter()
        with fs.Checkpointer(options.directory, engine=fs.EngineOptions(read_in_place=in_place)) as checkpointer:
            checkpointer.load(state)
        reading = meter.read()
    for index, tensor in enumerate(state.values()):
        if not torch.equal(tensor, torch.arange(index, index + tensor.numel(), dtype=tensor.dtype)):
            raise ValueError(f"tensor {index} is not what was saved")
    return Sample(reading.seconds, reading.cpu_s, reading.peak_bytes - before_bytes, sum(placed))


def apart(options: argparse.Namespace, in_place: bool) -> Sample:
    """`load`, in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(load, (options, in_place)).get(60 * MINUTES_MAX)


def rounds(options: argparse.Namespace) -> Iterator[dict[bool, Sample]]:
    for number in range(options.rounds):
        first = number % 2 == 1
        yield {in_place: apart(options, in_place) for in_place in (first, not first)}


def lines(samples: Sequence[dict[bool, Sample]], size: int) -> Iterator[str]:
    """A row of a table for each way, and the result of the pairs."""
    yield "| a load | seconds | CPU-s/GB | extra peak MB | read in place |"
    yield "|---|---|---|---|---|"
    for in_place, title in TITLES.items():
        of = [pair[in_place] for pair in samples]
        cells = (
            _cell([sample.seconds for sample in of], 2), _cell([sample.cpu_s / size * 1e9 for sample in of], 3),
            _cell([sample.extra_peak_bytes / 1e6 for sample in of], 0),
            f"{median(sample.in_place_bytes for sample in of) / size:.0%}",
        )
        yield f"| {title} | {' | '.join(cells)} |"
    ratios = [pair[True].seconds / pair[False].seconds for pair in samples]
    faster = sum(ratio < 1 for ratio in ratios)
    taken = f"A load in place took {_cell(ratios, 2)} of the time of a load through the arena"
    yield f"\n{taken}, and was faster in {faster} of {len(ratios)} rounds."


def _cell(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where files go meanwhile, in a folder of its own")
    parser.add_argument("--bytes", type=lambda text: int(float(text)), default=int(2e9))
    parser.add_argument("--tensors", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with folder_in(options.directory) as options.directory:
        save(options)
        print("\n".join(lines(list(rounds(options)), options.bytes)))


if __name__ == "__main__":
    main()
