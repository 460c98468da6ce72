"""Snapshots of TorchSnapshot, read without it: bit for bit, and no code in them is executed."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_refused, assert_same, read_all
from test_torch_files import Malicious

import flowstone as fs
from flowstone.convert.sources import tree
from golden.make_torchsnapshot import ALONE, TOGETHER, model, numbers, optimizer, values

METADATA = ".snapshot_metadata"
ODD = fs.Skip("odd.quantised")


def edit(snapshot: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the metadata of a snapshot says."""
    record = json.loads((snapshot / METADATA).read_text())
    change(record)
    (snapshot / METADATA).write_text(json.dumps(record))


def test_what_one_rank_has_taken_comes_in(tmp_path: Path) -> None:
    report = fs.import_checkpoint(ALONE, tmp_path / "run", rules=ODD)
    assert (report.kind, report.skipped) == ("torchsnapshot", ("odd.quantised",))
    stored = read_all(tmp_path / "run", "extra/1.")
    given = values()
    assert_same(stored, {
        **{name: value for name, value in given.items() if isinstance(value, torch.Tensor)},
        "pair.1": given["pair"][1], "ordered.x": given["ordered"]["x"], "ordered.y.0": given["ordered"]["y"][0],
    })
    objects = fs.open(tmp_path / "run").objects["extra/1"]
    plain = ("step", "name", "rate", "flag", "raw", "nothing", "empty")
    assert {name: objects[name] for name in plain} == {name: given[name] for name in plain}
    assert isinstance(objects["ordered"], OrderedDict)
    assert list(objects["ordered"]) == ["x", "y"]
    assert objects["ordered"]["y"][1] == {1: 2, "k": [5]}
    assert objects["pair"][0] == 1
    assert isinstance(objects["pair"], tuple)


def test_live_objects_load_it(tmp_path: Path) -> None:
    fs.import_checkpoint(ALONE, tmp_path / "run", step=8, rules=ODD)
    net = torch.nn.Linear(20, 7)
    adam = torch.optim.AdamW(net.parameters())
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.load({"model": net, "optim": adam}, rules=[fs.Skip("*")])
    assert_same(dict(net.state_dict()), dict(model().state_dict()))
    expected = optimizer(net).state_dict()
    state_dict = adam.state_dict()
    assert state_dict["param_groups"] == expected["param_groups"]
    for number, state in expected["state"].items():
        assert_same(state_dict["state"][number], state)


def test_what_three_ranks_have_taken_comes_in_as_whole_tensors(tmp_path: Path) -> None:
    report = fs.import_checkpoint(TOGETHER, tmp_path / "run", rules=fs.Skip("rank*"))
    assert set(report.skipped) == {f"rank{rank}.{name}" for rank in (1, 2) for name in ("mine.noise", "progress.rank")}
    whole = {"rows": numbers(32, 7), "columns": numbers(32, 7), **model().state_dict()}
    assert_same(read_all(tmp_path / "run"), whole)
    checkpoint = fs.open(tmp_path / "run")
    assert checkpoint.objects["progress"] == {"step": 3, "same": (1, 2), "rank": 0}
    assert checkpoint.objects["last"] == {"one": 1}, "of the last rank alone"
    assert torch.equal(checkpoint.read("mine.noise"), torch.full((3,), 0))


