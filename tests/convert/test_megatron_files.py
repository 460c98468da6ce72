"""Distributed checkpoints of Megatron-core, read without it: bit for bit, and no code in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import assert_refused, assert_same, read_all
from test_torch_files import Malicious

import flowstone as fs
from golden.make_megatron import COMMON, HEADS, HIDDEN, LAYERS, MODEL, OPTIMIZER, PARAM_GROUPS, PLACE, RANKS, numbers


def test_what_two_tensor_parallel_ranks_saved_comes_in_as_whole_tensors(tmp_path: Path) -> None:
    report = fs.import_checkpoint(PLACE, tmp_path / "run", step=7)
    assert (report.kind, report.skipped) == ("megatron", ())
    assert_same(read_all(tmp_path / "run"), {name: numbers(name, shape) for name, shape in MODEL.items()})
    assert_same(read_all(tmp_path / "run", "optimizer."), {
        name.removeprefix("optimizer."): numbers(name, shape) for name, shape in OPTIMIZER.items()
    })
    assert fs.diff(PLACE, tmp_path / "run").equal
    assert fs.diff(tmp_path / "run", PLACE).equal


def test_what_is_no_tensor_becomes_objects(tmp_path: Path) -> None:
    fs.import_checkpoint(PLACE, tmp_path / "run")
    checkpoint = fs.open(tmp_path / "run")
    objects = checkpoint.objects
    assert {name: objects[name] for name in COMMON} == COMMON
    assert objects["optimizer"]["param_groups"] == PARAM_GROUPS
    assert objects["args"]["hidden_size"] == HIDDEN
    assert (objects["args"]["attention_backend"], objects["args"]["model_type"]) == (5, 1), "the enumerations' values"
    assert objects["args"]["params_dtype"].text == "bfloat16"
    assert objects["model"]["decoder.final_layernorm._extra_state"] == b"amax"
    for rank in range(RANKS):
        (kept,) = objects["rng_state"][f"0.{rank}"]
        assert kept["random_rng_state"] == (3, (1, 2), None)
        tensor = checkpoint.read(f"rng_state.0.{rank}.0.torch_rng_state")
        assert torch.equal(tensor, torch.arange(4, dtype=torch.uint8) + rank)


def test_the_ready_rules_read_its_stacked_layers(tmp_path: Path) -> None:
    rules = fs.ready_rules("megatron-to-gpt2", heads=HEADS, layers="stacked")
    others = [fs.Skip(f"{name}*") for name in ("optimizer", "rng_state", "args", "model.*_extra_state")]
    fs.import_checkpoint(PLACE, tmp_path / "run", rules=[*others, rules])
    stored = read_all(tmp_path / "run")
    key = "decoder.layers.mlp.linear_fc2.weight"
    for layer in range(LAYERS):
        name = next(name for name in stored if name.endswith(f"h.{layer}.mlp.c_proj.weight"))
        assert torch.equal(stored[name], numbers(key, MODEL[key])[layer].T)


def test_a_directory_of_checkpoints_is_its_latest(tmp_path: Path) -> None:
    shutil.copytree(PLACE, tmp_path / "all" / "iter_0000007")
    (tmp_path / "all" / "latest_checkpointed_iteration.txt").write_text("7")
    fs.import_checkpoint(tmp_path / "all", tmp_path / "run")
    assert fs.diff(tmp_path / "all", tmp_path / "run").equal
    (tmp_path / "all" / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(fs.DamagedError, match="lacks the latest iteration, iter_0000008"):
        fs.import_checkpoint(tmp_path / "all", tmp_path / "run2")
    (tmp_path / "all" / "iter_").mkdir()
    for outside in ("../7", "iter_/../iter_0000007", "iter_/../../other"):
        (tmp_path / "all" / "latest_checkpointed_iteration.txt").write_text(outside)
        with pytest.raises(fs.DamagedError, match="does not name an iteration"):
            fs.import_checkpoint(tmp_path / "all", tmp_path / "run2")


def test_what_is_no_distributed_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "all" / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "all" / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(fs.UnsupportedFormatError, match=r"not a distributed checkpoint[\s\S]*--ckpt-format torch_dist"):
        fs.import_checkpoint(tmp_path / "all", tmp_path / "run")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flattened_blocks_of_older_versions_are_whole_tensors(tmp_path: Path) -> None:
    """Each block of a grid was flattened, and each data-parallel rank had a range of each."""
    shape = (6, 10, 4)
    whole = numbers("exp", shape)
    grid = whole.reshape(2, 3, 2, 5, 1, 4).permute(0, 2, 4, 1, 3, 5).reshape(2, 2, 1, 60).contiguous()
    root = _older(tmp_path, grid, shape)
    fs.import_checkpoint(root, tmp_path / "run")
    assert torch.equal(fs.open(tmp_path / "run").read("optimizer.exp"), whole)
    with pytest.raises(fs.DamagedError, match=r"optimizer\.exp"):
        fs.import_checkpoint(_older(tmp_path, grid, (6, 10, 5)), tmp_path / "run2")


def _older(tmp_path: Path, grid: torch.Tensor, shape: tuple[int, ...]) -> Path:
    """A checkpoint with one such tensor, cut into ranges of every cell."""
    root = tmp_path / f"older-{shape[-1]}"
    dcp.save({"optimizer.exp": grid}, checkpoint_id=root)
    _cut_into_ranges(root, (17, 43))
    metadata = pickle.loads((root / ".metadata").read_bytes())
    metadata.mcore_data = {"optimizer.exp": {"nd_reformulated_orig_global_shape": shape}}
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save({"iteration": 3}, root / "common.pt")
    (root / "metadata.json").write_text((PLACE / "metadata.json").read_text())
    return root


def _cut_into_ranges(root: Path, lengths: tuple[int, ...]) -> None:
    """Write the one tensor of a directory again, in items that are ranges of its last dimension."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    state = {"optimizer.exp": torch.zeros(2, 2, 1, 60)}
    dcp.load(state, checkpoint_id=root)
    metadata: Any = pickle.loads((root / ".metadata").read_bytes())
    (index, info), = metadata.storage_data.items()
    chunks, metadata.storage_data = [], {}
    with (root / info.relative_path).open("wb") as written:
        for cell in [(a, b, 0) for a in range(2) for b in range(2)]:
            begin = 0
            for length in lengths:
                offset, place = torch.Size((*cell, begin)), written.tell()
                torch.save(state["optimizer.exp"][cell][begin : begin + length].clone().view(1, 1, 1, length), written)
                chunks.append(ChunkStorageMetadata(offset, torch.Size((1, 1, 1, length))))
                kind = type(info)
                metadata.storage_data[MetadataIndex(index.fqn, offset)] = kind(
                    info.relative_path, place, written.tell() - place
                )
                begin += length
    metadata.state_dict_metadata["optimizer.exp"].chunks = chunks
    (root / ".metadata").write_bytes(pickle.dumps(metadata))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _config(root: Path, **changed: Any) -> None:
    record = json.loads((root / "metadata.json").read_text())
    (root / "metadata.json").write_text(json.dumps(record | changed))


