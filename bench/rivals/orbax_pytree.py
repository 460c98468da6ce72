"""Orbax: its asynchronous PyTree checkpointer on numpy views of the state's tensors.

Orbax has no torch; jax is needed to import it, on the CPU. `make_durable` is inside the timer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import torch

from bench.meter import make_durable
from bench.rivals.base import SavesInDirectories
from bench.state import State


class Orbax(SavesInDirectories):
    def __init__(self, directory: Path, *, compressed: bool) -> None:
        super().__init__(directory.absolute())
        self._compressed = compressed

    def prepare(self, _state: State, _what: str, /) -> None:
        handler = ocp.PyTreeCheckpointHandler(use_compression=self._compressed)
        self._checkpointer = ocp.AsyncCheckpointer(handler)

    def save(self, state: State, number: int, /) -> Callable[[], object]:
        path = self.place(number)
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(arrays(state)))

        def wait() -> None:
            self._checkpointer.wait_until_finished()
            make_durable(path)

        return wait

    def load(self, state: State, number: int, _how: str, /) -> None:
        views = arrays(state)
        loaded = self._checkpointer.restore(self.place(number), args=ocp.args.PyTreeRestore(views))
        copy(loaded, views)

    def close(self) -> None:
        self._checkpointer.close()


def arrays(node: object) -> object:
    """The same tree, its tensors as numpy arrays of the same memory."""
    if isinstance(node, dict):
        return {name: arrays(child) for name, child in node.items()}
    assert isinstance(node, torch.Tensor)
    if node.dtype == torch.bfloat16:  # of which numpy itself knows nothing
        return node.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return node.numpy()


def copy(source: object, target: object) -> None:
    if isinstance(source, dict):
        assert isinstance(target, dict)
        for name, child in source.items():
            copy(child, target[name])
    else:
        assert isinstance(target, np.ndarray)
        np.copyto(target, np.asarray(source))


def open_rival(name: str, directory: Path) -> Orbax:
    return Orbax(directory, compressed=name != "orbax-best")
