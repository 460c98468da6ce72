"""Makes the golden checkpoint of providers, once, in tests/: `python -m golden.make_provided provided-1`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import flowstone as fs
from golden.make import GOLDEN, STEP, pattern
from quantised import RowInt8


class Reel:
    """Frames in blocks, beside how long each lasts."""

    def __init__(self, blocks: Sequence[int], lasts: int) -> None:
        self.blocks = [np.zeros((n, 3), np.int16) for n in blocks]
        self.lasts = np.zeros(lasts, np.float32)
        self.at: object = None
        self.rate = 24


class ReelProvider(fs.Provider[Reel]):
    kind = "reel"

    def describe(self, value: Reel) -> Sequence[fs.Part | fs.ObjectPart]:
        ends = np.cumsum([0, *map(len, value.blocks)]).tolist()
        boxes = [fs.Box((begin, 0), block.shape) for begin, block in zip(ends, value.blocks, strict=False)]
        return [
            *(fs.Part("frames", "int16", (ends[-1], 3), box) for box in boxes),
            fs.Part.of("lasts", value.lasts, resizable=True),
            fs.ObjectPart("at"), fs.ObjectPart("rate", constant=True),
        ]

    def chunks(self, value: Reel) -> Iterable[object]:
        yield from value.blocks
        yield value.lasts
        yield value.at
        yield value.rate

    def restore(self, value: Reel, stored: Mapping[str, Any]) -> None:
        value.lasts, value.at = stored["lasts"], stored["at"]


def blank() -> dict[str, Any]:
    """What a new process hands to load."""
    codes, scale = torch.zeros(4, 3, dtype=torch.int8), torch.zeros(4, 1)
    return {"w": {"q": RowInt8(codes, scale, torch.bfloat16)}, "reel": [Reel([5], 0)], "step": 0}


def filled() -> dict[str, Any]:
    """The state that the golden checkpoint holds."""
    state = blank()
    pattern(state["w"]["q"].codes, 1)
    pattern(state["w"]["q"].scale, 2)
    reel = Reel([2, 3], 4)
    for begin, block in zip((0, 2), reel.blocks, strict=True):
        block[...] = np.arange(block.size).reshape(block.shape) + 3 * begin
    reel.lasts[...] = [0.5, 1.5, 2.5, 3.5]
    reel.at = {"frame": 3, "cut": (1, 2)}
    return state | {"reel": [reel], "step": STEP}


def main(name: str) -> None:
    with fs.register_provider(Reel, ReelProvider()), fs.Checkpointer(GOLDEN / name) as checkpointer:
        checkpointer.save(STEP, filled())
    (GOLDEN / name / "flowstone.lock").unlink()


if __name__ == "__main__":
    main(sys.argv[1])
