"""Makes the golden checkpoint of a format version; run once for each, in tests/: `python -m golden.make v1`.

Every value follows from a formula, so that later readers can be checked without this writer.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import flowstone as fs
from flowstone.state import describe
from forge import split_rows
from strategies import raw_bytes

GOLDEN = Path(__file__).resolve().parent
STEP = 42
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
]


def pattern(value: torch.Tensor, salt: int) -> torch.Tensor:
    """`value`, whose byte i is (7 i + salt) mod 251; of bools the lowest bit."""
    with torch.no_grad():
        raw = raw_bytes(value)
        numbers = (7 * np.arange(raw.size) + salt) % 251
        raw[...] = (numbers & (1 if value.dtype is torch.bool else 255)).astype(np.uint8).reshape(raw.shape)
    return value


class Net(torch.nn.Module):
    """Tied weights, a buffer, a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def objects() -> dict[str, object]:
    """One value of every kind that objects.json knows."""
    nan = float(np.frombuffer(bytes.fromhex("0100000000007cff"), np.float64)[0])
    return {
        "none": None, "true": True, "int": -(2**53), "big": 3**200, "float": 0.1, "negative zero": -0.0, "nan": nan,
        "infinity": float("-inf"), "complex": complex(-0.0, 1.5), "text": "snow ☃", "surrogate": "\ud800",
        "bytes": b"\x00\xff", "bytearray": bytearray(b"ab"), "list": [1, [2]], "tuple": (1, (2,)),
        "int keys": {0: "a", (1, 2): "b", None: "c"}, "$dollar": 1, "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("hello"), "set": {1, 2}, "frozenset": frozenset({"x"}), "deque": deque([1, 2], 5),
        "range": range(1, 10, 3), "slice": slice(None, 4), "int8": np.int8(-5), "float32": np.float32(0.1),
        "day": np.datetime64("2024-02-29", "D"), "str_": np.str_("é"), "bytes_": np.bytes_(b"\x01"),
        "dtype": torch.bfloat16, "device": torch.device("cuda:1"), "size": torch.Size([2, 3]),
        "numpy": np.dtype("int16"),
        "long": bytes(i % 251 for i in range(66_000)), "long array": bytearray(i % 241 for i in range(66_000)),
    }


def blank() -> dict[str, object]:
    """What a new process hands to load."""
    net = Net()
    return {
        "model": net,
        "optimizer": torch.optim.AdamW(net.parameters(), lr=0.5),
        "kinds": {str(dtype).removeprefix("torch."): torch.zeros(2, 3, dtype=dtype) for dtype in DTYPES},
        "empty": torch.zeros(0, 4), "table": torch.zeros(6, 4), "array": np.zeros((3, 2), np.int16),
        "own": fs.PerRank({"noise": torch.zeros(5), "seed": 0}), "objects": None, "step": 0,
    }


def filled() -> dict[str, object]:
    """The state that every golden checkpoint holds."""
    state = blank()
    net, optimizer = state["model"], state["optimizer"]
    for salt, parameter in enumerate([net.embed.weight, net.head.bias, net.scale]):
        pattern(parameter, salt)
        first, other = (pattern(torch.empty_like(parameter), 10 * salt + i) for i in range(2))
        optimizer.state[parameter] = {"step": torch.tensor(42.0), "exp_avg": first, "exp_avg_sq": other}
    optimizer.param_groups[0]["lr"] = 0.25
    pattern(net.seen, 5)
    for salt, tensor in enumerate([*state["kinds"].values(), state["table"]]):
        pattern(tensor, 20 + salt)
    state["array"][...] = np.arange(6).reshape(3, 2) - 3
    state["own"] = fs.PerRank({"noise": pattern(torch.empty(5), 99), "seed": 7})
    return state | {"objects": objects(), "step": STEP}


def main(version: str) -> None:
    store = GOLDEN / version
    # One tensor lies in two boxes, as two ranks would have saved it.
    split = lambda state, **how: split_rows(describe(state, **how), "table", 2)  # noqa: E731
    with mock.patch("flowstone.save.planning.describe", split), fs.Checkpointer(store) as checkpointer:
        checkpointer.save(STEP, filled())
    (store / "flowstone.lock").unlink()


if __name__ == "__main__":
    main(sys.argv[1])
