"""Loads: damage found during a load, staging, fallback, and exceptions by a named rule."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import flowstone as fs
from flowstone.cli.app import app
from flowstone.events.phases import Event
from flowstone.events.rare_events import FellBack
from flowstone.store.base import ReadReceipt, finish_reading
from forge import content, edit_index, flip, place_of
from small_state import STEP, state

# One request at a time and in order, so that the chunks in front of a bad one have arrived when it is found.
ONE_BY_ONE = fs.EngineOptions(queue_depth=1, request_bytes=2 << 20, workers=1)


def changed(before: dict[str, tuple[object, ...]], after: dict[str, tuple[object, ...]]) -> set[str]:
    """Names of the leaves that differ, as a checkpoint names tensors."""
    paths = {path for path in before if before[path] != after.get(path)}
    return {path.removeprefix("state[").rstrip("]").replace("'", "").replace("][", ".") for path in paths}


# What is read


@pytest.mark.parametrize("gap_bytes", [0, 4 << 10, 60 << 10])
def test_part_of_a_checkpoint_costs_its_chunks_and_two_percent(store: Path, gap_bytes: int) -> None:
    """Weights alone, then one box, from between moments and what else there is."""
    def model() -> dict[str, torch.Tensor]:
        return {f"w{i}": torch.randn(96 << 10) for i in range(50)} | {f"n{i}": torch.randn(100) for i in range(50)}

    model_state, between = model(), torch.zeros(gap_bytes, dtype=torch.uint8)
    rest = {"moments": model(), "gap": {str(index): between.clone() for index in range(20)}}
    with fs.Checkpointer(store) as checkpointer:
        checkpoint = checkpointer.save(1, {"model": model_state, **rest}).committed.result()
    receipts: list[ReadReceipt] = []

    def noted(reading: object, on_progress: Callable[[int], None] | None) -> ReadReceipt:
        receipts.append(finish_reading(reading, on_progress))  # type: ignore[arg-type]
        return receipts[-1]

    with mock.patch("flowstone.stage.scatter.finish_reading", noted):
        blank = {name: torch.zeros_like(tensor) for name, tensor in model_state.items()}
        with fs.Checkpointer(store) as checkpointer:
            report = checkpointer.load({"model": blank})
        box = fs.Box((64 << 10,), (8 << 10,))
        part = checkpoint.read("model.w7", box)
    assert all(torch.equal(blank[name], tensor) for name, tensor in model_state.items())
    assert torch.equal(part, model_state["w7"][64 << 10 : 72 << 10])
    weights, boxed = receipts
    assert report.bytes == sum(tensor.nbytes for tensor in model_state.values())
    assert report.bytes <= weights.requested_bytes <= 1.02 * report.bytes
    assert weights.requests <= 5, "they lie together: 19 MB in requests of 8 MiB, and the small ones"
    assert boxed.requests == 1
    assert boxed.requested_bytes <= 1.02 * model_state["w7"].nbytes, "a chunk, for that is what a digest covers"


# Damage on the way


@pytest.mark.parametrize("tensor", ["big", "small", "table[2:6,0:4]", "many.1"])
def test_a_bad_chunk_names_itself_and_every_tensor_that_was_written(checkpoint: Path, tensor: str) -> None:
    path, begin = place_of(checkpoint, tensor)
    flip(path, begin)
    blank = state(9.0)
    before = content(blank)
    with fs.Checkpointer(checkpoint.parent) as checkpointer, pytest.raises(fs.DamagedError) as caught:
        checkpointer.load(blank)
    error = caught.value
    assert error.message == f"cannot load {checkpoint}: stored bytes do not match their digests"
    name = tensor.partition("[")[0]
    assert str(error.facts["damaged"]).startswith(f"{name!r}, chunk 0, bytes {begin}..")
    assert str(error.facts["damaged"]).endswith(f"of step-{STEP:08d}/{path.name}")
    assert "fallback=True" in str(error.facts["next"])
    assert changed(before, content(blank)) - {"tied"} <= set(error.written), "a changed tensor is not named"
    assert str(error.facts["changed"]).startswith(f"{len(error.written)} tensors")


def test_saving_is_refused_from_a_half_loaded_state_until_a_load_succeeds(store: Path) -> None:
    saved = {"first": torch.ones(4 << 20), "last": torch.ones(4 << 20)}
    with fs.Checkpointer(store, engine=ONE_BY_ONE) as checkpointer:
        checkpointer.save(1, saved).committed.result()
        checkpointer.save(2, saved).committed.result()
        flip(*place_of(store / "step-00000002", "last"))
        blank = {name: torch.zeros(4 << 20) for name in saved}
        with pytest.raises(fs.DamagedError) as caught:
            checkpointer.load(blank)
        assert "first" in caught.value.written
        with pytest.raises(fs.DamagedError) as refused:
            checkpointer.save(3, blank)
        assert refused.value.message.startswith("cannot save the state: the load of step 2 did not finish")
        assert refused.value.facts["next"] == "load again: the state can be saved once a load has succeeded"
        with pytest.raises(fs.DamagedError):
            checkpointer.load(blank)
        with pytest.raises(fs.DamagedError, match="cannot save the state"):
            checkpointer.save(3, blank)
        checkpointer.load(blank, step=1)
        checkpointer.save(3, blank)
    assert fs.open(store).step == 3
    assert fs.open(store).verify().sound


@pytest.mark.parametrize("tensor", ["big", "small", "table[0:2,0:4]"])
def test_a_staged_load_leaves_memory_untouched_on_a_bad_chunk(checkpoint: Path, tensor: str) -> None:
    flip(*place_of(checkpoint, tensor))
    blank = state(9.0)
    before = content(blank)
    with fs.Checkpointer(checkpoint.parent) as checkpointer:
        with pytest.raises(fs.DamagedError) as caught:
            checkpointer.load(blank, verify_first=True)
        assert caught.value.written == ()
        assert content(blank) == before
        checkpointer.save(STEP + 1, blank)  # nothing was changed, so nothing forbids it


def test_a_staged_load_of_a_sound_checkpoint_loads(checkpoint: Path) -> None:
    blank = state(9.0)
    with fs.Checkpointer(checkpoint.parent) as checkpointer:
        checkpointer.load(blank, verify_first=True)
    assert content(blank) == content(state())


def test_staging_more_than_memory_holds_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.stage.bounce.available_bytes", lambda: 1000)
    blank = state(9.0)
    before = content(blank)
    with fs.Checkpointer(checkpoint.parent) as checkpointer, pytest.raises(fs.BudgetError) as caught:
        checkpointer.load(blank, verify_first=True)
    assert "load(verify_first=True) needs" in caught.value.message
    assert caught.value.facts["found"] == "1000 bytes available"
    assert content(blank) == before


def test_reading_one_tensor_from_a_damaged_checkpoint_checks_that_tensor_alone(checkpoint: Path) -> None:
    flip(*place_of(checkpoint, "big"))
    ckpt = fs.open(checkpoint.parent)
    assert ckpt.read("small").tolist() == [1] * 5
    assert ckpt.read("big", fs.Box(((1 << 18),), (10,))).tolist() == [1] * 10, "chunk 1 is sound"
    with pytest.raises(fs.DamagedError, match=f"cannot read 'big' of {checkpoint}") as caught:
        ckpt.read("big", fs.Box((5,), (1,)))
    assert "'big', chunk 0" in str(caught.value.facts["damaged"])


# Falling back


@pytest.fixture
def three(checkpoint: Path) -> Path:
    """A store with steps 7, 8 and 9; the value of every element is 1, 8 and 9."""
    with fs.Checkpointer(checkpoint.parent) as checkpointer:
        checkpointer.save(8, state(8.0))
        checkpointer.save(9, state(9.0))
    return checkpoint.parent


def test_fallback_goes_to_the_next_older_step_and_sets_the_damaged_aside_at_the_next_save(three: Path) -> None:
    flip(*place_of(three / "step-00000009", "big"))
    events: list[Event] = []
    blank = state(0.0)
    with fs.Checkpointer(three, on_event=events.append) as checkpointer:
        report = checkpointer.load(blank, fallback=True)
        assert report.step == 8
        assert content(blank) == content(state(8.0))
        (fell,) = [event for event in events if isinstance(event, FellBack)]
        assert fell.damaged_step == 9
        assert "'big', chunk 0" in fell.reason
        assert (three / "step-00000009").exists(), "a load writes nothing"
        checkpointer.save(9, blank)
    assert len(list(three.glob(".superseded-00000009-*"))) == 1
    assert fs.open(three).verify().step == 9
    assert fs.open(three).read("small").tolist() == [8] * 5


def test_a_step_that_has_lost_its_manifest_is_damaged_and_not_passed_over(three: Path) -> None:
    (three / "step-00000009/manifest.json").unlink()
    with fs.Checkpointer(three) as checkpointer:
        for ask in (
            checkpointer.latest, lambda: checkpointer.load(state(0.0)), lambda: checkpointer.load(state(0.0), step=9),
            lambda: fs.open(three), lambda: fs.open(three, step=9), lambda: fs.open(three / "step-00000009"),
        ):
            with pytest.raises(fs.DamagedError, match=r"step-00000009 has no manifest\.json"):
                ask()
        with pytest.raises(fs.StepExistsError):
            checkpointer.save(9, state())
    listed = CliRunner().invoke(app, ["ls", str(three), "--json"])
    assert listed.exit_code == 1
    assert "has no manifest.json" in str(json.loads(listed.stdout)["checkpoints"][2])
    assert CliRunner().invoke(app, ["verify", str(three)]).exit_code == 1
    assert fs.open(three, step=8).verify().sound


def test_fallback_takes_the_step_before_one_without_manifest_tells_why_and_goes_on(three: Path) -> None:
    (three / "step-00000009/manifest.json").unlink()
    blank = state(0.0)
    with fs.Checkpointer(three, keep=5) as checkpointer:
        report = checkpointer.load(blank, fallback=True)
        assert report.step == 8
        assert "step 9 is damaged and was skipped" in report.notes[0]
        checkpointer.save(9, blank)
    assert len(list(three.glob(".superseded-00000009-*"))) == 1
    assert fs.open(three).verify().step == 9


def test_retention_and_sweep_leave_a_step_without_manifest(three: Path) -> None:
    (three / "step-00000008/manifest.json").unlink()
    before = sorted((three / "step-00000008").iterdir())
    with fs.Checkpointer(three, keep=1) as checkpointer:
        checkpointer.save(10, state())
    assert sorted(path.name for path in three.glob("step-*")) == ["step-00000008", "step-00000010"]
    assert sorted((three / "step-00000008").iterdir()) == before


@pytest.mark.parametrize("made", ["file", "link", "loop", "empty", "theirs"])
def test_what_was_never_a_step_of_ours_is_passed_over_under_a_steps_name(three: Path, made: str) -> None:
    place = three / "step-00000010"
    if made == "file":
        place.write_text("theirs")
    elif made in ("link", "loop"):
        place.symlink_to("nowhere" if made == "link" else place.name)
    else:
        place.mkdir()
        (place / "eval.json").write_text("{}") if made == "theirs" else None
    with fs.Checkpointer(three) as checkpointer:
        newest = checkpointer.latest()
        assert newest is not None
        assert newest.step == checkpointer.load(state(0.0)).step == 9


def test_fallback_passes_over_several_kinds_of_damage(three: Path) -> None:
    with fs.Checkpointer(three) as checkpointer:
        checkpointer.save(10, state())
    (three / "step-00000010/manifest.json").unlink()
    (three / "step-00000009/manifest.json").write_text("{")
    (three / "step-00000008/rank-00000.safetensors").unlink()
    blank = state(0.0)
    with fs.Checkpointer(three) as checkpointer:
        assert checkpointer.load(blank, fallback=True).step == 7
    assert content(blank) == content(state())


def test_fallback_stops_at_the_last_checkpoint_with_its_error(three: Path) -> None:
    for step in (7, 8, 9):
        (three / f"step-{step:08d}/manifest.json").write_text("{")
    with fs.Checkpointer(three) as checkpointer, pytest.raises(fs.DamagedError, match="step-00000007/manifest"):
        checkpointer.load(state(0.0), fallback=True)


def test_without_fallback_a_damaged_newest_step_is_an_error(three: Path) -> None:
    (three / "step-00000009/manifest.json").write_text("{")
    with fs.Checkpointer(three) as checkpointer:
        for ask in (checkpointer.latest, lambda: checkpointer.load(state(0.0))):
            with pytest.raises(fs.DamagedError, match=r"step-00000009/manifest\.json is truncated"):
                ask()
        assert checkpointer.load(state(0.0), step=8).step == 8


def test_fallback_does_not_hide_a_mismatch(three: Path) -> None:
    with fs.Checkpointer(three) as checkpointer, pytest.raises(fs.MismatchError):
        checkpointer.load({"big": torch.zeros(3)}, fallback=True)


# Rules


def test_a_rename_is_reported_with_both_names(store: Path) -> None:
    old = torch.nn.ModuleDict({"old": torch.nn.Linear(2, 2), "same": torch.nn.Linear(2, 2)})
    new = torch.nn.ModuleDict({"new": torch.nn.Linear(2, 2), "same": torch.nn.Linear(2, 2)})
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": old}).committed.result()
        report = checkpointer.load({"model": new}, rules=[fs.Rename("model.old", "model.new")])
    assert report.renamed == (
        ("model.old.weight", "model.new.weight"), ("model.old.bias", "model.new.bias")
    )
    assert torch.equal(new["new"].weight, old["old"].weight)


def test_a_rename_takes_optimizer_state_along(store: Path) -> None:
    def made(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)})
        return model, torch.optim.AdamW(model.parameters())

    (model, optimizer), (other, another) = made("old"), made("new")
    model["old"](torch.ones(1, 2)).sum().backward()  # type: ignore[index]
    optimizer.step()
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"model": model, "opt": optimizer}).committed.result()
        checkpointer.load({"model": other, "opt": another}, rules=[fs.Rename("model.old", "model.new")])
    assert content(another.state_dict()) == content(optimizer.state_dict())


def test_init_and_cast_are_reported_by_name(checkpoint: Path) -> None:
    blank = state(9.0)
    blank["table"] = torch.zeros(6, 4)
    blank["many"] = [*blank["many"][:2], torch.full((3,), 5.0)]  # type: ignore[index]
    blank["head"] = torch.full((2,), 6.0)
    del blank["big"]
    rules = [fs.Init("head"), fs.Cast("table")]
    with fs.Checkpointer(checkpoint.parent) as checkpointer:
        report = checkpointer.load(blank, rules=rules)
    assert (report.step, report.path) == (STEP, str(checkpoint))
    assert (report.initialised, report.cast, report.skipped) == (("head",), ("table",), ())
    assert set(report.matched) == {"table", "small", "many.0", "many.1", "many.2"}
    assert torch.equal(blank["table"], torch.ones(6, 4))  # type: ignore[arg-type]
    assert blank["head"].tolist() == [6, 6]  # type: ignore[attr-defined]


def test_skip_passes_over_a_stored_tensor_and_says_so(store: Path) -> None:
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"m": {"a": torch.ones(2), "old": torch.ones(3)}}).committed.result()
        blank = {"m": {"a": torch.zeros(2)}}
        assert checkpointer.load(blank, rules=[fs.Skip("m.o*")]).skipped == ("m.old",)
        assert blank["m"]["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.int64, torch.float16)],
)
def test_cast_converts_values_as_torch_does(store: Path, stored: torch.dtype, expected: torch.dtype) -> None:
    value = torch.arange(-50, 50).to(stored) * 3
    target = torch.zeros(100, dtype=expected)
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": value}).committed.result()
        checkpointer.load({"x": target}, rules=[fs.Cast("*")])
    assert torch.equal(target, value.to(expected))


def test_sections_that_are_not_in_the_state_are_left_alone(checkpoint: Path) -> None:
    blank = {"small": torch.zeros(5)}
    with fs.Checkpointer(checkpoint.parent) as checkpointer:
        report = checkpointer.load(blank)
    assert report.matched == ("small",)
    assert blank["small"].tolist() == [1] * 5


def test_a_stored_tensor_with_a_hole_is_named(checkpoint: Path) -> None:
    """No writer of ours makes one; a reader must not fill it with what was there."""

    def drop_second_box(columns: dict[str, np.ndarray]) -> None:
        assert bytes(columns["tensor.name"]).startswith(b"bigtable")
        piece, chunk = 2, 4  # pieces: big in three chunks, table[0:2], table[2:6]
        columns["piece.box"] = np.delete(columns["piece.box"], slice(6, 10))
        for name in ("tensor", "segment", "offset", "bytes"):
            columns[f"piece.{name}"] = np.delete(columns[f"piece.{name}"], piece)
        for name in ("digest", "bytes", "codec"):
            columns[f"chunk.{name}"] = np.delete(columns[f"chunk.{name}"], chunk)

    edit_index(checkpoint, drop_second_box)
    blank = state(9.0)
    before = content(blank)
    with fs.Checkpointer(checkpoint.parent) as checkpointer, pytest.raises(fs.CoverageError) as caught:
        checkpointer.load(blank)
    assert caught.value.message == "cannot load 'table': the checkpoint does not contain the elements of [2:6,0:4]"
    assert content(blank) == before


def test_a_checkpoint_removed_under_an_open_one_is_an_error_not_wrong_bytes(checkpoint: Path) -> None:
    ckpt = fs.open(checkpoint.parent)
    _ = ckpt.index
    shutil.rmtree(checkpoint)
    with pytest.raises(fs.StorageError, match="cannot open"):
        ckpt.read("small")


def test_tensors_that_were_tied_load_into_separate_ones(tmp_path: Path) -> None:
    weight = torch.randn(3, 3)
    state = {"model": {"embed": torch.zeros(3, 3), "head": torch.zeros(3, 3)}}
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": {"embed": weight, "head": weight}})
        checkpointer.load(state)
    assert torch.equal(state["model"]["embed"], weight)
    assert torch.equal(state["model"]["head"], weight)
