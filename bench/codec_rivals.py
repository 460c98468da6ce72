"""Measure one rival, in a process of its own, that saves a training's state step by step with compression.

    python -m bench.codec_rivals KIND DIRECTORY STATES BYTES_PER_S

STATES is a file by torch.save with a list of states, each a step after the one before. KIND is one of KINDS;
bench.codecs starts this with an interpreter that has its packages. Prints, as JSON, the medians of all saves but the
first two: seconds until everything is durable, bytes written, processor seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bench.meter import files_below, make_durable
from bench.throttle import held_to

KINDS = {  # each with the environment that has its packages (bench/pins)
    "Orbax, its zstd": "orbax", "Orbax, uncompressed": "orbax", "difference, zstd 1": "codecs",
}
LEVEL = 1

State = Mapping[str, torch.Tensor]
Save = Callable[[State, Path], None]


def orbax(*, compressed: bool) -> Save:
    """Orbax as in bench/rivals/orbax_pytree.py."""
    from bench.rivals.orbax_pytree import Orbax

    rival = Orbax(Path("/"), compressed=compressed)
    rival.prepare({}, "save")

    def save(state: State, folder: Path) -> None:
        rival.place = lambda _: folder  # type: ignore[method-assign]
        rival.save(dict(state), 0)()

    return save


def difference() -> Save:
    """The baseline of papers on differential checkpoints: the difference from the step before, by zstd, in one file.

    The difference is computed by exclusive or, so that nothing is lost. The first state is compressed in full.
    """
    import zstandard

    encoder, last = zstandard.ZstdCompressor(level=LEVEL), dict[str, torch.Tensor]()

    def save(state: State, folder: Path) -> None:
        folder.mkdir()
        with open(folder / "difference.zst", "wb") as file:
            for name, tensor in state.items():
                now = tensor.contiguous().view(torch.uint8)
                left = now ^ last[name] if name in last else now
                file.write(encoder.compress(left.numpy().data))
                last[name] = now.clone()
        make_durable(folder)

    return save


def main() -> None:
    kind, directory, states, rate = sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    save = difference() if KINDS[kind] == "codecs" else orbax(compressed=kind == "Orbax, its zstd")
    rows = []
    with tempfile.TemporaryDirectory(dir=directory) as own, held_to(rate, directory):
        for step, state in enumerate(torch.load(states)):
            folder = Path(own).absolute() / str(step)
            begin, cpu = time.perf_counter(), time.process_time()
            save(state, folder)
            spent = time.perf_counter() - begin, time.process_time() - cpu
            rows.append((spent[0], sum(path.stat().st_size for path in files_below(folder)), spent[1]))
    print(json.dumps([statistics.median(column) for column in zip(*rows[2:], strict=True)]), flush=True)
    os._exit(0)  # without waiting for Orbax's threads


if __name__ == "__main__":
    main()