def test_what_ranks_have_of_their_own_is_an_error_by_name(tmp_path: Path) -> None:
    with pytest.raises(fs.UnsupportedFormatError, match=r"4 values[\s\S]*rank1\.progress\.rank \(rank 1's own"):
        fs.import_checkpoint(TOGETHER, tmp_path / "run")
    with pytest.raises(fs.UnsupportedFormatError, match=r"odd\.quantised \(torch\.qint8\)"):
        fs.import_checkpoint(ALONE, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_it_is_compared_without_being_imported(tmp_path: Path) -> None:
    fs.import_checkpoint(TOGETHER, tmp_path / "run", rules=fs.Skip("rank*"))
    diff = fs.diff(TOGETHER, tmp_path / "run", rules=fs.Skip("rank*"))
    assert diff.equal
    assert len(diff.tensors) == 5


def test_parts_that_several_ranks_have_are_taken_once(tmp_path: Path) -> None:
    """A DTensor that is sharded by one dimension of its mesh, and replicated by the other."""
    snapshot = tmp_path / "snapshot"
    shutil.copytree(TOGETHER, snapshot)

    def change(record: dict[str, Any]) -> None:
        for path, entry in list(record["manifest"].items()):
            if entry["type"] == "ShardedTensor":
                entry |= {"type": "DTensor", "mesh": [[0, 1], [2, 3]], "dim_map": [[0], [-1]]}
                if path == "2/model/rows":
                    record["manifest"]["3/model/rows"] = entry
                    record["manifest"]["3/model"] = {"type": "dict", "keys": ["rows"]}
        record["world_size"] = 4

    edit(snapshot, change)
    fs.import_checkpoint(snapshot, tmp_path / "run", rules=fs.Skip("rank*"))
    assert torch.equal(fs.open(tmp_path / "run").read("model.rows"), numbers(32, 7))


def _slab(snapshot: Path) -> Path:
    return max((snapshot / "batched").iterdir(), key=lambda file: file.stat().st_size)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda snapshot: edit(snapshot, lambda metadata: change(metadata["manifest"]))


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no metadata": (lambda it: (it / METADATA).unlink(), "was not finished"),
    "torn metadata": (lambda it: _cut(it / METADATA), "is truncated"),
    "zeros": (lambda it: (it / METADATA).write_bytes(bytes(3000)), "is truncated"),
    "no file": (lambda it: _slab(it).unlink(), "lacks batched/"),
    "torn file": (lambda it: _cut(_slab(it)), "is too short"),
    "yaml": (lambda it: (it / METADATA).write_text("version: 0.0.3\nworld_size: 1\n"), r"before 0\.1\.0 wrote YAML"),
    "version": (lambda it: edit(it, lambda value: value.update(version="0.2.0")), "unknown version of torchsnapshot"),
    "kind": (_manifest(lambda them: them["0/progress/step"].update(type="set")), "not written by torchsnapshot"),
    "field": (_manifest(lambda them: them["0/model/bias"].update(codec="zstd")), "unknown field `codec`"),
    "rank": (_manifest(lambda them: them.update({"7/x": them["0/progress/step"]})), "with a rank"),
    "digits": (_manifest(lambda them: them.update({"7" * 5000 + "/x": them["0/progress/step"]})), "with a rank"),
    "long name": (_manifest(lambda them: them["0/model/bias"].update(location="x" * 300)), "x{150,}"),
    "range": (_manifest(lambda them: them["0/model/bias"].update(byte_range=[0, 24])), "has 24 bytes for 'model.bias'"),
    "shape": (_manifest(lambda them: them["0/model/bias"].update(shape=[8])), "has 28 bytes for 'model.bias'"),
    "chunk": (_manifest(lambda them: them["0/model/weight"]["chunks"].pop()), r"model\.weight"),
    "no chunks": (_manifest(lambda them: them["0/model/weight"].update(chunks=[])), "has no parts"),
    "chunk's type": (
        _manifest(lambda them: them["0/model/weight"]["chunks"][0]["tensor"].update(dtype="torch.int32")),
        "where torch.float32",
    ),
    "shard": (_manifest(lambda them: them["1/model/rows"].update(shards=[])), r"model\.rows"),
    "rank's part": (_manifest(lambda them: them.pop("2/model/rows")), "rank 2 lacks its part of 'model/rows'"),
    "replica": (
        _manifest(lambda them: them.update({"1/progress/step": them["0/progress/step"] | {"serialized_value": "4"}})),
        "differs on ranks 0 and 1",
    ),
    "two keys of one path": (
        _manifest(lambda them: [them[f"{rank}/progress"]["keys"].extend([1, "1"]) for rank in range(3)]
                  and them.update({"0/progress/1": them["0/progress/step"]})),
        "two keys of 'progress' have the same path",
    ),
    "equal keys": (
        _manifest(lambda them: them["0/progress"]["keys"].extend([1, True])
                  or them.update({f"0/progress/{key}": them["0/progress/rank"] for key in (1, True)})),
        "two keys of 'progress' are equal",
    ),
    "a key of two types": (
        _manifest(lambda them: [them[f"{rank}/progress"]["keys"].append(key) for rank, key in enumerate((1, "1"))]
                  and them.update({f"{rank}/progress/1": them["0/progress/rank"] for rank in range(2)})),
        "of 'progress/1' has different types on different ranks",
    ),
    "two roots of one name": (
        _manifest(lambda them: them.update({"0/l%61st": them["0/progress/rank"]})), "stand for the name 'last'"
    ),
    "a rank twice": (_manifest(lambda them: them.update({"00/progress/step": them["0/progress/rank"]})), "with a rank"),
    "number": (_manifest(lambda them: them["0/progress/step"].update(serialized_value="x")), "cannot be read"),
    "stray": (_manifest(lambda them: them.update({"0/a/b": them["0/progress/step"]})), "not below a dict"),
    "dict's key": (_manifest(lambda them: them["2/last"]["keys"].append("b")), "lacks its part of 'last/b'"),
    "outside": (_manifest(lambda them: them["0/model/bias"].update(location="../batched/x")), "not a path inside"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_snapshot_that_is_not_whole_is_refused(tmp_path: Path, harm: str) -> None:
    assert_refused(TOGETHER, *HARMS[harm], tmp_path, rules=fs.Skip("rank*"))


def test_a_payload_never_runs_and_is_named(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(ALONE, snapshot)
    torch.save({"deep": [1, Malicious(tmp_path / "touched")]}, snapshot / "0" / "extra%2F1" / "pair")
    torch.save(Malicious(tmp_path / "touched"), snapshot / "0" / "extra%2F1" / "nothing")
    with pytest.raises(fs.UnsupportedFormatError, match=r"extra/1\.nothing \("):
        fs.import_checkpoint(snapshot, tmp_path / "run", rules=ODD)
    assert not (tmp_path / "run").exists()
    fs.import_checkpoint(snapshot, tmp_path / "run", rules=(ODD, fs.Skip("extra/1.*")))
    assert not (tmp_path / "touched").exists()


def _share(snapshot: Path, name: str, values: list[object]) -> None:
    """Give rank 0, 1, ... one of these objects each, pickled, at a path of all."""
    for rank, value in enumerate(values):
        torch.save(value, snapshot / f"{name}-{rank}")

    def change(manifest: dict[str, Any]) -> None:
        for rank in range(len(values)):
            manifest[f"{rank}/progress/{name}"] = {
                "type": "object", "location": f"{name}-{rank}", "serializer": "torch_save",
                "obj_type": "object", "replicated": False,
            }
            manifest[f"{rank}/progress"]["keys"].append(name)

    _manifest(change)(snapshot)


def _knot() -> object:
    knot: list[object] = []
    knot.append(knot)
    return knot


def _doubled(times: int) -> object:
    doubled: object = [1]
    for _ in range(times):
        doubled = [doubled, doubled]
    return doubled


@pytest.mark.parametrize("kind", ["a cycle", "parts shared 2**60 times"])
def test_hostile_objects_of_two_ranks_are_compared_in_bounded_time(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "_NODES_MAX", 1 << 16)  # of 1 << 22, in the time of all other tests of the file
    snapshot = tmp_path / "snapshot"
    shutil.copytree(TOGETHER, snapshot)
    _share(snapshot, "shared", [_knot() if kind == "a cycle" else _doubled(60) for _ in range(2)])
    with pytest.raises(fs.FlowstoneError):
        fs.import_checkpoint(snapshot, tmp_path / "run", rules=fs.Skip("rank*"))


def test_equal_objects_of_two_ranks_are_one_and_others_are_named(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(TOGETHER, snapshot)
    _share(snapshot, "alike", [{"a": (1, [2.5])}, {"a": (1, [2.5])}])
    _share(snapshot, "unlike", [{"a": (1, [2.5])}, {"a": (1, [3.5])}])
    report = fs.import_checkpoint(snapshot, tmp_path / "run", rules=fs.Skip("rank*"))
    assert "rank1.progress.unlike" in report.skipped
    assert "rank1.progress.alike" not in report.skipped


def test_a_file_that_many_entries_name_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowstone.convert.sources.pickled_files import PickledFiles

    snapshot = tmp_path / "snapshot"
    shutil.copytree(TOGETHER, snapshot)
    _share(snapshot, "first", [{"a": 1}])

    def change(manifest: dict[str, Any]) -> None:
        for number in range(20):
            manifest[f"0/progress/n{number}"] = manifest["0/progress/first"]
            manifest["0/progress"]["keys"].append(f"n{number}")

    _manifest(change)(snapshot)
    read, real = list[str](), PickledFiles.read
    monkeypatch.setattr(PickledFiles, "read", lambda it, path, *more: read.append(path.name) or real(it, path, *more))
    fs.import_checkpoint(snapshot, tmp_path / "run", rules=fs.Skip("rank*"))
    assert read.count("first-0") == 1
    assert fs.open(tmp_path / "run").objects["progress"]["n7"] == {"a": 1}


def test_what_another_rank_has_beyond_the_end_of_a_list_is_named(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(TOGETHER, snapshot)

    def change(manifest: dict[str, Any]) -> None:
        for rank in range(2):
            manifest[f"{rank}/progress/list"] = {"type": "list"}
            manifest[f"{rank}/progress"]["keys"].append("list")
            for index in range(rank + 1):
                manifest[f"{rank}/progress/list/{index}"] = manifest["0/progress/rank"]

    _manifest(change)(snapshot)
    report = fs.import_checkpoint(snapshot, tmp_path / "run", rules=fs.Skip("rank*"))
    assert "rank1.progress.list.1" in report.skipped
    assert len(fs.open(tmp_path / "run").objects["progress"]["list"]) == 1
