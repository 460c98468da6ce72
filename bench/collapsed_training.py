"""The effect on training when the memory of its state is collapsed into huge pages, during that and afterwards.

    PYTHONPATH=src python -m bench.collapsed_training DIRECTORY [--rounds 5] [--layers 120] [--seconds 20]

A model of linear layers and its AdamW train on the processor. Each round has two processes, in alternating order: one
with the defaults, and one with collapse=False. Both save once, then train for --seconds ("while": the pass runs in one
of them), wait for the pass, and train as long again ("after"). Prints the ratios of each pair: seconds and processor
seconds of a step, with collapsing divided by without.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

import flowstone as fs
from bench.script import folder_in
from bench.watching import MINUTES_MAX, await_pass

WIDTH = 836  # of a layer: 2.8 MB
BATCH = 64


@dataclass(frozen=True, slots=True)
class Phase:
    step_s: float
    step_cpu_s: float


class Loop:
    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        linear = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(layers))
        self.model = torch.nn.Sequential(*linear)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._batch = torch.randn(BATCH, WIDTH)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()

    def train(self, seconds: float) -> Phase:
        begin, begin_cpu, steps = time.perf_counter(), time.process_time(), 0
        while (passed := time.perf_counter() - begin) < seconds:
            self.step()
            steps += 1
        return Phase(passed / steps, (time.process_time() - begin_cpu) / steps)


def act(options: argparse.Namespace, directory: Path, collapse: bool) -> tuple[Phase, Phase]:
    """In a process of its own."""
    loop = Loop(options.layers)
    for _ in range(3):
        loop.step()
    with fs.Checkpointer(directory, engine=fs.EngineOptions(collapse=collapse), budget_bytes=1 << 30) as checkpointer:
        checkpointer.save(1, {"model": loop.model, "optimizer": loop.optimizer}).committed.result()
        during = loop.train(options.seconds)
        await_pass(checkpointer)
        return during, loop.train(options.seconds)


def pair(options: argparse.Namespace, number: int) -> dict[bool, tuple[Phase, Phase]]:
    measured = {}
    for collapse in (True, False) if number % 2 else (False, True):
        spawn = multiprocessing.get_context("spawn")
        with folder_in(options.directory) as directory, ProcessPoolExecutor(1, mp_context=spawn) as pool:
            measured[collapse] = pool.submit(act, options, directory, collapse).result(60 * MINUTES_MAX)
    return measured


def lines(pairs: Sequence[dict[bool, tuple[Phase, Phase]]]) -> list[str]:
    lines = []
    for index, name in enumerate(("while", "after")):
        for metric in ("step_s", "step_cpu_s"):
            ratios = [getattr(pair[True][index], metric) / getattr(pair[False][index], metric) for pair in pairs]
            lines.append(f"{name}: {metric} {median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) of that without")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where files go meanwhile, in a folder of its own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    pairs = []
    for number in range(options.rounds):
        pairs.append(pair(options, number))
        print(f"{number + 1} of {options.rounds} pairs: {pairs[-1]}", flush=True)
    print("\n".join(lines(pairs)))


if __name__ == "__main__":
    main()