def _common(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record: dict[str, Any] = {"iteration": 7}
    change(record)
    torch.save(record, root / "common.pt")


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda it: (it / "metadata.json").unlink(), "was not finished"),
    "torn config": (lambda it: _cut(it / "metadata.json"), "is not valid JSON"),
    "backend": (lambda it: _config(it, sharded_backend="zarr"), r"unknown Megatron-core backend[\s\S]*zarr"),
    "version": (lambda it: _config(it, sharded_backend_version=2), "or version"),
    "no metadata": (lambda it: (it / ".metadata").unlink(), r"lacks \.metadata"),
    "torn metadata": (lambda it: _cut(it / ".metadata"), "cannot be read"),
    "no common": (lambda it: (it / "common.pt").unlink(), r"lacks common\.pt"),
    "torn common": (lambda it: os.truncate(it / "common.pt", 700), "is truncated"),
    "common is no dict": (lambda it: torch.save([1], it / "common.pt"), "does not hold a dict"),
    "common and sharded": (lambda it: _common(it, lambda metadata: metadata.update(model=3)), "is below a value"),
    "twice": (
        lambda it: _common(it, lambda metadata: metadata.update(model={"decoder.final_layernorm.bias": 3})), "' twice"
    ),
    "no shard": (lambda it: (it / "__1_0.distcp").unlink(), r"lacks __1_0\.distcp"),
    "torn shard": (lambda it: _cut(it / "__1_0.distcp"), "is truncated"),
    "shards of another rank": (lambda it: shutil.copy(it / "__0_0.distcp", it / "__1_0.distcp"), "not written by"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path, harm: str) -> None:
    assert_refused(PLACE, *HARMS[harm], tmp_path)


@pytest.mark.parametrize(("where", "message"), [
    ("common", r"args \(posix\.system\)"), ("metadata", "is not metadata of torch"),
    ("deep", r"args\.x\.0 \(posix\.system\)"),
])
def test_a_payload_never_runs_and_is_named(tmp_path: Path, where: str, message: str) -> None:
    root, payload = tmp_path / "megatron", Malicious(tmp_path / "touched")
    shutil.copytree(PLACE, root)
    if where == "metadata":
        (root / ".metadata").write_bytes(pickle.dumps(payload))
    else:
        _common(root, lambda metadata: metadata.update(args={"x": [payload]} if where == "deep" else payload))
    with pytest.raises(fs.FormatError, match=message):
        fs.import_checkpoint(root, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    if where != "metadata":
        report = fs.import_checkpoint(root, tmp_path / "run", rules=fs.Skip("args*"))
        assert report.skipped == (("args.x.0",) if where == "deep" else ("args",))
    assert not (tmp_path / "touched").exists()
