"""Directories of torch.distributed.checkpoint, read and written without torch."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import assert_same, raw, read_all, tensors
from processes import run
from test_torch_files import Malicious
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import flowstone as fs

BUDGET = 32 << 20
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_what_dcp_saved_comes_in(tmp_path: Path) -> None:
    model = tensors()
    del model["head"]
    dcp.save({"model": model, "step": 3, "list": [torch.arange(3), {"deep": 1.5}]}, checkpoint_id=tmp_path / "dcp")
    report = fs.import_checkpoint(tmp_path / "dcp", tmp_path / "run", budget_bytes=BUDGET)
    assert report.kind == "dcp"
    assert_same(read_all(tmp_path / "run"), model)
    checkpoint = fs.open(tmp_path / "run")
    assert checkpoint.objects["step"] == 3
    assert torch.equal(checkpoint.read("list.0"), torch.arange(3))
    assert checkpoint.objects["list"][1] == {"deep": 1.5}


def test_a_module_by_itself_goes_below_a_section(tmp_path: Path) -> None:
    source, target = torch.nn.Linear(30, 40), torch.nn.Linear(30, 40)
    dcp.save(source.state_dict(), checkpoint_id=tmp_path / "dcp")
    fs.import_checkpoint(tmp_path / "dcp", tmp_path / "run", section="net")
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.load({"net": target})
    assert_same(dict(target.state_dict()), dict(source.state_dict()))


def test_what_four_ranks_saved_comes_in_as_whole_tensors(tmp_path: Path) -> None:
    run(4, "dcp_acts", "save_sharded", str(tmp_path / "dcp"))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 4
    fs.import_checkpoint(tmp_path / "dcp", tmp_path / "run")
    stored = read_all(tmp_path / "run")
    assert torch.equal(stored["rows"], torch.arange(70 * 9.0).reshape(70, 9))
    assert torch.equal(stored["columns"], torch.arange(9 * 70.0).reshape(9, 70))
    assert fs.open(tmp_path / "run").objects["step"] == 7


@pytest.mark.parametrize("shard_bytes", [5e9, 3e6])
def test_dcp_loads_what_was_exported_and_it_comes_back(saved: Path, tmp_path: Path, shard_bytes: float) -> None:
    fs.export(saved, tmp_path / "dcp", to="dcp", shard_bytes=shard_bytes, budget_bytes=BUDGET)
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert_same(state, tensors())
    fs.import_checkpoint(tmp_path / "dcp", tmp_path / "run", budget_bytes=BUDGET)
    assert_same(read_all(tmp_path / "run"), tensors())


def test_optimizer_state_goes_out_as_tensors_by_their_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 30)).sum().backward()
    optimizer.step()
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model, "optim": optimizer})
    rules = fs.Skip("optim.param_groups*"), fs.Skip("optim.*shared"), fs.Skip("optim.*extra")
    fs.export(tmp_path / "run", tmp_path / "dcp", to="dcp", section=None, rules=rules)
    state = {"optim.state.model.weight.exp_avg": torch.zeros(40, 30), "model.weight": torch.zeros(40, 30)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert raw(state["optim.state.model.weight.exp_avg"]) == raw(optimizer.state[model.weight]["exp_avg"])
    assert raw(state["model.weight"]) == raw(model.weight)


def edit_metadata(directory: Path, pattern: bytes, new: bytes) -> None:
    path = directory / ".metadata"
    content, count = re.subn(pattern, lambda _: new, path.read_bytes())
    assert count
    path.write_bytes(content)


@pytest.mark.parametrize("harm", ["missing", "torn", "shape", "name", "outside", "nothing", "tensor"])
def test_a_directory_that_contradicts_itself_is_refused(tmp_path: Path, harm: str) -> None:
    directory = tmp_path / "dcp"
    dcp.save({"model": {"w": torch.zeros(301, 7), "v": torch.zeros(5)}}, checkpoint_id=directory)
    (file,) = directory.glob("*.distcp")
    if harm == "missing":
        file.unlink()
    elif harm == "torn":
        os.truncate(file, file.stat().st_size - 40)
    elif harm == "shape":
        edit_metadata(directory, rb"M\x2d\x01K\x07", b"M\x2e\x01K\x07")
    elif harm == "name":
        edit_metadata(directory, rb"relative_path", b"relative_perh")
    elif harm == "outside":
        edit_metadata(directory, rb"__0_0\.distcp", b"../../passwd"[:12])
    elif harm == "nothing":
        (directory / ".metadata").write_bytes(b"")
    else:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 3] + bytes(len(content) - len(content) // 3))
    with pytest.raises(fs.FormatError):
        fs.import_checkpoint(directory, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def changed_metadata(directory: Path, change: Callable[[Metadata], object]) -> None:
    metadata: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def _no_parts(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"].chunks.clear()  # type: ignore[union-attr]


def _same_path(metadata: Metadata) -> None:
    metadata.planner_data["model.v"] = metadata.planner_data["model.w"]


def _like_path(metadata: Metadata) -> None:
    metadata.planner_data |= {"model.v": ("model", 1), "model.w": ("model", "1")}


class _Origin:
    """Unequal to any other, until it is pickled."""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return torch.Size, ((0,),)


def _two_places(metadata: Metadata) -> None:
    """An item by two keys, which say the same and are not equal to Python."""
    index, other = metadata.storage_data
    again = MetadataIndex(index.fqn)
    object.__setattr__(again, "offset", _Origin())
    metadata.storage_data[again] = metadata.storage_data[other]


@pytest.mark.parametrize(("change", "message"), [
    (_same_path, "have the same path"), (_like_path, "have the same path"),
    (_two_places, "a tensor or object is listed with two locations"),
    (_no_parts, r"does not hold every element of 'model\.w'[\s\S]*holds \[0:3\]"),
])
def test_metadata_that_contradicts_itself_is_refused(
    tmp_path: Path, change: Callable[[Metadata], object], message: str
) -> None:
    directory = tmp_path / "dcp"
    dcp.save({"model": {"w": torch.zeros(3), "v": torch.zeros(5)}}, checkpoint_id=directory)
    changed_metadata(directory, change)
    with pytest.raises((fs.DamagedError, fs.CoverageError), match=message):
        fs.import_checkpoint(directory, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_common_pt_beside_it_is_not_its_own(tmp_path: Path) -> None:
    """Megatron-core has one; a directory without Megatron-core's metadata.json is none of its."""
    dcp.save({"model": {"w": torch.arange(3.0)}}, checkpoint_id=tmp_path / "dcp")
    torch.save({"iteration": 7}, tmp_path / "dcp" / "common.pt")
    (tmp_path / "dcp" / "metadata.json").write_text('{"format": "of a tool of ours"}')
    assert fs.import_checkpoint(tmp_path / "dcp", tmp_path / "run").kind == "dcp"
    assert_same(read_all(tmp_path / "run"), {"w": torch.arange(3.0)})


@pytest.mark.parametrize("where", ["metadata", "item"])
def test_a_payload_never_runs(tmp_path: Path, where: str) -> None:
    directory, payload = tmp_path / "dcp", Malicious(tmp_path / "touched")
    dcp.save({"w": torch.zeros(3), "x": payload if where == "item" else 1}, checkpoint_id=directory)
    if where == "metadata":
        with (directory / ".metadata").open("rb") as opened:
            metadata: Metadata = pickle.load(opened)
        metadata.state_dict_metadata["w"] = payload  # type: ignore[assignment]
        with (directory / ".metadata").open("wb") as opened:
            pickle.dump(metadata, opened)
    with pytest.raises(fs.FormatError):
        fs.import_checkpoint(directory, tmp_path / "run")
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "run").exists()
