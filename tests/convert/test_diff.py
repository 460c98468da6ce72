"""Two checkpoints of any formats are compared by name and value, in bounded memory; no code in them is executed."""

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
from models import tensors
from safetensors.torch import save_file
from test_convert_memory import BESIDE_BYTES, MIB, growth_of
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli.app import app
from flowstone.convert import diff as module
from forge import flip, place_of

BUDGET = 32 * MIB


def save(path: Path, state: dict[str, Any], step: int = 1) -> Path:
    with fs.Checkpointer(path) as checkpointer:
        checkpointer.save(step, state)
    return path


@pytest.fixture(scope="session")
def formats(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in every format."""
    place = tmp_path_factory.mktemp("formats")
    fs.export(saved, place / "hf", shard_bytes=3e6)
    fs.export(saved, place / "torch.pt", to="torch")
    fs.export(saved, place / "dcp", to="dcp", shard_bytes=3e6)
    torch.save({"model": tensors(), "step": 5}, place / "sections.pt")
    dcp.save({"model": tensors(), "step": 5}, checkpoint_id=place / "dcp-sections", no_dist=True)
    return {"flowstone": saved, **{path.name: path for path in sorted(place.iterdir())}}


NAMES = ["dcp", "dcp-sections", "flowstone", "hf", "sections.pt", "torch.pt"]


@pytest.mark.parametrize("a", NAMES)
@pytest.mark.parametrize("b", NAMES)
def test_the_same_tensors_are_equal_in_any_two_formats(formats: dict[str, Path], a: str, b: str) -> None:
    tied = ["*.head"] if "hf" in (a, b) else []  # one of two tied tensors is left out of such a directory
    diff = fs.diff(formats[a], formats[b], names="*", skip=["step", "head", *tied])
    assert diff.equal, diff
    assert len(diff.tensors) >= 311
    assert all(tensor.unequal_bits == 0 for tensor in diff.tensors)


def test_what_differs_is_told_by_name_and_value(tmp_path: Path) -> None:
    grid = torch.arange(12.0).reshape(3, 4)
    moved = grid.clone()
    moved[1, 2] += 0.5
    moved[2, 3] = float("nan")
    rest = {"same": grid, "kind": grid.to(torch.bfloat16), "sides": grid.reshape(4, 3)}
    a = save(tmp_path / "a", {"model": {"w": grid, "gone": grid, **rest}, "step": 7, "note": "a"})
    rest = {"same": grid, "kind": grid, "sides": grid}
    b = save(tmp_path / "b", {"model": {"w": moved, "new": grid, **rest}, "step": 8, "best": 0.5})
    diff = fs.diff(a, b)
    assert not diff.equal
    assert (diff.only_in_a, diff.only_in_b) == (("model.gone",), ("model.new",))
    assert {value.name: value.values for value in diff.values} == {
        "step": ("7", "8"), "note": ("'a'", None), "best": (None, "0.5")
    }
    by_name = {tensor.name.removeprefix("model."): tensor for tensor in diff.tensors}
    assert [name for name, item in by_name.items() if item.equal] == ["same"]
    w = by_name["w"]
    assert (w.unequal, w.largest_absolute, w.largest_at, w.nans) == (2, 0.5, (1, 2), (0, 1))
    assert by_name["kind"].dtypes == ("bfloat16", "float32")
    assert by_name["kind"].unequal == 0
    assert by_name["sides"].shapes == ((4, 3), (3, 4))
    assert by_name["sides"].unequal is None


def test_tolerance_and_types_are_the_callers_to_say(saved: Path, tmp_path: Path) -> None:
    fs.export(saved, tmp_path / "hf", dtype="bf16")
    names = {"names": ["model.embed", "model.long"]}
    assert not fs.diff(saved, tmp_path / "hf", **names).equal
    diff = fs.diff(saved, tmp_path / "hf", rtol=2**-8, ignore_dtype=True, **names)
    assert diff.equal
    assert all(0 < (tensor.largest_relative or 0) <= 2**-8 for tensor in diff.tensors)
    assert not fs.diff(saved, tmp_path / "hf", rtol=2**-12, ignore_dtype=True, **names).equal


def test_rules_that_skip_speak_of_values_too(tmp_path: Path) -> None:
    saving = save(tmp_path / "one", {"model": {"w": torch.ones(3)}, "seen": 1})
    other = save(tmp_path / "other", {"model": {"w": torch.ones(3)}, "seen": 2})
    assert not fs.diff(saving, other).equal
    assert fs.diff(saving, other, rules=[fs.Skip("seen")]).values[0].values[0] is None, "rules speak of a alone"


def test_a_pattern_that_names_nothing_is_an_error_beside_one_that_does(tmp_path: Path) -> None:
    saving = save(tmp_path / "one", {"model": {"w": torch.ones(3)}})
    with pytest.raises(fs.NoTensorError, match=r"typo\.\*"):
        fs.diff(saving, saving, names=["model.*", "typo.*"])


def test_values_that_are_called_the_same_are_no_equal_ones(tmp_path: Path) -> None:
    saving = save(tmp_path / "one", {"w": torch.ones(3), "seen": {1: 5, "1": 6, 2: 7}})
    other = save(tmp_path / "other", {"w": torch.ones(3), "seen": {1: 4, "1": 6, 2: 7}})
    with pytest.raises(fs.CollisionError, match=r"two values of .* have the name 'seen\.1'[\s\S]*--skip"):
        fs.diff(saving, other)
    diff = fs.diff(saving, other, skip="seen.1")
    assert diff.equal


def test_inverse_needs_rules(tmp_path: Path) -> None:
    saving = save(tmp_path / "one", {"model": {"w": torch.ones(3)}})
    done = CliRunner().invoke(app, ["diff", str(saving), str(saving), "--inverse"])
    assert done.exit_code == 2
    assert "--inverse was given without --rules" in done.output


def test_steps_of_one_store_are_compared(tmp_path: Path) -> None:
    save(tmp_path / "run", {"w": torch.zeros(3)}, 1)
    save(tmp_path / "run", {"w": torch.ones(3)}, 2)
    diff = fs.diff(tmp_path / "run", tmp_path / "run", step_a=1)
    assert [tensor.largest_absolute for tensor in diff.tensors] == [1.0]
    assert fs.diff(fs.open(tmp_path / "run", 1), tmp_path / "run", step_b=1).equal


def test_a_tensor_that_lies_otherwise_in_its_file_is_the_same(tmp_path: Path) -> None:
    whole = torch.randn(300, 700, generator=torch.Generator().manual_seed(3))
    save_file({"w": whole.clone()}, tmp_path / "w.safetensors")
    torch.save({"w": whole.t().contiguous().t()}, tmp_path / "w.pt")  # column-major
    assert fs.diff(tmp_path / "w.safetensors", tmp_path / "w.pt").equal


def test_names_of_a_file_without_sections_are_taken_to_be_below_one(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"encoder": {"w": torch.zeros(3)}})
    save_file({"w": torch.zeros(3)}, tmp_path / "w.safetensors")
    assert fs.diff(a, tmp_path / "w.safetensors", section="encoder").equal
    diff = fs.diff(a, tmp_path / "w.safetensors")
    assert (diff.only_in_a, diff.only_in_b) == (("encoder.w",), ("model.w",))


def test_a_section_is_compared_alone_whatever_else_either_side_has(tmp_path: Path) -> None:
    model, ema = {"w": torch.randn(30)}, {"w": torch.randn(30)}
    a = save(tmp_path / "a", {"model": model, "ema": ema, "step": 3})
    save_file(model, tmp_path / "w.safetensors")
    torch.save({"model": model, "ema": {"w": ema["w"] + 1}, "epoch": 1}, tmp_path / "all.pt")
    for b in ("w.safetensors", "all.pt"):
        assert not fs.diff(a, tmp_path / b).equal
        for pair in ((a, tmp_path / b), (tmp_path / b, a)):
            diff = fs.diff(*pair, section="model")
            assert (diff.equal, [tensor.name for tensor in diff.tensors]) == (True, ["model.w"])
    assert not fs.diff(a, tmp_path / "all.pt", section="ema").equal
    assert not fs.diff(a, tmp_path / "w.safetensors", section="ema").equal
    with pytest.raises(fs.NoTensorError, match="has no section 'step'"):
        fs.diff(a, tmp_path / "all.pt", section="step")
    assert CliRunner().invoke(app, ["diff", str(a), str(tmp_path / "all.pt"), "--section", "model"]).exit_code == 0


@pytest.mark.parametrize("is_sharded", [False, True])
def test_tied_weights_are_equal_to_those_that_safetensors_stores_once(tmp_path: Path, is_sharded: bool) -> None:
    weight = torch.randn(1000, 30)
    a = save(tmp_path / "a", {"model": {"embed": weight, "head": weight, "b": torch.ones(3)}})
    fs.export(a, tmp_path / "hf", shard_bytes=50_000 if is_sharded else 5e9)
    for pair in ((a, tmp_path / "hf"), (tmp_path / "hf", a)):
        diff = fs.diff(*pair)
        assert (diff.equal, len(diff.tied_names), diff.only_in_a, diff.only_in_b) == (True, 1, (), ())
    torch.save({"embed": weight, "b": torch.ones(3)}, tmp_path / "less.pt")
    assert fs.diff(a, tmp_path / "less.pt").only_in_a == ("model.head",), "a file that can tie, and does not"


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_whole_names_go_out_and_come_in_again(tmp_path: Path, to: str) -> None:
    model, ema = {"w": torch.randn(30), "b.c": torch.ones(3)}, {"w": torch.randn(30)}
    a = save(tmp_path / "a", {"model": model, "ema": ema, "alone": torch.ones(2)})
    runner = CliRunner()
    for words in (["export", a, tmp_path / "out", "--to", to], ["import", tmp_path / "out", tmp_path / "b"]):
        done = runner.invoke(app, [*map(str, words), "--section", ""])
        assert done.exit_code == 0, done.output
    assert fs.diff(a, tmp_path / "b").equal
    assert fs.diff(a, tmp_path / "out", section="").equal
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.items()}, "alone": torch.zeros(2)}
    with fs.Checkpointer(tmp_path / "b") as checkpointer:
        checkpointer.load(state)
    assert torch.equal(state["model"]["b.c"], torch.ones(3))
    assert torch.equal(state["alone"], torch.ones(2))


def test_digests_prove_equality_only_where_the_caller_trusts_them(tmp_path: Path) -> None:
    weights = {"w": torch.randn(1_000_000), "v": torch.randn(1000)}
    a = save(tmp_path / "a", {"model": weights})
    b = save(tmp_path / "b", {"model": {**weights, "v": weights["v"] + 1}})
    diff = fs.diff(a, b, trust_digests=True)
    assert {tensor.name: (tensor.by_digest, tensor.equal) for tensor in diff.tensors} == {
        "model.w": (True, True), "model.v": (False, False)
    }
    assert diff.bytes == 8000
    segment, begin = place_of(next(b.glob("step-*")), "model.w")
    flip(segment, begin + 3_000_000)
    assert fs.diff(a, b, trust_digests=True, names="*.w").equal  # what was written is equal
    with pytest.raises(fs.DamagedError, match=r"'model.w', chunk 2, does not match its digest"):
        fs.diff(a, b)


def test_neither_is_loaded_whole(tmp_path: Path) -> None:
    noise = {f"layer.{number}": torch.full((4096, 1024), float(number)) for number in range(20)}  # 320 MiB
    save_file(noise, tmp_path / "a.safetensors")
    noise["layer.19"][4095, 1023] = 0
    save(tmp_path / "b", {"model": noise})
    del noise
    call = f"fs.diff({str(tmp_path / 'a.safetensors')!r}, {str(tmp_path / 'b')!r}, budget_bytes={64 * MIB})"
    assert growth_of(f"[one] = {call}.differing; assert one.largest_at == (4095, 1023)") < 64 * MIB + BESIDE_BYTES


def test_windows_cut_tensors_anywhere(saved: Path, formats: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARES", 10)  # 3 MiB: the least that can be read through
    assert fs.diff(saved, formats["dcp"], names="model.*", budget_bytes=BUDGET).equal
    with pytest.raises(fs.BudgetError, match="too small to compare"):
        fs.diff(saved, formats["dcp"], budget_bytes=BUDGET - 1)


class _Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


def test_a_malicious_pickle_is_named_and_nothing_of_it_runs(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3), "x": _Payload(tmp_path / "ran")}, tmp_path / "bad.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(_Payload(tmp_path / "ran")))
    with pytest.raises(fs.UnsupportedFormatError, match="no code in them was executed"):
        fs.diff(tmp_path / "bad.pt", tmp_path / "bad.pt")
    with pytest.raises(fs.FlowstoneError):
        fs.diff(tmp_path / "bare.pt", tmp_path / "bad.pt")
    assert fs.diff(tmp_path / "bad.pt", tmp_path / "bad.pt", skip="x").equal
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda s, t: fs.diff(s, t), fs.NotAStoreError, "does not exist"),
    (lambda s, t: fs.diff(t.parent, s), fs.NotAStoreError, "not in a checkpoint format"),
    (lambda s, t: fs.diff(s, s, step_b=99), fs.NoCheckpointError, "step 99"),
    (lambda s, t: fs.diff(s, s, names="nothing.*"), fs.NoTensorError, "no name in either"),
    (lambda s, t: fs.diff(s, s, names=[3]), fs.ArgumentError, "must be patterns"),
    (lambda s, t: fs.diff(s, s, rtol=-1), fs.ArgumentError, "rtol"),
    (lambda s, t: fs.diff(s, s, atol=float("nan")), fs.ArgumentError, "atol"),
])
def test_arguments_that_a_diff_does_not_take(
    saved: Path, tmp_path: Path, call: Callable[[Path, Path], object], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        call(saved, tmp_path / "nowhere")


def test_a_torn_file_is_refused(saved: Path, formats: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(formats["hf"], tmp_path / "hf")
    shard = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1)
    done = CliRunner().invoke(app, ["diff", str(saved), str(tmp_path / "hf"), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"] == "DamagedError"


def test_the_verb_exits_as_diff_does(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"w": torch.zeros(3), "step": 1})
    b = save(tmp_path / "b", {"w": torch.tensor([0.0, float("inf"), 0.0]), "step": 1, "more": torch.zeros(2)})
    run = CliRunner().invoke
    same = run(app, ["diff", str(a), str(a)])
    assert (same.exit_code, "equal: 1 tensors" in same.stdout) == (0, True)
    other = run(app, ["diff", str(a), str(b)])
    assert other.exit_code == 1
    assert "1 of 3" in other.stdout
    assert "more" in other.stdout
    record = json.loads(run(app, ["diff", str(a), str(b), "--json"]).stdout)
    assert (record["equal"], record["only_in_b"]) == (False, ["more"])
    assert record["tensors"][0]["largest_absolute"] == "inf"
    assert run(app, ["diff", str(a), str(tmp_path / "nowhere")]).exit_code == 2
    assert run(app, ["diff", str(a)]).exit_code == 2
