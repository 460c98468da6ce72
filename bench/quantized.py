"""The effect of less precision in a checkpoint on a training that resumes from it.

    python -m bench.quantized DIRECTORY [--steps 60] [--more 60] [--rounds 3]

The demo's small GPT is trained with AdamW, saved exactly and by three sets of rules (`fs.Quantize`), and continues from
each of the four checkpoints with the same batches. Prints for each the bytes of its segments, the mean loss of the
steps after the resume, and its difference from that of the exact checkpoint. Rounds differ in the seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, median

from msgspec.structs import replace

import flowstone as fs
from bench.script import folder_in
from flowstone_demo.sizes import SMALL
from flowstone_demo.train import Training

RULES = {
    "exact": (),
    "moments": (fs.Quantize("optimizer.*.exp_avg*"),),
    "moments, block 64": (fs.Quantize("optimizer.*.exp_avg*", block=64),),
    "moments and weights": (fs.Quantize("optimizer.*.exp_avg*"), fs.Quantize("model.*")),
}


def resumed(directory: Path, seed: int, steps: int, more: int) -> dict[str, tuple[int, float]]:
    """For each set of rules the bytes of the segments, and the mean loss of the steps after the resume."""
    form = replace(SMALL, steps=steps + more)
    run, values = Training(form, seed), {}
    for _ in range(steps):
        run.train_step()
    for name, rules in RULES.items():
        with fs.Checkpointer(directory / name, rules=rules) as checkpointer:
            checkpointer.save(steps, run.state(steps))
    for name in RULES:
        other = Training(form, seed + 1000)
        with fs.Checkpointer(directory / name) as checkpointer:
            checkpointer.load(other.state(0))
        stored = sum(row.bytes for row in fs.open(directory / name).manifest.segments)
        values[name] = stored, mean(other.train_step() for _ in range(more))
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--more", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = []
    for seed in range(options.rounds):
        with folder_in(options.directory) as directory:
            rounds.append(resumed(directory, seed, options.steps, options.more))
    for name in RULES:
        sizes = [row[name][0] / row["exact"][0] for row in rounds]
        losses = [row[name][1] - row["exact"][1] for row in rounds]
        print(
            f"{name:22} bytes {median(sizes):.3f}  loss {median(row[name][1] for row in rounds):.4f}, "
            f"minus exact {median(losses):+.5f} ({min(losses):+.5f} to {max(losses):+.5f})"
        )


if __name__ == "__main__":
    main()
