"""DCP through Flowstone in one process: what is saved, loaded, refused and reported."""

from __future__ import annotations

import copy
import errno
import io
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from typer.testing import CliRunner

import flowstone as fs
from faulty_disk import Trouble, faulty_disk
from flowstone.adapters.dcp import FlowstoneReader, FlowstoneWriter
from flowstone.adapters.dcp.claim import SaveClaim
from flowstone.adapters.dcp.target import target_of
from flowstone.cli.app import app

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def nested() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4, dtype=torch.bfloat16)},
        "step": 5,
        "more": {
            "lists": [torch.full((2,), 3.0), {"deep": torch.tensor(4)}, 7], "numbers": [1, 2.5],
            "tuple": (1, "x", None),
            "array": np.arange(5), "dtype": torch.float16, "size": torch.Size([2, 3]), "inf": float("inf"),
            "ordered": OrderedDict(b=1, a=2), "text": "Grüße", "bytes": b"\0\xff", "empty": [],
        },
    }


def zeroed(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)((key, zeroed(item)) for key, item in value.items())
    if isinstance(value, list) and any(isinstance(item, torch.Tensor | dict) for item in value):
        return [zeroed(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, np.ndarray):
        return value.dtype == other.dtype and np.array_equal(value, other)
    if isinstance(value, dict):
        return list(value) == list(other) and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return type(value) is type(other) and len(value) == len(other) and all(map(same, value, other))
    return type(value) is type(other) and value == other


def save(state: dict[str, Any], path: object, **options: Any) -> None:
    dcp.save(state, storage_writer=FlowstoneWriter(path, **options))


def cause(error: CheckpointException) -> BaseException:
    """The error of rank 0."""
    return error.failures[0][0]


def flip(path: Path, name: str, element_bytes: int = 0) -> None:
    """Change one bit of a stored tensor."""
    checkpoint = fs.open(path)
    index, row = checkpoint.index, checkpoint.index.rows()[name]
    piece = index.pieces_of(row)[0]
    segment = path / checkpoint.manifest.segments[int(index.chunks.segment[piece])].name
    offset = int(index.chunks.offset[piece]) + element_bytes
    with segment.open("r+b") as file:
        file.seek(offset)
        result = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([result ^ 1]))


def test_a_nested_state_comes_back(tmp_path: Path) -> None:
    save(nested(), tmp_path / "step-5")
    into = zeroed(nested())
    dcp.load(into, storage_reader=FlowstoneReader(tmp_path / "step-5"))
    assert same(into, nested())


def test_what_was_saved_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "gpt" / "step-00000012"
    save(nested(), path)
    checkpoint = fs.open(path)
    assert (checkpoint.step, checkpoint.manifest.ranks) == (12, 1)
    assert checkpoint.objects["step"] == 5
    assert torch.equal(checkpoint.read("model.w", fs.Box((1, 0), (2, 4))), torch.arange(4.0, 12).reshape(2, 4))
    assert checkpoint.verify().sound
    assert fs.open(path.parent).step == 12  # the directory above is a store of one
    assert os.listdir(path.parent) == [path.name]
    for verb in ("ls", "show", "verify"):
        result = CliRunner().invoke(app, [verb, str(path if verb != "ls" else path.parent)])
        assert result.exit_code == 0, result.output


def test_a_checkpointer_loads_what_dcp_has_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    saved = {"model": model.state_dict(), "step": 5, "extra": {"a": [1, {"b": torch.ones(2)}]}}
    save(saved, tmp_path / "step-00000005")
    other, state = nn.Linear(3, 2), {"step": 0, "extra": {"a": [0, {"b": torch.zeros(2)}]}}
    with fs.Checkpointer(tmp_path) as ckpt:
        assert ckpt.load({"model": other, **state}).step == 5
        into = {"model": other, **state}
        ckpt.load(into)
    assert torch.equal(other.weight, model.weight)
    assert into["step"] == 5
    assert same(into["extra"], {"a": [1, {"b": torch.ones(2)}]})


