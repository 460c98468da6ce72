"""A conversion stays within its declared memory, whatever the size of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import flowstone as fs
from memory_taken import return_freed_memory, tried
from own_process import run_in_own_process

MIB = 1 << 20
_MODULES = ("flowstone.convert.importing", "flowstone.convert.export", "flowstone.convert.diff")
BESIDE_BYTES = 40 * MIB  # of the budget: Python's own, headers, the engine's queues


def growth(verb: str, source: Path, target: Path, budget_bytes: int) -> int:
    """By how much the most memory that a process has had grows by a conversion."""
    return growth_of(f"fs.{verb}({str(source)!r}, {str(target)!r}, budget_bytes={budget_bytes})")


def growth_of(call: str, *needed: str) -> int:
    """The same by any call, as Python has it, in a process that has imported the modules that are `needed`."""
    outcome, taken = run_in_own_process(_called, call, needed)
    assert outcome == "done"
    return int(taken)


def _called(call: str, needed: Sequence[str]) -> tuple[str, int]:
    return_freed_memory()
    for name in (*_MODULES, *needed):
        import_module(name)
    return tried(lambda: exec(call, {"fs": fs}))


def convert_there_and_back(tmp_path: Path, total_bytes: int) -> None:
    """Of 20 tensors of that many bytes in all."""
    rows = total_bytes // 20 // 4 // 1024
    save_file({f"layer.{number}": torch.full((rows, 1024), float(number)) for number in range(20)},
              tmp_path / "model.safetensors")
    budget = 64 * MIB
    assert growth("import_checkpoint", tmp_path / "model.safetensors", tmp_path / "run", budget) < budget + BESIDE_BYTES
    (tmp_path / "model.safetensors").unlink()
    assert growth("export", tmp_path / "run", tmp_path / "hf", budget) < budget + BESIDE_BYTES


def test_three_hundred_megabytes_go_through_sixty_four(tmp_path: Path) -> None:
    convert_there_and_back(tmp_path, 300 * MIB)


def test_rules_take_no_more(tmp_path: Path) -> None:
    """A matrix of 128 MiB is transposed, others are interleaved and stacked, through the same window."""
    save_file({"big": torch.arange(32 * MIB, dtype=torch.int32).reshape(8192, 4096),
               **{f"l.{n}.{p}": torch.full((2048, 1024), float(n)) for n in range(5) for p in "qkv"}},
              tmp_path / "model.safetensors")
    rules = ("[fs.Transpose('big'), fs.Fuse(('l.{n}.q', 'l.{n}.k', 'l.{n}.v'), 'l.{n}.qkv', groups=16), "
             "fs.Stack('l.{n}.qkv', 'qkv')]")
    places = f"{str(tmp_path / 'model.safetensors')!r}, {str(tmp_path / 'hf')!r}"
    assert growth_of(f"fs.export({places}, budget_bytes={64 * MIB}, rules={rules})") < 64 * MIB + BESIDE_BYTES
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert tensors["qkv"].shape == (5, 6144, 1024)
    assert torch.equal(tensors["big"], torch.arange(32 * MIB, dtype=torch.int32).reshape(8192, 4096).t())


def test_a_training_state_goes_out_within_the_window(tmp_path: Path) -> None:
    """A matrix of 64 MiB, and the optimizer's two slots of it."""
    model = torch.nn.Linear(4096, 4096, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
    places = f"{str(tmp_path / 'run')!r}, {str(tmp_path / 'universal')!r}"
    assert growth_of(f"fs.export({places}, to='universal', budget_bytes={64 * MIB})") < 64 * MIB + BESIDE_BYTES


@pytest.mark.soak
def test_two_gigabytes_go_through_sixty_four_megabytes(tmp_path: Path) -> None:
    convert_there_and_back(tmp_path, 2048 * MIB)
