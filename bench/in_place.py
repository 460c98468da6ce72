"""What `EngineOptions(read_in_place=True)` changes about a load: seconds, processor time and memory.

    PYTHONPATH=src python -m bench.in_place DIRECTORY [--bytes 2e9] [--tensors 120] [--rounds 7]

A state of equal tensors is saved once. Each round then loads it twice, each time in a fresh process into fresh tensors:
through the arena and in place, by turns which of the two first. The kernel is asked to drop the files from its page
cache before each load, which a file system in memory (/dev/shm) ignores: it stands for a device that is faster than
memory is copied. Every tensor is compared with what was saved. Told are medians and ranges, and how often in place was
faster.
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
from flowstone.pipeline import load as pipeline_load

TITLES = {False: "through the arena", True: "in place"}
MINUTES_MAX = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """One load. `in_place_bytes` were read straight into tensors; `extra_peak_bytes` is beside the tensors' own."""

    seconds: float
    cpu_s: float
    extra_peak_bytes: int
    in_place_bytes: int


def tensors_of(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Where torch puts them, every byte written."""
    elements = options.bytes // options.tensors // 4
    return {f"layers.{at}": torch.full((elements,), -1.0) for at in range(options.tensors)}


def save(options: argparse.Namespace) -> None:
    state = tensors_of(options)
    for at, tensor in enumerate(state.values()):
        torch.arange(at, at + tensor.numel(), out=tensor)
    with fs.Checkpointer(options.directory) as checkpointer:
        checkpointer.save(1, state).committed.result()


def load(options: argparse.Namespace, in_place: bool) -> Sample:
    """In a process of its own. Raises ValueError where what was loaded is not what was saved."""
    state = tensors_of(options)
    cool(files_below(options.directory))
    gc.collect()
    placed: list[int] = []
    scatter = pipeline_load.scatter

    def heard(*arguments: object) -> object:
        found = scatter(*arguments)  # type: ignore[arg-type]
        placed.append(found.receipt.direct_bytes)
        return found

    before_bytes = resident_bytes()
    with mock.patch.object(pipeline_load, "scatter", heard):
        meter = Meter()
        with fs.Checkpointer(options.directory, engine=fs.EngineOptions(read_in_place=in_place)) as checkpointer:
            checkpointer.load(state)
        reading = meter.read()
    for at, tensor in enumerate(state.values()):
        if not torch.equal(tensor, torch.arange(at, at + tensor.numel(), dtype=tensor.dtype)):
            raise ValueError(f"tensor {at} is not what was saved")
    return Sample(reading.seconds, reading.cpu_s, reading.peak_bytes - before_bytes, sum(placed))


def apart(options: argparse.Namespace, in_place: bool) -> Sample:
    """`load`, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(load, (options, in_place)).get(60 * MINUTES_MAX)


def rounds(options: argparse.Namespace) -> Iterator[dict[bool, Sample]]:
    for number in range(options.rounds):
        first = number % 2 == 1
        yield {in_place: apart(options, in_place) for in_place in (first, not first)}


def lines(samples: Sequence[dict[bool, Sample]], size: int) -> Iterator[str]:
    """A row of a table for each way, and how the pairs compare."""
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
    yield f"\nIn place, of the other's seconds: {_cell(ratios, 2)}; faster in {faster} of {len(ratios)} pairs."


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
