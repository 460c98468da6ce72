"""A model's documents in a checkpoint: export, import and diff support them, and no other section becomes a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import flowstone as fs
from flowstone.cli.rules import conversion_rules
from flowstone.convert.documents import stored_documents

CONFIG = json.dumps({"model_type": "gpt2", "n_head": 2}).encode()
TOKENIZER = np.random.default_rng(0).integers(32, 127, 200_000, dtype=np.uint8).tobytes()  # too long for objects.json
DOCUMENTS = {"config.json": CONFIG, "tokenizer.json": TOKENIZER}


def saved(store: Path, kept: object, **more: object) -> Path:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.arange(6.0)}, "huggingface": kept, **more})
    return store


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("kept", [DOCUMENTS, fs.PerRank(DOCUMENTS)], ids=["of all ranks", "of a rank"])
def test_an_export_writes_them_and_an_import_keeps_them(kept: object, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", kept)
    report = fs.export(run, tmp_path / "a")
    assert sorted(report.files) == ["config.json", "model.safetensors", "tokenizer.json"]
    exported = files(tmp_path / "a")
    assert {name: exported[name] for name in DOCUMENTS} == DOCUMENTS
    fs.import_checkpoint(run, tmp_path / "again", step=2)
    assert fs.open(tmp_path / "again").objects["huggingface"] == DOCUMENTS
    assert list(fs.open(tmp_path / "again").tensors) == ["model.w"], "no document is a tensor there"
    fs.export(tmp_path / "again", tmp_path / "b")
    assert files(tmp_path / "b") == exported


def test_what_has_no_place_for_them_is_written_without(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", fs.PerRank(DOCUMENTS))
    assert fs.export(run, tmp_path / "m.pt", to="torch", section=None).tensors == ("model.w",)
    assert list(torch.load(tmp_path / "m.pt")) == ["model.w"]
    fs.import_checkpoint(run, tmp_path / "again", rules=fs.Skip("huggingface"))
    assert "huggingface" not in fs.open(tmp_path / "again").objects


@pytest.mark.parametrize("kept", [DOCUMENTS, fs.PerRank(DOCUMENTS)], ids=["of all ranks", "of a rank"])
def test_a_packed_step_has_them_as_the_step_does(kept: object, tmp_path: Path) -> None:
    fs.pack(saved(tmp_path / "run", kept), tmp_path / "packed")
    packed = fs.open(tmp_path / "packed")
    assert packed.verify().sound
    assert packed.state_dict("huggingface", rank=0) == DOCUMENTS
    fs.export(packed, tmp_path / "a")
    assert files(tmp_path / "a")["tokenizer.json"] == TOKENIZER


def test_what_another_directory_has_goes_before_them(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", fs.PerRank(DOCUMENTS))
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "config.json").write_text("{}")
    fs.export(run, tmp_path / "a", documents=tmp_path / "given")
    assert sorted(files(tmp_path / "a")) == ["config.json", "model.safetensors"]
    assert files(tmp_path / "a")["config.json"] == b"{}"


def test_a_diff_compares_them_by_name(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", fs.PerRank(DOCUMENTS))
    b = saved(tmp_path / "b", DOCUMENTS)
    assert fs.diff(a, b).equal, "whichever rank has kept them"
    c = saved(tmp_path / "c", fs.PerRank({**DOCUMENTS, "tokenizer.json": TOKENIZER[::-1]}))
    assert [value.name for value in fs.diff(a, c).values] == ["huggingface.tokenizer.json"]


@pytest.mark.parametrize("kept", [DOCUMENTS, fs.PerRank(DOCUMENTS)], ids=["of all ranks", "of a rank"])
def test_ready_rules_take_sizes_from_the_configuration_that_is_kept(kept: object, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", kept)
    actual = conversion_rules("megatron-to-gpt2", None, inverse=False, configured=((run, None),))
    assert actual == conversion_rules("megatron-to-gpt2:heads=2", None, inverse=False)
    with pytest.raises(fs.ArgumentError):
        conversion_rules("megatron-to-gpt2", None, inverse=False, configured=((tmp_path, None),))


def test_two_ranks_keep_them_on_the_first(tmp_path: Path) -> None:
    from processes import run

    run(2, "acts", "save_documents", str(tmp_path / "run"), 100_000)
    assert fs.open(tmp_path / "run").verify().sound
    fs.export(tmp_path / "run", tmp_path / "a")
    result = files(tmp_path / "a")
    assert result["config.json"] == b"{}"
    assert result["tokenizer.json"] == b"t" * 100_000


OTHERS = {
    "outside": {"config.json": CONFIG, "../evil.json": b"{}"},
    "outside, long": {"config.json": CONFIG, "../evil.json": TOKENIZER},
    "absolute": {"/evil.json": b"{}"},
    "weights": {"config.json": CONFIG, "model.safetensors": b"other weights"},
    "an index": {"model.safetensors.index.json": b"{}"},
    "hidden": {".evil.json": b"{}"},
    "of another system": {"..\\evil.json": b"{}"},
    "NUL": {"a\0.json": b"{}"},
    "a line": {"a\n.json": b"{}"},
    "too long a name": {"a" * 300 + ".json": b"{}"},
    "a number": {1: b"{}"},
    "text": {"config.json": "{}"},
    "a tensor": {"config.json": torch.zeros(3, dtype=torch.uint8)},
    "an array": {"config.json": np.zeros(70_000, np.uint8)},
    "a bytearray": {"config.json": bytearray(TOKENIZER)},
    "long": {"config.json": CONFIG, "tokenizer.json": bytes((64 << 20) - len(CONFIG) + 1)},
}


@pytest.mark.parametrize("which", OTHERS)
@pytest.mark.parametrize("apart", [False, True], ids=["of all ranks", "of a rank"])
def test_a_section_that_holds_anything_else_is_one_like_others(which: str, apart: bool, tmp_path: Path) -> None:
    kept = fs.PerRank(OTHERS[which]) if apart else OTHERS[which]
    run = saved(tmp_path / "run", kept)
    fs.export(run, tmp_path / "below" / "a")
    assert sorted(files(tmp_path / "below" / "a")) == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["below", "run"]
    assert not Path("/evil.json").exists()
    assert b"other weights" not in (tmp_path / "below" / "a" / "model.safetensors").read_bytes()


def test_they_may_be_as_long_as_they_may_be(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", {"config.json": CONFIG, "tokenizer.json": bytes((64 << 20) - len(CONFIG))})
    assert set(stored_documents(fs.open(run))) == set(DOCUMENTS)


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_a_long_one_that_other_sections_share_stays_a_value_of_those(names: tuple[str, ...], tmp_path: Path) -> None:
    run = saved(tmp_path / "run", {"tokenizer.json": TOKENIZER}, **{name: {"text": TOKENIZER} for name in names})
    assert len(fs.open(run).index.aliases) == len(names), "they lie in one place"
    fs.import_checkpoint(run, tmp_path / "again")
    for name in names:
        assert fs.open(tmp_path / "again").state_dict(name) == {"text": TOKENIZER}
    assert fs.open(tmp_path / "again").state_dict("huggingface") == {"tokenizer.json": TOKENIZER}


def test_a_damaged_one_is_never_written(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", fs.PerRank(DOCUMENTS))
    segment = run / "step-00000001" / "rank-00000.safetensors"
    index = segment.read_bytes().index(TOKENIZER[:1000])
    with segment.open("r+b") as file:
        file.seek(index + 500)
        file.write(b"\x00")
    with pytest.raises(fs.DamagedError):
        fs.export(run, tmp_path / "a")
    assert not (tmp_path / "a").exists()
