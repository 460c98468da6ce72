"""A conversion that is not possible is refused by name, before anything is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import tensors
from safetensors.torch import save_file

import flowstone as fs
from forge import flip, place_of


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    """A directory of three shards with their index."""
    fs.export(saved, tmp_path / "hf", shard_bytes=3e6)
    return tmp_path / "hf"


def edit_index(directory: Path, change: Callable[[dict], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def torn(directory: Path) -> None:
    shard = sorted(directory.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1)


def missing(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[1].unlink()


def headless(directory: Path) -> None:
    os.truncate(sorted(directory.glob("*.safetensors"))[0], 5)


def unlisted(directory: Path) -> None:
    edit_index(directory, lambda index: index["weight_map"].pop("ints"))


def misplaced(directory: Path) -> None:
    edit_index(directory, lambda index: index["weight_map"].update(long=index["weight_map"]["embed"]))


def absent(directory: Path) -> None:
    edit_index(directory, lambda index: index["weight_map"].update(other=index["weight_map"]["embed"]))


def outside(directory: Path) -> None:
    edit_index(directory, lambda index: index["weight_map"].update(long="../elsewhere.safetensors"))


def nonsense(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": [1, 2]}')


def without_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").unlink()


def shape(directory: Path) -> None:
    shard = next(p for p in sorted(directory.glob("*.safetensors")) if b'"embed"' in p.read_bytes()[:100000])
    content = shard.read_bytes()
    assert content.count(b'"shape":[301,1000]') == 1
    shard.write_bytes(content.replace(b'"shape":[301,1000]', b'"shape":[302,1000]'))


def unknown_type(directory: Path) -> None:
    shard = next(p for p in sorted(directory.glob("*.safetensors")) if b'"f8"' in p.read_bytes()[:100000])
    shard.write_bytes(shard.read_bytes().replace(b'"F8_E4M3"', b'"F9_E4M4"'))


@pytest.mark.parametrize(("harm", "message"), [
    (torn, "than its header"), (missing, "lacks 1 of 3 shards"), (headless, "is damaged"), (unlisted, "disagree"),
    (misplaced, "disagree"), (absent, "disagree"), (outside, "file outside"), (nonsense, "is not an index of shards"),
    (without_index, "no index"), (shape, "length of 'embed'"), (unknown_type, "unknown dtype 'F9_E4M4'"),
])
def test_a_source_that_is_not_whole_is_refused(
    sharded: Path, tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    harm(sharded)
    with pytest.raises(fs.FlowstoneError, match=message):
        fs.import_checkpoint(sharded, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tensor_in_two_shards_without_a_word_in_the_index_is_refused(sharded: Path, tmp_path: Path) -> None:
    name = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]["ints"]
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    other = next(shard for shard in shards if shard != name)
    save_file({"ints": tensors()["ints"]}, sharded / other)
    with pytest.raises(fs.DamagedError, match="disagree"):
        fs.import_checkpoint(sharded, tmp_path / "run")


def test_damage_in_a_checkpoint_is_found_on_the_way_and_nothing_appears(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    segment, begin = place_of(next((tmp_path / "run").glob("step-*")), "model.long")
    flip(segment, begin + 5_000_000)
    for act, target in (
        (lambda to: fs.export(tmp_path / "run", to), "hf"), (lambda to: fs.pack(tmp_path / "run", to), "packed"),
        (lambda to: fs.export(tmp_path / "run", to, to="torch"), "model.pt"),
        (lambda to: fs.import_checkpoint(tmp_path / "run", to, step=6), "other"),
    ):
        with pytest.raises(fs.DamagedError, match=r"'model.long', chunk 4, does not match its digest"):
            act(tmp_path / target)
        assert {path.name for path in tmp_path.iterdir()} - {"other"} == {"run"}, "no draft, and no journal"
    assert {path.name for path in (tmp_path / "other").iterdir()} == {"flowstone.json", "flowstone.lock"}


@pytest.mark.parametrize("there", ["file", "directory", "link"])
def test_a_target_that_is_taken_is_left_alone(saved: Path, tmp_path: Path, there: str) -> None:
    target = tmp_path / "hf"
    if there == "file":
        target.write_text("mine")
    elif there == "directory":
        target.mkdir()
        (target / "notes").write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(fs.StorageError, match="cannot export to"):
        fs.export(saved, target)
    assert not list(tmp_path.glob(".*"))
    assert there != "directory" or (target / "notes").read_text() == "mine"


def test_an_empty_directory_may_be_the_target(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    fs.export(saved, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_values_that_are_no_tensors_have_to_be_left_out_by_name(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.zeros(3), "vocabulary": ["a"], "made": {"by": "us"}}})
    with pytest.raises(fs.MismatchError, match="cannot hold 2 values") as caught:
        fs.export(tmp_path / "run", tmp_path / "hf")
    assert caught.value.differences == ("model.vocabulary", "model.made.by")
    report = fs.export(tmp_path / "run", tmp_path / "hf", rules=[fs.Skip("model.made.*"), fs.Skip("model.vocabulary")])
    assert report.skipped == ("model.vocabulary", "model.made.by")


def test_types_that_safetensors_lacks_are_named(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.zeros(3), "z": torch.zeros(3, dtype=torch.complex128)}})
    with pytest.raises(fs.UnsupportedFormatError, match=r"z \(complex128\)"):
        fs.export(tmp_path / "run", tmp_path / "hf")
    assert fs.export(tmp_path / "run", tmp_path / "hf", rules=fs.Skip("*.z")).tensors == ("w",)


def test_rules_that_make_one_name_of_two_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(fs.CollisionError, match="two tensors of the target would be called 'half'"):
        fs.export(saved, tmp_path / "hf", rules=fs.Rename("model.f16", "model.half"))


def test_a_step_that_is_there_is_not_imported_over(saved: Path, sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    with pytest.raises(fs.StepExistsError, match="cannot import as step 5"):
        fs.import_checkpoint(sharded, tmp_path / "run", step=5)
    fs.import_checkpoint(sharded, tmp_path / "run", step=6)
    assert fs.open(tmp_path / "run").step == 6


def test_a_store_that_somebody_writes_into_is_left_alone(saved: Path, sharded: Path, tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"step": 1}).committed.result()
        with pytest.raises(fs.LockedError):
            fs.import_checkpoint(sharded, tmp_path / "run", step=6)
    assert not list((tmp_path / "run").glob(".*"))


def test_an_import_into_the_directory_it_reads_is_refused(sharded: Path, tmp_path: Path) -> None:
    """It would be a store from then on, and what was there would no longer be found."""
    names = sorted(os.listdir(sharded))
    (tmp_path / "link").symlink_to(sharded)
    for target in (sharded, tmp_path / "link"):
        with pytest.raises(fs.ArgumentError, match="into its own directory"):
            fs.import_checkpoint(sharded, target)
    assert sorted(os.listdir(sharded)) == names


@pytest.mark.parametrize("act", [
    lambda hf, _, place: fs.import_checkpoint(hf, place / "loop"),
    lambda _, store, place: fs.export(store, place / "file" / "target"),
], ids=["import", "export"])
def test_a_target_that_something_stands_in_the_way_of_is_refused_with_what_to_do(
    saved: Path, sharded: Path, tmp_path: Path, act: Callable[[Path, Path, Path], object]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(fs.StorageError, match="move it away, or choose another path"):
        act(sharded, saved, tmp_path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(("names", "message"), [
    (("pytorch_model.bin",), "give the torch.save file in this directory: .*/pytorch_model.bin"),
    (("pytorch_model-1.bin", "pytorch_model-2.bin"), "pytorch_model-2.bin; for a model in parts"),
    (("readme",), "check the path"),
])
def test_a_directory_of_files_of_torch_says_what_to_do(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"PK\x03\x04" if name != "readme" else b"")
    with pytest.raises(fs.NotAStoreError, match=message):
        fs.import_checkpoint(tmp_path, tmp_path / "run")


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda s, t: fs.export(s, t, section="other"), fs.NoTensorError, "no tensor .* section 'other'"),
    (lambda s, t: fs.export(s, t, dtype="int8"), fs.ArgumentError, "dtype 'int8'"),
    (lambda s, t: fs.export(s, t, to="onnx"), fs.ArgumentError, "unknown format"),
    (lambda s, t: fs.export(s, t, budget_bytes=1 << 20), fs.BudgetError, "too small for a conversion"),
    (lambda s, t: fs.export(s, t, rules=fs.Init("*")), fs.ArgumentError, "not a conversion rule"),
    (lambda s, t: fs.export(s, t, step=99), fs.NoCheckpointError, "step 99"),
    (lambda s, t: fs.export(s / "nowhere", t), fs.NotAStoreError, "does not exist"),
    (lambda s, t: fs.import_checkpoint(s.parent, t), fs.NotAStoreError, "not in a checkpoint format"),
    (lambda s, t: fs.import_checkpoint(s, t, section="a@b"), fs.ArgumentError, "invalid section name"),
    (lambda s, t: fs.import_checkpoint(s, t, step=-1), fs.ArgumentError, "step -1"),
])
def test_arguments_that_a_conversion_does_not_take(
    saved: Path, tmp_path: Path, call: Callable[[Path, Path], object], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        call(saved, tmp_path / "target")
    assert not list(tmp_path.iterdir())
