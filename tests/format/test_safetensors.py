"""Every segment, and the index, is a file that the official safetensors package opens."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import safe_open

import flowstone as fs
from flowstone.plan import write
from flowstone.table.dtype import DTYPES as KNOWN
from golden.make import DTYPES, pattern
from strategies import raw_bytes

NUMPY_LACKS = ("bfloat16", "float8")


@pytest.fixture
def saved(store: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Tensors of every dtype, small and large, whole and strided, and their checkpoint."""
    state = {str(dtype).removeprefix("torch."): pattern(torch.empty(3, 5, dtype=dtype), 3) for dtype in DTYPES}
    state |= {
        "large": pattern(torch.empty(700, 1000), 9), "strided": pattern(torch.empty(50, 90), 8).T,
        "empty": torch.empty(0, 3), "scalar": torch.tensor(4.0),
        "page": pattern(torch.empty(65536, dtype=torch.uint8), 1),
    }
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state)
    return store / "step-00000001", state


def test_safetensors_for_torch_opens_every_segment(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    checkpoint, state = saved
    values: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob("rank-*.safetensors"):
        values |= safetensors.torch.load_file(path)
    tensors = {name: value for name, value in values.items() if not name.startswith("__pad__.")}
    assert set(tensors) == set(state)
    for name, value in state.items():
        kind = KNOWN[str(value.dtype).removeprefix("torch.")]
        if kind.as_bytes:
            assert tensors[name].dtype == torch.uint8
            assert tuple(tensors[name].shape) == (*value.shape, kind.item_bytes)
        else:
            assert (tensors[name].dtype, tensors[name].shape) == (value.dtype, value.shape)
        assert raw_bytes(tensors[name]).tobytes() == raw_bytes(value).tobytes(), name


def test_safetensors_for_numpy_opens_every_segment(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    checkpoint, state = saved
    with safe_open(checkpoint / "rank-00000.safetensors", "np") as file:
        assert {name for name in file.keys() if not name.startswith("__pad__.")} == set(state)  # noqa: SIM118
        assert file.metadata() == {"format": "pt", "flowstone": "1"}
        for name, value in state.items():
            if not name.startswith(NUMPY_LACKS):
                assert file.get_tensor(name).tobytes() == raw_bytes(value).tobytes(), name


def test_padding_is_explicit_and_zero(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    checkpoint, _ = saved
    with safe_open(checkpoint / "rank-00000.safetensors", "np") as file:
        pads = [file.get_tensor(name) for name in file.keys() if name.startswith("__pad__.")]  # noqa: SIM118
    assert pads
    assert all(pad.dtype == np.uint8 and not pad.any() for pad in pads)


def test_safetensors_opens_the_index(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    checkpoint, state = saved
    with safe_open(checkpoint / "index.safetensors", "np") as file:
        columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        dtypes = file.metadata()["dtypes"].split()
    assert {f"torch.{dtypes[row]}" for row in columns["tensor.dtype"]} == {str(value.dtype) for value in state.values()}
    assert int(columns["tensor.ndim"].sum()) == len(columns["tensor.shape"])
    assert bytes(columns["tensor.name"]).decode() == "".join(state)
    assert set(safetensors.torch.load_file(checkpoint / "index.safetensors")) == set(columns)


def test_slices_of_a_sharded_tensor_are_named_by_their_box(store: Path) -> None:
    from unittest import mock

    from flowstone.state import describe
    from forge import split_rows

    split = lambda state, **how: split_rows(describe(state, **how), "table", 2)  # noqa: E731
    with mock.patch("flowstone.save.planning.describe", split), fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"table": torch.arange(12.0).reshape(4, 3)})
    tensors = safetensors.numpy.load_file(store / "step-00000001/rank-00000.safetensors")
    assert tensors["table[0:2,0:3]"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["table[2:4,0:3]"].tolist() == [[6, 7, 8], [9, 10, 11]]


def test_a_rolled_over_segment_opens_and_reads_back(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.save.plan_cache.plan_writes", partial(write.plan_writes, header_bytes_max=4096))
    state = {f"tensor {i}": torch.full((i + 1,), float(i)) for i in range(60)}
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        blank = {name: torch.zeros_like(value) for name, value in state.items()}
        checkpointer.load(blank)
    checkpoint = store / "step-00000001"
    rows = json.loads((checkpoint / "manifest.json").read_bytes())["segments"]
    assert [row["name"] for row in rows[:2]] == ["rank-00000.safetensors", "rank-00000.0001.safetensors"]
    assert all(row["header_bytes"] <= 4096 for row in rows)
    tensors: dict[str, torch.Tensor] = {}
    for row in rows:
        tensors |= safetensors.torch.load_file(checkpoint / row["name"])
    for name, value in state.items():
        assert torch.equal(tensors[name], value)
        assert torch.equal(blank[name], value)
    assert fs.open(store).verify().sound
