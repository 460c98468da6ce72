"""Checkpoints of Orbax, written by tensorstore with Orbax' settings, and read without Orbax and JAX."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
from models import assert_same, read_all
from test_convert_memory import BESIDE_BYTES, MIB, growth_of

import flowstone as fs

BUDGET = 32 << 20
SEQUENCE, DICT = 1, 2


def write(
    directory: Path, arrays: dict[str, Any], values: dict[str, tuple[str, object]] | None = None, *,
    chunks: dict[str, tuple[int, ...]] | None = None, is_database: bool = True, driver: str = "zarr",
) -> Path:
    """An item: arrays by their dotted names, and other values with their kinds."""
    directory.mkdir(parents=True)
    files = {"driver": "file", "path": f"{directory}/"}
    entries: dict[str, Any] = {}
    strings = {}

    def enter(name: str, kind: str) -> None:
        keys = [{"key": key, "key_type": SEQUENCE if key.isdigit() else DICT} for key in name.split(".")]
        entries[str(tuple(name.split(".")))] = {"key_metadata": keys, "value_metadata": {"value_type": kind}}

    def store(name: str, array: Any) -> None:
        place = {"driver": "ocdbt", "base": files, "path": f"{name}/"} if is_database else {
            **files, "path": f"{directory}/{name}/"}
        made = tensorstore.open(
            {"driver": driver, "kvstore": place}, create=True, dtype=tensorstore.dtype(array.dtype.name),
            shape=array.shape, chunk_layout=tensorstore.ChunkLayout(
                chunk_shape=(chunks or {}).get(name, array.shape) or None),
            fill_value=None,
        ).result()
        made.write(array).result()

    for name, array in arrays.items():
        store(name, array)
        enter(name, "jax.Array")
    for name, (kind, value) in (values or {}).items():
        enter(name, kind)
        if kind == "scalar":
            store(name, np.asarray(value))
        elif kind == "string":
            strings[name] = value
    if strings:
        (directory / "_strings.json").write_text(json.dumps(strings))
    (directory / "_METADATA").write_text(json.dumps({
        "tree_metadata": entries, "use_ocdbt": is_database, "use_zarr3": driver == "zarr3",
        "store_array_data_equal_to_fill_value": True, "custom_metadata": None,
    }))
    return directory


def arrays() -> dict[str, Any]:
    noise = np.random.default_rng(0)
    brain = tensorstore.dtype("bfloat16").numpy_dtype
    return {
        "params.embed": noise.standard_normal((301, 1000), np.float32),
        "params.layers.0.kernel": noise.standard_normal((7, 5, 3)).astype(brain),
        "params.layers.1.kernel": noise.standard_normal((7, 5, 3)).astype(brain),
        "params.scale": np.array(2.5, np.float16),
        "params.long": noise.standard_normal(2_500_003, np.float32),
        "params.flags": np.array([True, False, True]),
        "params.wide": noise.standard_normal((3, 5)) + 1j,
        "opt_state.mu": noise.integers(-100, 100, (600, 900), np.int8),
    }


CHUNKS = {"params.embed": (100, 300), "opt_state.mu": (600, 100), "params.long": (1_000_001,)}


def torch_of(array: Any) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array))


@pytest.mark.parametrize("is_database", [True, False])
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_arrays_come_in_by_their_paths_whatever_their_chunks(tmp_path: Path, is_database: bool, driver: str) -> None:
    values = {"step": ("scalar", 7), "opt_state.rate": ("scalar", 0.5), "notes.0": ("string", "warm"),
              "notes.1": ("None", None), "notes.2": ("Dict", None)}
    item = write(tmp_path / "item", arrays(), values, chunks=CHUNKS, is_database=is_database, driver=driver)
    report = fs.import_checkpoint(item, tmp_path / "run", budget_bytes=BUDGET)
    assert (report.kind, report.skipped) == ("orbax", ())
    assert_same(read_all(tmp_path / "run", ""), {name: torch_of(array) for name, array in arrays().items()})
    objects = fs.open(tmp_path / "run").objects
    assert (objects["step"], objects["notes"]) == (7, ["warm", None, {}])
    assert objects["opt_state"]["rate"] == 0.5
    assert [sorted(layer) for layer in objects["params"]["layers"]] == [["kernel"], ["kernel"]]
    assert fs.diff(item, tmp_path / "run").equal


def test_rules_are_followed_on_the_way(tmp_path: Path) -> None:
    item = write(tmp_path / "item", arrays(), chunks=CHUNKS)
    rules = [fs.Skip("opt_state.*"), fs.Transpose("params.embed"),
             fs.Stack("params.layers.{n}.kernel", "params.kernels")]
    fs.import_checkpoint(item, tmp_path / "run", rules=rules, budget_bytes=BUDGET)
    stored = read_all(tmp_path / "run", "params.")
    assert torch.equal(stored["embed"], torch_of(arrays()["params.embed"]).t())
    layers = [torch_of(arrays()[f"params.layers.{n}.kernel"]) for n in range(2)]
    assert torch.equal(stored["kernels"], torch.stack(layers))


def test_arrays_at_the_top_go_below_the_section(tmp_path: Path) -> None:
    item = write(tmp_path / "item", {"w": np.arange(6.0).reshape(2, 3), "b.c": np.arange(3)})
    fs.import_checkpoint(item, tmp_path / "run", section="net")
    assert_same(read_all(tmp_path / "run", "net."), {"w": torch.arange(6.0).double().reshape(2, 3),
                                                     "b.c": torch.arange(3)})


def manager(place: Path) -> Path:
    """Steps of a CheckpointManager, of which the last was not finished."""
    for step in (3, 20):
        write(place / str(step) / "default", {"p.w": np.full(5, float(step))})
        (place / str(step) / "_CHECKPOINT_METADATA").write_text("{}")
    write(place / "30.orbax-checkpoint-tmp" / "default", {"p.w": np.zeros(5)})
    (place / "30.orbax-checkpoint-tmp" / "_CHECKPOINT_METADATA").write_text("{}")
    return place


def test_the_newest_step_that_was_finished_comes_in(tmp_path: Path) -> None:
    manager(tmp_path / "steps")
    fs.import_checkpoint(tmp_path / "steps", tmp_path / "newest")
    fs.import_checkpoint(tmp_path / "steps" / "3", tmp_path / "older")
    assert fs.open(tmp_path / "newest").read("p.w")[0] == 20
    assert fs.open(tmp_path / "older").read("p.w")[0] == 3


def test_items_of_a_step_are_sections_and_those_without_arrays_are_named(tmp_path: Path) -> None:
    step = manager(tmp_path / "steps") / "20"
    write(step / "ema", {"p.w": np.full(5, 2.0)})
    (step / "loader").mkdir()
    with pytest.raises(fs.UnsupportedFormatError, match=r"loader \(an item without arrays\)"):
        fs.import_checkpoint(step, tmp_path / "run")
    report = fs.import_checkpoint(step, tmp_path / "run", rules=fs.Skip("loader"))
    assert report.skipped == ("loader",)
    assert fs.open(tmp_path / "run").read("ema.p.w")[0] == 2
    assert fs.open(tmp_path / "run").read("default.p.w")[0] == 20


def test_what_has_no_place_is_named_and_may_be_left_out(tmp_path: Path) -> None:
    item = write(tmp_path / "item", {"p.w": np.ones(3)}, {"p.key": ("jax.random.key", None)})
    with pytest.raises(fs.UnsupportedFormatError, match=r"p\.key \(jax\.random\.key\)"):
        fs.import_checkpoint(item, tmp_path / "run")
    fs.import_checkpoint(item, tmp_path / "run", rules=fs.Skip("p.key"))
    assert list(fs.open(tmp_path / "run").tensors) == ["p.w"]


def edit_metadata(item: Path, change: Any) -> None:
    record = json.loads((item / "_METADATA").read_text())
    change(record)
    (item / "_METADATA").write_text(json.dumps(record))


@pytest.mark.parametrize(("harm", "message"), [
    ("chunk", "cannot be read"), ("array", "lacks the array"), ("torn", "cannot be read|lacks the array"),
    ("metadata", "is not valid metadata"), ("strings", r"_strings\.json"), ("nested", "values below it"),
    ("outside", "leads out of the directory"), ("format", "lacks the array"),
])
def test_a_directory_that_is_not_whole_is_refused(tmp_path: Path, harm: str, message: str) -> None:
    item = write(tmp_path / "item", arrays(), {"name": ("string", "x")}, chunks=CHUNKS, is_database=False)
    match harm:
        case "chunk":  # another reader takes it for zeros
            (item / "params.embed" / "2.1").unlink()
        case "array":
            shutil.rmtree(item / "params.embed")
        case "torn":
            os.truncate(item / "params.embed" / "0.0", 100)
        case "metadata":
            edit_metadata(item, lambda metadata: metadata["tree_metadata"]["('name',)"].pop("key_metadata"))
        case "strings":
            (item / "_strings.json").write_text("{}")
        case "nested":
            entry = {"key_metadata": [{"key": "params", "key_type": 2}], "value_metadata": {"value_type": "None"}}
            edit_metadata(item, lambda metadata: metadata.update(
                tree_metadata={"('params',)": entry, **metadata["tree_metadata"]}))
        case "outside":
            (item / "params.embed").rename(tmp_path / "embed")
            edit_metadata(item, lambda metadata: metadata["tree_metadata"]["('params', 'embed')"].update(
                key_metadata=[{"key": "/../../embed", "key_type": 2}]))
        case "format":
            edit_metadata(item, lambda metadata: metadata.update(use_zarr3=True))
    with pytest.raises(fs.FlowstoneError, match=message):
        fs.import_checkpoint(item, tmp_path / "run")
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("step-*"))


def test_a_database_that_is_missing_or_torn_is_refused(tmp_path: Path) -> None:
    item = write(tmp_path / "item", arrays())
    largest = max((item / "d").iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(fs.DamagedError, match=r"cannot be read|lacks the array"):
        fs.import_checkpoint(item, tmp_path / "run")
    (item / "manifest.ocdbt").unlink()
    with pytest.raises(fs.DamagedError, match=r"lacks manifest\.ocdbt"):
        fs.import_checkpoint(item, tmp_path / "run")


def test_without_tensorstore_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = write(tmp_path / "item", {"p.w": np.ones(3)})
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(fs.FrameworkError, match=r"not installed[\s\S]*flowstone\[orbax\]"):
        fs.import_checkpoint(item, tmp_path / "run")


def test_an_import_takes_the_window_and_one_row_of_chunks(tmp_path: Path) -> None:
    """Of four arrays of 64 MiB, in chunks of 4 MiB and rows of these of 16."""
    made = {f"p.{name}": np.full((4096, 4096), float(index), np.float32) for index, name in enumerate("abcd")}
    item = write(tmp_path / "item", made, chunks=dict.fromkeys(made, (1024, 1024)))
    places = f"{str(item)!r}, {str(tmp_path / 'run')!r}"
    cached = (64 + 16) * MIB
    taken = growth_of(f"fs.import_checkpoint({places}, budget_bytes={32 * MIB})", "tensorstore")
    assert taken < 32 * MIB + cached + BESIDE_BYTES
    assert fs.open(tmp_path / "run").read("p.d")[4095, 4095] == 3
