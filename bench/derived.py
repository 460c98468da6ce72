"""The gain and cost of `compress="derived"`: working weights that are a rounded master copy are not stored.

    PYTHONPATH=src python -m bench.derived DIRECTORY [--parameters 3e7] [--rounds 7]

The state is that of training in mixed precision: bfloat16 weights, their float32 master copy, and two float32 moments,
14 bytes a parameter. Each round saves it with the option and without, in changing order, waits until it is durable, and
loads it from the page cache. Prints medians: bytes in files, seconds until durable, processor seconds of this process,
seconds of a load, and the ratios of neighbouring measurements.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

import torch

import flowstone as fs
from bench.script import folder_in
from flowstone.config import Compress

SIDE = 2048  # of a weight
MODES: tuple[Compress, ...] = ("off", "derived")


@dataclass(frozen=True, slots=True)
class Sample:
    """One save and load."""

    stored_bytes: int
    durable_s: float
    processor_s: float
    load_s: float


def state(parameters: int) -> dict[str, dict[str, torch.Tensor]]:
    """Weights like those after some training: normal numbers; moments of the size of gradients."""
    torch.manual_seed(1)
    count = max(1, parameters // (SIDE * SIDE))
    master = {f"{index}.weight": torch.randn(SIDE, SIDE) * 0.02 for index in range(count)}
    return {
        "model": {name: tensor.bfloat16() for name, tensor in master.items()},
        "master": master,
        "exp_avg": {name: torch.randn_like(tensor) * 1e-4 for name, tensor in master.items()},
        "exp_avg_sq": {name: torch.rand_like(tensor) * 1e-8 for name, tensor in master.items()},
    }


def sample(checkpointer: fs.Checkpointer, step: int, saved: dict[str, dict[str, torch.Tensor]]) -> Sample:
    begin, processor = time.monotonic(), time.process_time()
    checkpoint = checkpointer.save(step, saved).committed.result()
    durable_s, processor_s = time.monotonic() - begin, time.process_time() - processor
    begin = time.monotonic()
    checkpointer.load(saved)
    stored_bytes = sum(row.bytes for row in checkpoint.manifest.segments)
    return Sample(stored_bytes, durable_s, processor_s, time.monotonic() - begin)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parameters", type=float, default=3e7)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    saved = state(int(options.parameters))
    samples: dict[Compress, list[Sample]] = {mode: [] for mode in MODES}
    with folder_in(options.directory) as root:
        for round_ in range(options.rounds + 1):
            for mode in MODES if round_ % 2 else MODES[::-1]:
                store = root / f"{mode}-{round_}"
                with fs.Checkpointer(store, engine=fs.EngineOptions(compress=mode)) as checkpointer:
                    samples[mode].append(sample(checkpointer, 1, saved))
                shutil.rmtree(store)
    for name, column in zip(("stored bytes", "durable s", "processor s", "load s"), range(4), strict=True):
        off, derived = (
            [float(astuple(sample)[column]) for sample in samples[mode][1:]] for mode in MODES  # after a warm-up
        )
        ratios = [mine / theirs for mine, theirs in zip(derived, off, strict=True)]
        print(f"{name:14} off {median(off):14.4g}  derived {median(derived):14.4g}  ratio {median(ratios):.3f}")


if __name__ == "__main__":
    main()
