"""The cost of saves when most of the state is unchanged: a frozen base, and a trained adapter.

    PYTHONPATH=src python -m bench.deltas DIRECTORY [--base 1e9] [--adapter 2e7] [--saves 20] [--restart]

The base is linear layers of float32 that no optimizer owns. The adapter's bytes are those of its weights and of both
moments of AdamW. A step of `--step-s` seconds after each save trains the adapter. With `--restart` each save is made by
a new process, which has loaded the one before, like a job that restarts each day. Prints the bytes that each save has
written, how long `save` and the next step's fence blocked training, and the space of the store on disk, with each file
counted once. At the end, every byte of the last step is verified.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

import flowstone as fs
from bench.script import folder_in
from flowstone.cli.disk_usage import Disk

SIDE = 2048  # of a layer of the base
MINUTES_MAX = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One save. `blocked_s`: the call; `fenced_s`: the next step's wait; `durable_s`: until it was committed."""

    written_bytes: int
    blocked_s: float
    fenced_s: float
    durable_s: float


class Job:
    """A training process, which has loaded the newest step if there is one."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(1)
        layers = max(1, options.base // (SIDE * SIDE * 4))
        base = nn.ModuleList([nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)]).requires_grad_(False)
        elements = options.adapter // 12 // layers  # twelve bytes each: the weight, and two moments
        adapter = nn.ParameterList([nn.Parameter(torch.randn(elements)) for _ in range(layers)])
        self.model = nn.ModuleDict({"base": base, "adapter": adapter})
        self.optimizer = torch.optim.AdamW(adapter.parameters())
        self.told: list[fs.Event] = []
        self._step_s = options.step_s
        self.checkpointer = fs.Checkpointer(options.directory / "run", on_event=self.told.append)
        if self.checkpointer.latest() is not None:
            self.checkpointer.load(self.state)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> float:
        """A step of the given length; returns how long it waited for a save."""
        begun = len(self.told)
        for parameter in self.model["adapter"].parameters():
            parameter.grad = torch.randn_like(parameter)
        time.sleep(self._step_s)
        self.optimizer.step()
        return sum(event.waited_s for event in self.told[begun:] if isinstance(event, fs.Fenced))

    def save(self, step: int) -> Sample:
        begun = time.perf_counter()
        save = self.checkpointer.save(step, self.state)
        blocked_s = time.perf_counter() - begun
        fenced_s = self.train()
        save.committed.result()
        (committed,) = [event for event in self.told if isinstance(event, fs.Committed) and event.step == step]
        return Sample(committed.bytes, blocked_s, fenced_s, committed.seconds)


def saves(options: argparse.Namespace, steps: Sequence[int]) -> list[Sample]:
    """Save in one process, which then ends."""
    job = Job(options)
    with job.checkpointer:
        job.train()
        return [job.save(step) for step in steps]


def measured(options: argparse.Namespace) -> list[Sample]:
    steps = range(1, options.saves + 1)
    runs = [[step] for step in steps] if options.restart else [list(steps)]
    samples = []
    for run in runs:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            samples += pool.apply_async(saves, (options, run)).get(60 * MINUTES_MAX)
    return samples


def lines(samples: Sequence[Sample], store: Path) -> Iterator[str]:
    first, *later = samples
    yield "| | written, MB | blocked, ms | the next step waited, ms | durable after, s |"
    yield "|---|---|---|---|---|"
    yield _row("the first save", [first])
    yield _row(f"each of {len(later)} later saves", later)
    usage = Disk(store).usage()
    largest = max(step.bytes for step in usage.steps)
    yield f"\nThe {len(usage.steps)} steps of {largest / 1e9:.3f} GB each take {usage.bytes / 1e9:.3f} GB on disk."


def _row(title: str, samples: Sequence[Sample]) -> str:
    columns = (
        _cell([sample.written_bytes / 1e6 for sample in samples]), _cell([save.blocked_s * 1e3 for save in samples]),
        _cell([sample.fenced_s * 1e3 for sample in samples]), _cell([sample.durable_s for sample in samples], 2),
    )
    return f"| {title} | {' | '.join(columns)} |"


def _cell(values: Sequence[float], digits: int = 1) -> str:
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = lambda text: int(float(text))  # noqa: E731
    parser.add_argument("directory", type=Path, help="where files go meanwhile, in a folder of its own")
    parser.add_argument("--base", type=whole, default=10**9, help="bytes that never change")
    parser.add_argument("--adapter", type=whole, default=2 * 10**7, help="bytes that change, the optimizer's included")
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--restart", action="store_true", help="a process for each save")
    options = parser.parse_args()
    with folder_in(options.directory) as options.directory:
        samples = measured(options)
        fs.open(options.directory / "run").verify()
        print("\n".join(lines(samples, options.directory / "run")))


if __name__ == "__main__":
    main()
