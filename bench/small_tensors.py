"""The cost of a tensor: the phases of a save and of a load of many small tensors, in microseconds for each.

    python -m bench.small_tensors DIRECTORY [--tensors 50000] [--bytes 4096] [--rounds 5]

For states of plain dictionaries, of a module, and of AdamW, each round saves (with a cached plan after the first save),
then loads into existing tensors with a new Checkpointer. Prints the medians of the rounds: by the clock, and by the
processor time of the calling thread, which other processes disturb less. Phases that overlap with writing or reading
are marked.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

import flowstone as fs
from bench.script import folder_in

State = dict[str, object]

SAVE = {
    "describe": "flowstone.save.planning.describe", "plan": "flowstone.save.plan_cache.plan_writes",
    "watch": "flowstone.save.capturing.watch_sources", "begin": "flowstone.commit.publish.begin_draft",
    "stage": "flowstone.save.capturing.start_capture",
    "objects (while writing)": "flowstone.save.pending_save.encode_sections",
    "index": "flowstone.format.index.IndexTemplate.fill", "publish": "flowstone.commit.publish.publish",
}
LOAD = {
    "read ahead (begins)": "flowstone.load.conductor.read_ahead",
    "open": "flowstone.reading.checkpoint.Checkpoint.check",
    "prepare": "flowstone.reading.compare.prepare",
    "match": "flowstone.reading.compare.match", "plan and land": "flowstone.load.loading.choose_destinations",
    "read (and deliver)": "flowstone.load.conductor.read", "finish": "flowstone.load.conductor.finish",
    "report": "flowstone.load.conductor.report",
}


@dataclass
class Spent:
    """Seconds by the clock, and of the calling thread's processor time."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


class Clock:
    """The time in the functions of a table, summed by label."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self.spent: dict[str, Spent] = defaultdict(Spent)
        self._table = table

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time every call of the table's functions while this is open."""
        patches = [mock.patch(path, self._timed(label, _resolved(path))) for label, path in self._table.items()]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    @contextmanager
    def timing(self, label: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.spent[label].wall_s += time.perf_counter() - wall
            self.spent[label].cpu_s += time.thread_time() - cpu

    def _timed(self, label: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            with self.timing(label):
                return function(*args, **more)

        return call


def _resolved(path: str) -> Callable[..., object]:
    target: object = fs
    for part in path.split(".")[1:]:
        target = getattr(target, part)
    assert callable(target)
    return target


def plain(tensors: int, elements: int) -> State:
    """One dictionary of tensors."""
    return {"model": {f"layers.{i}.weight": torch.randn(elements) for i in range(tensors)}}


def module(tensors: int, elements: int) -> State:
    """A module of modules with two parameters each."""
    side = max(1, elements // 2)
    layers = [_Pair(side) for _ in range(tensors // 2)]
    return {"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})}


class _Pair(torch.nn.Module):
    def __init__(self, side: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, side))
        self.bias = torch.nn.Parameter(torch.randn(2 * side))


def adamw(tensors: int, elements: int) -> State:
    """A module and its AdamW after a step: four tensors for each parameter."""
    model = torch.nn.ParameterList([torch.randn(elements) for _ in range(tensors // 4)])
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 1}


STATES = {"plain": plain, "module": module, "adamw": adamw}


def measure(state: State, directory: Path, rounds: int) -> tuple[list[Clock], list[Clock]]:
    """The times of each round's save and load; the first save, which plans, is not included."""
    saves, loads = [], []
    with fs.Checkpointer(directory, keep=fs.Keep(last=1)) as checkpointer:
        checkpointer.save(0, state)
        checkpointer.wait()
        for step in range(1, rounds + 1):
            gc.collect()
            clock = Clock(SAVE)
            with clock.running(), clock.timing("= durable"):
                with clock.timing("= blocked"):
                    save = checkpointer.save(step, state)
                save.committed.result()
            checkpointer.wait()
            saves.append(clock)
    for _ in range(rounds):
        with fs.Checkpointer(directory) as fresh:
            gc.collect()
            clock = Clock(LOAD)
            with clock.running(), clock.timing("= loaded"):
                fresh.load(state)
            loads.append(clock)
    return saves, loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where files go meanwhile, in a folder of its own")
    parser.add_argument("--tensors", type=int, default=50_000)
    parser.add_argument("--bytes", type=int, default=4096, help="of each tensor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    options = parser.parse_args()
    for name in options.states:
        state = STATES[name](options.tensors, options.bytes // 4)
        with folder_in(options.directory) as own:
            measured = measure(state, own / "run", options.rounds)
        for verb, clocks in zip(("save", "load"), measured, strict=True):
            print(f"{verb} of {options.tensors:,} tensors of {options.bytes:,} bytes, {name}")
            print_table(clocks, options.tensors)


def print_table(clocks: Sequence[Clock], tensors: int) -> None:
    """The medians, phases first, in the order in which they end."""
    print(f"  {'':<24} {'ms':>8} {'us a tensor':>12} {'cpu ms':>8} {'us a tensor':>12}")
    for label in sorted(clocks[0].spent, key=lambda label: label[0] == "="):
        wall_s = statistics.median(clock.spent[label].wall_s for clock in clocks)
        cpu_s = statistics.median(clock.spent[label].cpu_s for clock in clocks)
        print(
            f"  {label:<24} {wall_s * 1e3:8.1f} {wall_s / tensors * 1e6:12.2f} {cpu_s * 1e3:8.1f} "
            f"{cpu_s / tensors * 1e6:12.2f}"
        )


if __name__ == "__main__":
    main()
