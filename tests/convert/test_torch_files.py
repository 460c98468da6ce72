"""Files of torch.save, read and written without torch: bit for bit, and no code in them is executed."""

from __future__ import annotations

import collections
import io
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same, interrupted_export, raw, read_all, tensors

import flowstone as fs
from flowstone.convert.copy import window_bytes
from flowstone.table.dtype import DTYPES

BUDGET = 32 << 20


def test_a_state_dict_comes_in_as_it_is(tmp_path: Path) -> None:
    torch.save(collections.OrderedDict(tensors()), tmp_path / "model.pt")
    report = fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run", budget_bytes=BUDGET)
    assert (report.kind, report.aliases) == ("torch", (("model.head", "model.embed"),))
    assert_same(read_all(tmp_path / "run"), tensors())
    assert fs.open(tmp_path / "run").objects == {"model": {}}


def test_files_without_crcs_come_in(tmp_path: Path) -> None:
    """Torch writes them so where it was told to save time, and reads them as it reads any other."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors(), tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "model.pt") as opened:
        assert opened.testzip() is not None
    fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run")
    assert_same(read_all(tmp_path / "run"), tensors())


def test_a_pickle_that_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "model.pt")
    data = bytearray((tmp_path / "model.pt").read_bytes())
    data[data.index(b"embed")] ^= 1
    (tmp_path / "model.pt").write_bytes(data)
    with pytest.raises(fs.DamagedError, match=r"data\.pkl' does not match its CRC"):
        fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run")


def test_out_in_and_out_again_is_equal_to_the_last_bit(saved: Path, tmp_path: Path) -> None:
    report = fs.export(saved, tmp_path / "model.pt", to="torch", budget_bytes=BUDGET)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_same(state, tensors())
    assert state["head"].data_ptr() == state["embed"].data_ptr(), "tied tensors share their memory"
    assert report.files == ("model.pt",)
    fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run", budget_bytes=BUDGET)
    assert_same(read_all(tmp_path / "run"), tensors())
    fs.export(tmp_path / "run", tmp_path / "again.pt", to="torch")
    assert_same(torch.load(tmp_path / "again.pt", weights_only=True, mmap=True), tensors())
    assert not list(tmp_path.glob(".*"))


def test_other_programs_find_a_sound_zip(saved: Path, tmp_path: Path) -> None:
    fs.export(saved, tmp_path / "model.pt", to="torch", budget_bytes=BUDGET)
    with zipfile.ZipFile(tmp_path / "model.pt") as opened:
        assert opened.testzip() is None, "each entry has its CRC"
        infos = opened.infolist()
    with (tmp_path / "model.pt").open("rb") as opened_file:
        for info in infos:
            opened_file.seek(info.header_offset)
            header = opened_file.read(30)
            begin = info.header_offset + 30 + header[26] + 256 * header[27] + header[28] + 256 * header[29]
            assert begin % 64 == 0


def test_every_type_of_torch_goes_out_and_in(tmp_path: Path) -> None:
    kinds = [getattr(torch, name) for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
    state = {}
    for kind in kinds:
        try:
            made = torch.arange(16, dtype=torch.uint8).view(kind)
            torch.save(made, io.BytesIO())
        except (RuntimeError, KeyError):
            continue  # a type that this torch names, and does not save
        state[str(kind).removeprefix("torch.")] = made
    state["bool"] = torch.tensor([True, False])
    assert len(state) > 18
    torch.save(state, tmp_path / "a.pt")
    fs.import_checkpoint(tmp_path / "a.pt", tmp_path / "run")
    fs.export(tmp_path / "run", tmp_path / "b.pt", to="torch")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert {name: (tensor.dtype, tensor.untyped_storage().tolist()) for name, tensor in loaded.items()} == {
        name: (tensor.dtype, tensor.untyped_storage().tolist()) for name, tensor in state.items()
    }


def test_views_that_are_no_runs_of_bytes_come_in_as_their_values(tmp_path: Path) -> None:
    base = torch.randn(700, 900)
    state = {
        "transposed": base.t(), "column": base[:, 3], "rows": base[10:20], "steps": base[::3, ::7],
        "expanded": torch.randn(5, 1).expand(5, 80), "turned": torch.randn(3, 4, 5).permute(2, 0, 1),
        "flat": base.view(-1)[1000:2000], "same": base.t(),
    }
    torch.save(state, tmp_path / "model.pt")
    report = fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run", budget_bytes=BUDGET)
    assert_same(read_all(tmp_path / "run"), {name: value.contiguous() for name, value in state.items()})
    assert report.aliases == (("model.same", "model.transposed"),)


def test_a_training_state_comes_in_and_goes_on(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 30)).sum().backward()
    optimizer.step()
    torch.save({
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "loss": [0.5, 0.25],
        "dtype": torch.bfloat16, "size": torch.Size([2, 3]), "device": torch.device("cpu"), "tags": {"a", "b"},
        "best": torch.nn.Parameter(torch.ones(3)),
    }, tmp_path / "last.pt")
    fs.import_checkpoint(tmp_path / "last.pt", tmp_path / "run", step=3)
    checkpoint = fs.open(tmp_path / "run")
    assert (checkpoint.objects["epoch"], checkpoint.objects["loss"]) == (3, [0.5, 0.25])
    other = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 3))
    resumed = torch.optim.AdamW(other.parameters(), lr=0.5)
    state = {"model": other, "optimizer": resumed, "epoch": 0}
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.load(state, rules=[fs.Skip(name) for name in ("loss", "dtype", "size", "device", "tags", "best")])
    assert state["epoch"] == 3
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert resumed.param_groups[0]["lr"] == 0.001
    for parameter, two in zip(model.parameters(), other.parameters(), strict=True):
        assert raw(optimizer.state[parameter]["exp_avg"]) == raw(resumed.state[two]["exp_avg"])


class Malicious:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


class Tricky(Malicious):
    def __reduce__(self) -> tuple[object, ...]:
        return eval, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("kind", [Malicious, Tricky])
@pytest.mark.parametrize("where", ["top", "nested", "key"])
def test_a_payload_never_runs_and_is_named(tmp_path: Path, kind: type[Malicious], where: str) -> None:
    payload = kind(tmp_path / "touched")
    state: dict[object, object] = {"w": torch.zeros(3), "inner": {"list": [1, payload]}}
    if where == "top":
        state = {"w": torch.zeros(3), "payload": payload}
    elif where == "key":
        state = {"w": torch.zeros(3), "inner": {payload: 1}}
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(fs.FlowstoneError, match=r"posix\.system|builtin__\.eval"):
        fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run")
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "run").exists()
    torch.load(tmp_path / "model.pt", weights_only=False)
    assert (tmp_path / "touched").exists(), "the payload is a real one"


def test_what_is_not_known_may_be_left_out_by_name(tmp_path: Path) -> None:
    import argparse

    torch.save({"w": torch.ones(3), "args": argparse.Namespace(lr=1)}, tmp_path / "model.pt")
    with pytest.raises(fs.UnsupportedFormatError, match=r"args \(argparse.Namespace\)"):
        fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run")
    report = fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run", rules=fs.Skip("args"))
    assert report.skipped == ("args",)
    assert torch.equal(fs.open(tmp_path / "run").read("w"), torch.ones(3))
    assert "args" not in fs.open(tmp_path / "run").objects


@pytest.mark.parametrize("keys", [(1, "1"), (torch.float32, "torch.float32"), (None, "None")], ids=str)
@pytest.mark.parametrize("value", [5, torch.ones(3)], ids=["number", "tensor"])
def test_two_keys_that_are_called_the_same_are_an_error(tmp_path: Path, keys: tuple[Any, Any], value: object) -> None:
    torch.save({"w": torch.ones(3), "a": {"deep": {keys[0]: value, keys[1]: 6}}}, tmp_path / "model.pt")
    with pytest.raises(fs.CollisionError, match=rf"two keys of 'a\.deep' have the name '{keys[1]}'"):
        fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_archive_with_two_entries_of_one_name_is_refused(tmp_path: Path) -> None:
    """Which of them is the tensor is for each reader of zip files to say."""
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt", "a") as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        opened.writestr("model/data/0", bytes(12))
    with pytest.raises(fs.DamagedError, match="two entries with the same name"):
        fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run")


def test_files_of_older_kinds_are_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(fs.UnsupportedFormatError, match=r"before 1\.6[\s\S]*torch\.save\(torch\.load"):
        fs.import_checkpoint(tmp_path / "old.pt", tmp_path / "run")
    (tmp_path / "older.tar").write_bytes(b"storages" + bytes(2000))
    with pytest.raises(fs.UnsupportedFormatError, match=r"not written by torch\.save"):
        fs.import_checkpoint(tmp_path / "older.tar", tmp_path / "run")
    torch.jit.script(torch.nn.Linear(3, 3)).save(tmp_path / "script.pt")
    with pytest.raises(fs.UnsupportedFormatError, match="TorchScript"):
        fs.import_checkpoint(tmp_path / "script.pt", tmp_path / "run")


@pytest.mark.parametrize("left", [b"", bytes(3000)], ids=["nothing", "zeros"])
def test_what_a_crash_leaves_of_a_file_is_damaged_not_of_another_kind(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "model.pt").write_bytes(left)
    with pytest.raises(fs.DamagedError, match=r"as after a crash[\s\S]*copy the file again"):
        fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run")


def rewritten(path: Path, change: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """The same archive with other entries."""
    with zipfile.ZipFile(path) as opened:
        entries = {info.filename: opened.read(info) for info in opened.infolist()}
    with zipfile.ZipFile(path, "w", compression) as opened:
        for name, content in (entries | change).items():
            opened.writestr(name, content)


@pytest.mark.parametrize(
    "harm", ["cut", "half", "short storage", "compressed", "big endian", "pickle", "cycle", "views"]
)
def test_an_archive_that_is_not_sound_is_refused(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.zeros(3000)}, path)
    if harm == "cut":
        os.truncate(path, path.stat().st_size - 30)
    elif harm == "half":
        os.truncate(path, path.stat().st_size // 2)
    elif harm == "short storage":
        rewritten(path, {"model/data/0": bytes(100)})
    elif harm == "compressed":
        rewritten(path, {}, zipfile.ZIP_DEFLATED)
    elif harm == "big endian":
        rewritten(path, {"model/byteorder": b"big"})
    elif harm == "pickle":
        rewritten(path, {"model/data.pkl": b"\x80\x02}q\x00(X\x01\x00\x00\x00wq\x01"})
    elif harm == "cycle":
        rewritten(path, {"model/data.pkl": b"\x80\x02}q\x00X\x01\x00\x00\x00wh\x00s."})
    else:
        content = zipfile.ZipFile(path).read("model/data.pkl")
        rewritten(path, {"model/data.pkl": content.replace(b"K\x00M\xb8\x0b\x85", b"K\x09M\xb8\x0b\x85")})
    with pytest.raises(fs.FormatError):
        fs.import_checkpoint(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_lists_of_lists_that_hold_each_other_many_times_take_no_time(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "model.pt")
    bomb = b"\x80\x02]q\x00" + b"".join(b"](" + bytes([0x68, i]) * 9 + b"eq" + bytes([i + 1]) for i in range(60))
    rewritten(tmp_path / "model.pt", {"model/data.pkl": bomb[:2] + b"}X\x01\x00\x00\x00w" + bomb[2:] + b"s."})
    with pytest.raises(fs.FormatError):
        fs.import_checkpoint(tmp_path / "model.pt", tmp_path / "run")


def test_a_file_is_written_in_many_windows_and_goes_on(saved: Path, tmp_path: Path) -> None:
    interrupted_export(saved, tmp_path / "model.pt", 1, to="torch", budget_bytes=BUDGET)
    assert not (tmp_path / "model.pt").exists()
    report = fs.export(saved, tmp_path / "model.pt", to="torch", budget_bytes=BUDGET)
    assert report.resumed_bytes == window_bytes(BUDGET)
    with zipfile.ZipFile(tmp_path / "model.pt") as opened:
        assert opened.testzip() is None
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), tensors())


def test_no_torch_is_imported_for_any_of_it(saved: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "model.pt")
    code = (
        "import sys, flowstone as fs\n"
        "fs.import_checkpoint(sys.argv[1], sys.argv[2] + '/run')\n"
        "for to in ('hf', 'torch', 'dcp'):\n"
        "    fs.export(sys.argv[2] + '/run', sys.argv[2] + '/' + to, to=to)\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.pt"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "torch", weights_only=True)["w"], torch.zeros(3))
    buffer = io.BytesIO((tmp_path / "hf" / "model.safetensors").read_bytes())
    assert buffer.getbuffer().nbytes
