"""One process of a pair: `python -m bench.pair_worker TURN.json OUTCOME.json`, in the environment of either tree.

It uses this tree's modules of the bench, and of Flowstone only the methods that every commit has: `Checkpointer` with
`save`, `wait` and `load`. So one file measures all commits.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

import flowstone as fs
from bench.records import Outcome, Task
from bench.state import State, build, empty
from bench.worker import load_repeatedly, save_repeatedly

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Turn:
    """A process' task: `task`, on a state of `tensors` tensors. The task's own `shape` is not used."""

    tensors: int
    task: Task


@dataclass(frozen=True, slots=True)
class Equal:
    """Parameters of one size and AdamW's two moments for each, in fp32; a layout, see bench/state.py."""

    tensors: int
    bytes: int

    @property
    def parameters(self) -> int:
        return max(1, self.tensors // (1 + len(MOMENTS)))

    @property
    def elements(self) -> int:
        """Of each tensor."""
        return max(1, self.bytes // (4 * (1 + len(MOMENTS)) * self.parameters))

    @property
    def state_bytes(self) -> int:
        return 4 * (1 + len(MOMENTS)) * self.parameters * self.elements

    def empty(self, phase: int | None, ranks: int = 1) -> State:
        """All parameters first, then the moments of each. For one rank."""
        assert ranks == 1
        names, shape = [str(number) for number in range(self.parameters)], (self.elements,)
        return {
            "model": {name: empty(shape, torch.float32, phase) for name in names},
            "moments": {name: {slot: empty(shape, torch.float32, phase) for slot in MOMENTS} for name in names},
        }

    def __str__(self) -> str:
        tensors = (1 + len(MOMENTS)) * self.parameters
        return f"A module and its AdamW optimizer, {self.state_bytes / 1e9:.3g} GB in {tensors:,} tensors of one size"


class Saver:
    """The tree's Flowstone with its defaults, as a rival of bench/worker.py. Opened inside the first timer."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._checkpointer: fs.Checkpointer | None = None
        self._state: dict[str, object] = {}

    def prepare(self, state: State, _what: str, /) -> None:
        """A module and an optimizer that hold the state's own tensors."""
        model, moments = state["model"], state["moments"]
        assert isinstance(model, dict)
        assert isinstance(moments, dict)
        parameters = torch.nn.ParameterList(model.values())
        optimizer = torch.optim.AdamW(parameters.parameters())
        for parameter, slots in zip(parameters, moments.values(), strict=True):
            optimizer.state[parameter] = {"step": torch.tensor(1.0), **slots}
        self._state = {"model": parameters, "optimizer": optimizer}

    def save(self, _state: State, number: int, /) -> Callable[[], object]:
        checkpointer = self._opened()
        checkpointer.save(number, self._state)
        return checkpointer.wait

    def place(self, _number: int, /) -> Path:
        """The complete store, because any file of a commit has to be dropped from the page cache."""
        return self._store

    def load(self, _state: State, number: int, _how: str, /) -> None:
        assert self._opened().load(self._state).step == number

    def note(self, _number: int, /) -> str:
        return f"Flowstone {fs.__version__}, torch {torch.__version__}, Python {platform.python_version()}"

    def close(self) -> None:
        self._opened().close()

    def _opened(self) -> fs.Checkpointer:
        if self._checkpointer is None:
            self._checkpointer = fs.Checkpointer(self._store)
        return self._checkpointer


def perform(turn: Turn) -> Outcome:
    """Build the state, then save or load it with a Meter."""
    task, layout = turn.task, Equal(turn.tensors, turn.task.state_bytes)
    saver = Saver(Path(task.directory) / "store")
    if task.what == "save":
        samples = save_repeatedly(saver, build(layout), task)
        outcome = Outcome(layout.state_bytes, saves=samples, note=saver.note(task.times))
    else:
        outcome = Outcome(layout.state_bytes, loads=load_repeatedly(saver, layout.empty(None), task))
    saver.close()
    return outcome


def main(turn_path: str, outcome_path: str) -> None:
    turn = msgspec.json.decode(Path(turn_path).read_bytes(), type=Turn)
    Path(outcome_path).write_bytes(msgspec.json.encode(perform(turn)))


if __name__ == "__main__":
    main(*sys.argv[1:])
