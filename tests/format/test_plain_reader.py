"""docs/FORMAT.md is complete: a reader written from it alone reads saved checkpoints."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import plain_reader
from hypothesis import HealthCheck, given, settings

import flowstone as fs
from flowstone.state import describe
from forge import memory_at, split_rows
from strategies import State, raw_bytes, states

SOURCE = Path(plain_reader.__file__).read_text()


def test_plain_reader_has_under_140_lines_and_imports_nothing_of_ours() -> None:
    assert len(SOURCE.splitlines()) < 140
    tree = ast.parse(SOURCE)
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names <= {"numpy", "json", "pathlib", "struct"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states())
def test_plain_reader_reads_any_state(tmp_path_factory, state: State) -> None:
    store = tmp_path_factory.mktemp("run")
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state)
    tensors, objects, _ = plain_reader.read(store / "step-00000001")
    described = describe(state)
    whole = dict(zip(described.pieces.names, memory_at(described.pieces, described.places), strict=True))
    whole |= {alias.name: whole[alias.target] for alias in described.aliases}
    assert set(tensors) == set(whole)
    checkpoint = fs.open(store)
    for name, array in tensors.items():
        expected = checkpoint.read(name)
        assert array.tobytes() == raw_bytes(expected).tobytes(), name
        assert array.shape[: len(whole[name].shape)] == whole[name].shape
    assert list(objects) == list(state)


def test_plain_reader_puts_boxes_together(store: Path) -> None:
    from unittest import mock

    import torch

    table = torch.arange(600_000, dtype=torch.float32).reshape(600, 1000)
    split = lambda state, **how: split_rows(describe(state, **how), "table", 70)  # noqa: E731
    with mock.patch("flowstone.save.planning.describe", split), fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"table": table})
    tensors, _, _ = plain_reader.read(store / "step-00000001")
    assert np.array_equal(tensors["table"], table.numpy())


def test_plain_reader_finds_copies_and_rounds(store: Path) -> None:
    import torch

    torch.manual_seed(1)
    master = torch.randn(700, 1000)
    state = {"master": master, "copy": master.clone(), "work": master.bfloat16(), "half": master.half(), "n": 3}
    with fs.Checkpointer(store, engine=fs.EngineOptions(compress="derived")) as checkpointer:
        manifest = checkpointer.save(1, state).committed.result().manifest
    assert manifest.critical == ("delta", "copies", "codec.cast")
    tensors, _, _ = plain_reader.read(store / "step-00000001")
    for name in ("master", "copy", "work", "half"):
        assert tensors[name].tobytes() == raw_bytes(state[name]).tobytes(), name


def test_plain_reader_decodes_planes(store: Path) -> None:
    import torch

    torch.manual_seed(1)
    state = {
        "weights": torch.randn(700, 1000), "half": torch.randn(300_001).bfloat16(), "zeros": torch.zeros(40_000),
        "steps": torch.arange(100_000), "random": torch.randint(0, 256, (100_000,), dtype=torch.uint8),
    }
    with fs.Checkpointer(store, engine=fs.EngineOptions(compress="max")) as checkpointer:
        manifest = checkpointer.save(1, state).committed.result().manifest
    assert manifest.critical == ("delta", "codec.planes")
    tensors, _, _ = plain_reader.read(store / "step-00000001")
    for name, tensor in state.items():
        assert tensors[name].tobytes() == raw_bytes(tensor).tobytes(), name