def test_modules_and_optimizers_go_through_get_state_dict(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    states = get_state_dict(model, optimizer)
    expected = copy.deepcopy(states)
    save({"model": states[0], "optim": states[1]}, tmp_path / "last")
    model, optimizer = made()
    states = get_state_dict(model, optimizer)
    into = {"model": states[0], "optim": states[1]}
    dcp.load(into, storage_reader=FlowstoneReader(tmp_path / "last"))
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optim"])
    assert same(list(get_state_dict(model, optimizer)), list(expected))


class Trainer:
    """Stateful, as the tutorial of DCP has it."""

    def __init__(self) -> None:
        self.model, self.step = nn.Linear(2, 2), 0

    def state_dict(self) -> dict[str, Any]:
        return {"model": get_model_state_dict(self.model), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.step = state["step"]


def test_stateful_objects_are_saved_and_loaded(tmp_path: Path) -> None:
    trainer, other = Trainer(), Trainer()
    trainer.step = 9
    save({"app": trainer}, tmp_path / "step-9")
    dcp.load({"app": other}, storage_reader=FlowstoneReader(tmp_path / "step-9"))
    assert other.step == 9
    assert torch.equal(other.model.weight, trainer.model.weight)


def test_a_part_of_a_state_loads(tmp_path: Path) -> None:
    save(nested(), tmp_path / "a")
    into: dict[str, Any] = {"model": {"w": torch.zeros(3, 4)}}
    dcp.load(into, storage_reader=FlowstoneReader(tmp_path / "a"))
    assert same(into["model"]["w"], nested()["model"]["w"])
    missing: dict[str, Any] = {"model": {"w": torch.zeros(3, 4), "new": torch.zeros(1)}}
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.new"):
        dcp.load(missing, storage_reader=FlowstoneReader(tmp_path / "a"))
    dcp.load(
        missing, storage_reader=FlowstoneReader(tmp_path / "a"), planner=dcp.DefaultLoadPlanner(allow_partial_load=True)
    )
    assert same(missing["model"]["w"], nested()["model"]["w"])


@pytest.mark.parametrize("needs", ["loads_of_everything"], indirect=True)
@pytest.mark.usefixtures("needs")
def test_a_state_is_made_from_what_is_stored(tmp_path: Path) -> None:
    save(nested(), tmp_path / "a")
    load = state_dict_loader._load_state_dict_from_keys
    assert same(load(storage_reader=FlowstoneReader(tmp_path / "a")), nested())
    some = load({"model", "step"}, storage_reader=FlowstoneReader(tmp_path / "a"))
    assert same(some, {"model": nested()["model"], "step": 5})


def test_metadata_tell_which_checkpoint_which_save_and_which_load(tmp_path: Path) -> None:
    writer, saves = FlowstoneWriter(tmp_path / "step-1"), []
    for path in (None, None, tmp_path / "step-2"):  # the second one replaces the first
        save = dcp.save({"x": torch.ones(2)}, checkpoint_id=path, storage_writer=writer)
        assert save.storage_meta is not None
        assert save.storage_meta.save_id == writer.save_id
        saves.append(writer.save_id)
        reader = FlowstoneReader(path or tmp_path / "step-1")
        storage_meta = reader.read_metadata().storage_meta
        assert storage_meta is not None
        assert storage_meta.checkpoint_id == save.storage_meta.checkpoint_id == (path or tmp_path / "step-1")
        assert storage_meta.save_id == writer.save_id == fs.open(reader.path).manifest.id
        assert storage_meta.load_id == reader.load_id
    assert len(set(saves)) == 3


@pytest.mark.filterwarnings("ignore:`(save|load)_state_dict` is deprecated:FutureWarning")
def test_the_older_functions_of_dcp_take_writer_and_reader(tmp_path: Path) -> None:
    dcp.save_state_dict(nested()["model"], FlowstoneWriter(tmp_path / "a"), no_dist=True)
    into = zeroed(nested()["model"])
    dcp.load_state_dict(into, FlowstoneReader(tmp_path / "a"), no_dist=True)
    assert same(into, nested()["model"])
    assert fs.open(tmp_path / "a").verify().sound


def test_states_that_are_not_flattened_come_back(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "rest": {"a": [torch.full((2,), 4.0), np.arange(3)], "n": 3}}
    options = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    planner = dcp.DefaultSavePlanner(**options)
    dcp.save(state, storage_writer=FlowstoneWriter(tmp_path / "a"), planner=planner)
    into: dict[str, Any] = {"w": torch.zeros(3), "rest": None}
    dcp.load(into, storage_reader=FlowstoneReader(tmp_path / "a"), planner=dcp.DefaultLoadPlanner(**options))
    assert same(into, state)


def test_targets_of_any_layout_and_dtype_are_filled(tmp_path: Path) -> None:
    whole = torch.arange(300_000.0).reshape(300, 1000)
    save({"a": whole, "b": whole, "c": whole.T, "scalar": torch.tensor(3), "none": torch.zeros(0, 4)}, tmp_path / "x")
    into = {
        "a": torch.zeros(1000, 300).T, "b": torch.zeros(300, 1000, dtype=torch.float64), "c": torch.zeros(1000, 300),
        "scalar": torch.tensor(0), "none": torch.zeros(0, 4),
    }
    dcp.load(into, storage_reader=FlowstoneReader(tmp_path / "x"))
    assert torch.equal(into["a"], whole)
    assert torch.equal(into["b"], whole.double())
    assert torch.equal(into["c"], whole.T)
    assert int(into["scalar"]) == 3


class Half(dcp.DefaultLoadPlanner):
    """Wants the last rows of what is stored."""

    def create_local_plan(self) -> dcp.LoadPlan:
        item = dcp.planner.ReadItem(
            dcp.planner.LoadItemType.TENSOR, dcp.metadata.MetadataIndex("w"), torch.Size((0, 0)),
            dcp.metadata.MetadataIndex("w", (0, 0)), torch.Size((6, 0)), torch.Size((2, 1 << 18)),
        )
        return dcp.LoadPlan([item])


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    whole = torch.arange(8.0 * (1 << 18)).reshape(8, 1 << 18)
    save({"w": whole}, path)
    flip(path, "w")  # in the first of eight chunks
    into = {"w": torch.zeros(2, 1 << 18)}
    dcp.load(into, storage_reader=FlowstoneReader(path), planner=Half())
    assert torch.equal(into["w"], whole[6:])


def test_damage_reaches_the_caller_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save(nested(), path)
    flip(path, "model.w")
    with pytest.raises(CheckpointException) as failed:
        dcp.load(zeroed(nested()), storage_reader=FlowstoneReader(path))
    assert isinstance(cause(failed.value), fs.DamagedError)
    assert "'model.w'" in str(failed.value)


def test_an_existing_checkpoint_is_replaced_by_the_commit(tmp_path: Path) -> None:
    writer = FlowstoneWriter(tmp_path / "last")
    for step in (1, 2):
        dcp.save({"step": step, "x": torch.full((4,), float(step))}, storage_writer=writer)
        assert fs.open(tmp_path / "last").objects["step"] == step
        assert os.listdir(tmp_path) == ["last"]
    with pytest.raises(CheckpointException, match="overwrite=False"):
        save({"step": 3}, tmp_path / "last", overwrite=False)
    assert fs.open(tmp_path / "last").objects["step"] == 2


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    save({"x": torch.ones(1)}, tmp_path / "there", overwrite=False)
    assert fs.open(tmp_path / "there").verify().sound


@pytest.mark.parametrize("kind", ["a file of somebody", "a store", "a link", "a file"])
def test_what_is_not_ours_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "there"
    if kind == "a link":
        (tmp_path / "other").mkdir()
        path.symlink_to("other")
    elif kind == "a file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / ("mine.txt" if kind == "a file of somebody" else "flowstone.json")).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointException, match="there") as failed:
        save({"x": torch.ones(1)}, path)
    assert isinstance(cause(failed.value), fs.NotAStoreError)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_that_a_checkpointer_writes_into_is_refused(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": 1}).committed.result()
        with pytest.raises(CheckpointException) as failed:
            save({"x": torch.ones(1)}, tmp_path / "step-00000002")
        assert isinstance(cause(failed.value), fs.LockedError)
    save({"x": torch.ones(1)}, tmp_path / "step-00000002")
    assert fs.open(tmp_path).step == 2
    assert fs.open(tmp_path).manifest.store == fs.open(tmp_path, 1).manifest.store  # so that retention counts it


class Unstorable:
    pass


@pytest.mark.parametrize("spared", [0, 2])
def test_a_full_disk_is_told_and_gives_its_space_back(spared: int, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with faulty_disk(tmp_path / "disk") as disk:
        path = disk.path / "step-1"
        writer = FlowstoneWriter(path, thread_count=4)
        state = {f"x{index}": torch.full((1 << 20,), float(index)) for index in range(8)}
        dcp.save(state, storage_writer=writer)
        disk.befall(Trouble("write", error=errno.ENOSPC, name="rank-", spared=spared))
        with pytest.raises(CheckpointException) as failed:
            dcp.save(state, storage_writer=writer)
        assert isinstance(cause(failed.value), fs.FullError)
        disk.befall()
        assert fs.open(path).verify().sound
        dcp.save(state, storage_writer=writer)
        assert os.listdir(disk.path) == ["step-1"]


def test_an_object_without_encoding_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"'cfg\.bad' cannot be stored") as failed:
        save({"x": torch.ones(1), "cfg": {"bad": Unstorable()}}, tmp_path / "x")
    assert isinstance(cause(failed.value), fs.UnsupportedStateError)
    assert not (tmp_path / "x").exists()


class Shouting(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        if write_item.type == dcp.planner.WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(f"{object}!", stream)
            return stream
        return object


def test_bytes_of_other_planners_are_kept_only_where_both_sides_accept_them(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(CheckpointException, match=r"'word' is turned into bytes.*|accept_pickled=True"):
        dcp.save({"word": "hey"}, storage_writer=FlowstoneWriter(path), planner=Shouting())
    dcp.save({"word": "hey"}, storage_writer=FlowstoneWriter(path, accept_pickled=True), planner=Shouting())
    into = {"word": ""}
    with pytest.raises(CheckpointException, match="accept_pickled=True to FlowstoneReader"):
        dcp.load(into, storage_reader=FlowstoneReader(path))
    dcp.load(into, storage_reader=FlowstoneReader(path, accept_pickled=True))
    assert into["word"] == "hey!"


def test_writers_and_readers_may_be_pickled(tmp_path: Path) -> None:
    writer, reader = FlowstoneWriter(tmp_path / "x", step=3), FlowstoneReader(tmp_path / "x")
    dcp.save({"x": torch.ones(2)}, storage_writer=writer)
    dcp.load({"x": torch.ones(2)}, storage_reader=reader)
    dcp.save({"x": torch.full((2,), 5.0)}, storage_writer=pickle.loads(pickle.dumps(writer)))
    into = {"x": torch.ones(2)}
    dcp.load(into, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert into["x"].tolist() == [5, 5]


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-100", 100), ("checkpoint_7", 7), ("epoch3", 3), ("last", 0), ("step-00000042", 42), ("9" * 30, 0)],
)
def test_the_step_is_the_number_at_the_end_of_the_name(name: str, step: int) -> None:
    assert target_of(f"/runs/{name}", None).step == step
    assert target_of("/runs/last", 8).step == 8


@pytest.mark.parametrize(
    "options",
    [
        {"single_file_per_rank": False}, {"sync_files": False}, {"thread_count": 0}, {"thread_count": "two"},
        {"per_thread_copy_ahead": -1}, {"_extensions": [object()]}, {"serialization_format": "npz"}, {"engine": 3},
    ],
)
def test_arguments_that_mean_nothing_here_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(fs.ArgumentError, match=next(iter(options))):
        FlowstoneWriter("x", **options)


def test_arguments_of_the_file_system_writer_are_taken(tmp_path: Path) -> None:
    formats = getattr(dcp.filesystem, "SerializationFormat", None)
    last = (formats.SAFETENSORS,) if formats else ()
    writer = FlowstoneWriter(tmp_path / "x", True, True, 2, 1000, True, False, None, *last)
    dcp.save({"x": torch.ones(2)}, storage_writer=writer)
    assert fs.open(tmp_path / "x").manifest.io.workers == 2


def test_urls_and_missing_paths_are_refused(tmp_path: Path) -> None:
    assert not FlowstoneWriter.validate_checkpoint_id("s3://bucket/x")
    assert FlowstoneReader.validate_checkpoint_id(tmp_path)
    for path in (None, "s3://bucket/x", "/", tmp_path / "step-00000004"):
        with pytest.raises(CheckpointException) as failed:
            save({"x": 1}, path, step=5)
        assert isinstance(cause(failed.value), fs.ArgumentError)


@pytest.mark.parametrize("needs", ["use_collectives"], indirect=True)
@pytest.mark.usefixtures("needs")
def test_checkpoints_that_no_rank_commits_for_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(fs.ArgumentError, match="use_collectives=False"):
        dcp.save({"x": 1}, storage_writer=FlowstoneWriter(tmp_path / "x"), use_collectives=False)


def test_a_missing_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="no checkpoint in"):
        dcp.load({"x": torch.ones(1)}, storage_reader=FlowstoneReader(tmp_path / "nothing"))


def test_an_empty_state_is_saved(tmp_path: Path) -> None:
    save({}, tmp_path / "x")
    assert fs.open(tmp_path / "x").verify().sound
    assert state_dict_loader._load_state_dict_from_keys(storage_reader=FlowstoneReader(tmp_path / "x")) == {}


@pytest.mark.usefixtures("warm")
def test_what_a_failed_save_leaves_does_not_hold_up_the_next_nor_harm_it(tmp_path: Path) -> None:
    """A claim that another save of the process has taken over removes nothing."""
    first = SaveClaim(tmp_path, "x")
    second = SaveClaim(tmp_path, "x", take_over=True)
    assert (first.is_held, second.is_held) == (False, True)
    first.release()
    assert second.is_held
    assert os.listdir(tmp_path) == [".flowstone.lock-x"]
    other = subprocess.run(
        [sys.executable, "-c", ("import sys, pathlib; from flowstone.adapters.dcp.claim import SaveClaim;"
         "SaveClaim(pathlib.Path(sys.argv[1]), 'x')"), str(tmp_path)], capture_output=True, text=True, check=False,
    )
    assert "LockedError: another process is saving to the same checkpoint" in other.stderr
    second.release()
    assert os.listdir(tmp_path) == []
