"""Safetensors, as Hugging Face writes and reads them: exported, imported, and exported again, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from models import STEP, assert_same, raw, read_all, tensors
from processes import run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import flowstone as fs

BUDGET = 32 << 20  # windows of 4 MiB: tensors and chunks are cut by them


def load_shards(directory: Path) -> dict[str, torch.Tensor]:
    """By the format's own reader, after the index if there is one."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load_file(directory / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    shards = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(directory / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            shards |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            assert {name for name, where in weight_map.items() if where == file} == set(opened.keys())
    return shards


@pytest.mark.parametrize("shard_bytes", [5e9, 3e6, 1])
def test_an_exported_model_opens_with_the_formats_own_reader(saved: Path, tmp_path: Path, shard_bytes: float) -> None:
    report = fs.export(saved, tmp_path / "hf", shard_bytes=shard_bytes, budget_bytes=BUDGET)
    expected = tensors()
    del expected["head"]  # tied to embed: written once
    assert_same(load_shards(tmp_path / "hf"), expected)
    assert report.aliases == (("head", "embed"),)
    assert sorted(report.files) == sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert not list(tmp_path.glob(".*")), "neither draft nor journal is left"


def test_shards_have_the_size_that_was_asked_for(saved: Path, tmp_path: Path) -> None:
    fs.export(saved, tmp_path / "hf", shard_bytes=3e6, budget_bytes=BUDGET)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    lengths = {name: len(raw(tensor)) for name, tensor in tensors().items() if name != "head"}
    assert index["metadata"]["total_size"] == sum(lengths.values())
    sizes = {}
    for name, file in index["weight_map"].items():
        sizes.setdefault(file, []).append(lengths[name])
    assert all(sum(held) <= 3e6 or len(held) == 1 for held in sizes.values())
    assert len(sizes) == 3


def test_out_in_and_out_again_is_equal_to_the_last_bit(saved: Path, tmp_path: Path) -> None:
    fs.export(saved, tmp_path / "a", shard_bytes=3e6, budget_bytes=BUDGET)
    report = fs.import_checkpoint(tmp_path / "a", tmp_path / "run", step=7, budget_bytes=BUDGET)
    assert (report.step, report.kind, report.resumed_bytes) == (7, "safetensors", 0)
    expected = tensors()
    del expected["head"]
    assert_same(read_all(tmp_path / "run"), expected)
    fs.export(tmp_path / "run", tmp_path / "b", shard_bytes=5e9, budget_bytes=BUDGET)
    fs.import_checkpoint(tmp_path / "b" / "model.safetensors", tmp_path / "again")
    assert_same(read_all(tmp_path / "again"), expected)
    assert fs.open(tmp_path / "again").objects == {"model": {}}


def test_an_import_in_one_window_and_in_many_is_the_same_file(tmp_path: Path) -> None:
    save_file({name: t for name, t in tensors().items() if name != "head"}, tmp_path / "m.safetensors")
    fs.import_checkpoint(tmp_path / "m.safetensors", tmp_path / "one")
    fs.import_checkpoint(tmp_path / "m.safetensors", tmp_path / "many", budget_bytes=BUDGET)
    for name in ("rank-00000.safetensors", "index.safetensors", "objects.json"):
        entry, many = ((tmp_path / store / "step-00000000" / name).read_bytes() for store in ("one", "many"))
        assert entry == many, name


def test_an_imported_model_loads_into_a_module(tmp_path: Path) -> None:
    source, target = (torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.BatchNorm1d(400)) for _ in range(2))
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    fs.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run", section="net")
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.load({"net": target}).step == 0
        checkpointer.save(1, {"net": target})
    assert_same(dict(target.state_dict()), dict(source.state_dict()))


@pytest.mark.parametrize("how", ["columns", "fsdp"])
def test_a_checkpoint_of_four_ranks_is_exported_as_one_model(tmp_path: Path, how: str) -> None:
    run(4, "acts", "save_pattern", str(tmp_path / "run"), how)
    checkpoint = fs.open(tmp_path / "run")
    assert checkpoint.manifest.ranks == 4
    report = fs.export(checkpoint, tmp_path / "hf")
    shards = load_shards(tmp_path / "hf")
    assert set(shards) == {name.removeprefix("model.") for name in checkpoint.tensors if name.startswith("model.")}
    assert report.tensors
    for name, tensor in shards.items():
        assert raw(tensor) == raw(checkpoint.read(f"model.{name}")), name


@pytest.mark.parametrize("dtype", ["bf16", "float16", "float32", "float64"])
def test_a_cast_rounds_as_torch_does(tmp_path: Path, dtype: str) -> None:
    values = torch.cat([torch.randn(5000), torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40,
                        3.4e38, 65519.0, 65520.0, 1.00390625, 1.01171875])])
    state = {"model": {str(kind).removeprefix("torch."): values.to(kind).reshape(1, -1)
                       for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}}
    state["model"] |= {"scalar": torch.tensor(1.5), "ints": torch.arange(3)}
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state)
    report = fs.export(tmp_path / "run", tmp_path / "hf", dtype=dtype)
    whole = {"bf16": torch.bfloat16}.get(dtype) or getattr(torch, dtype)
    shards = load_shards(tmp_path / "hf")
    assert shards.pop("ints").dtype == torch.int64
    for name, tensor in shards.items():
        expected = state["model"][name].to(whole)
        assert tensor.dtype == whole
        assert np.array_equal(tensor.isnan(), expected.isnan())
        assert torch.equal(tensor.nan_to_num(1.0), expected.nan_to_num(1.0)), name
    assert "ints" not in report.cast
    assert len(report.cast) == (3 if dtype == "float32" else 4)


def test_rules_rename_and_leave_out(saved: Path, tmp_path: Path) -> None:
    report = fs.export(
        saved, tmp_path / "hf", rules=[fs.Skip("model.small.*"), fs.Rename("model.long", "model.body.weight")]
    )
    shards = load_shards(tmp_path / "hf")
    assert "body.weight" in shards
    assert "long" not in shards
    assert not any(name.startswith("small") for name in shards)
    assert len(report.skipped) == 300


def test_the_models_documents_go_with_it_and_come_back(saved: Path, tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "config.json").write_text('{"model_type": "gpt2"}')
    (documents / "vocab.txt").write_text("a\nb\n")
    (documents / "weights.bin").write_bytes(b"none of them")
    fs.export(saved, tmp_path / "a", documents=documents)
    fs.import_checkpoint(tmp_path / "a", tmp_path / "run")
    fs.export(tmp_path / "run", tmp_path / "b")
    for name in ("config.json", "vocab.txt", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    assert not (tmp_path / "b" / "weights.bin").exists()


def test_the_section_of_an_alias_is_exported_under_its_name(tmp_path: Path) -> None:
    shared = torch.randn(3, 4)
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(STEP, {"ema": {"w": shared}, "model": {"w": shared}})
    fs.export(tmp_path / "run", tmp_path / "hf", section="model")
    assert_same(load_shards(tmp_path / "hf"), {"w": shared})
