"""Universal Checkpoints of DeepSpeed, written without it: read by torch, and by the importer, bit for bit."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed_layout import edit, importable, job, optimizer_file
from models import assert_same, interrupted_export

import flowstone as fs
from flowstone.store.system import System

BUDGET = 32 << 20
TAG = "global_step3_universal"


def loaded(path: Path) -> Any:
    with importable():
        return torch.load(path, weights_only=False)


def files_of(directory: Path) -> dict[str, Any]:
    """What torch.load says of every file, by its path."""
    return {str(path.relative_to(directory)): loaded(path) for path in sorted(directory.rglob("*.pt"))}


def assert_equal(actual: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert_same({where: actual}, {where: expected})
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{where}.{key}")
    elif hasattr(expected, "cur_scale"):
        assert (type(actual), vars(actual)) == (type(expected), vars(expected)), where
    else:
        assert actual == expected, where


@pytest.mark.parametrize("options", [
    {"stage": 1}, {"stage": 2, "dtype": torch.float32}, {"stage": 3, "ranks": 3},
    {"stage": 2, "frozen": {"ice": torch.ones(5, 7).bfloat16()}, "shared": {"head.weight": "b.weight"}},
    {"stage": 3, "frozen": {"ice": torch.ones(5, 7).bfloat16()}, "shared": {"head.weight": "b.weight"}},
], ids=["1", "2-fp32", "3", "2-shared", "3-shared"])
def test_what_deepspeed_saved_goes_out_and_comes_back_as_it_was(tmp_path: Path, options: dict[str, Any]) -> None:
    """By way of a store, and straight from the partitions of all ranks, to the same bytes."""
    job(**options).write(tmp_path / "ds")
    fs.import_checkpoint(tmp_path / "ds", tmp_path / "run")
    report = fs.export(tmp_path / "run", tmp_path / "universal", to="universal", budget_bytes=BUDGET)
    assert (report.format, report.skipped, report.cast) == ("universal", (), ())
    fs.export(tmp_path / "ds", tmp_path / "straight", to="universal", budget_bytes=BUDGET)
    assert_equal(files_of(tmp_path / "straight"), files_of(tmp_path / "universal"))
    fs.import_checkpoint(tmp_path / "universal", tmp_path / "back", budget_bytes=BUDGET)
    diff = fs.diff(tmp_path / "run", tmp_path / "back")
    assert diff.equal, diff


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_are_as_ds_to_universal_writes_them(tmp_path: Path, stage: int) -> None:
    made = job(stage=stage)
    made.buffers.clear()  # which DeepSpeed takes from nowhere
    theirs = files_of(made.write_universal(tmp_path / "theirs") / TAG / "zero")
    fs.export(made.write(tmp_path / "ds"), tmp_path / "ours", to="universal")
    assert (tmp_path / "ours" / "latest_universal").read_text() == TAG
    ours = files_of(tmp_path / "ours" / TAG / "zero")
    for name in theirs.keys() - {"optimizer_state.pt"}:
        expected = theirs[name]
        if stage == 3:  # flat there; DeepSpeed takes both
            assert torch.equal(ours[name]["param"].reshape(-1), expected)
        else:
            assert_equal(ours[name], expected, name)
    assert {name for name in ours if not name.endswith("step.pt")} == {n for n in theirs if not n.endswith("step.pt")}
    state, expected = ours["optimizer_state.pt"], theirs["optimizer_state.pt"]
    assert [group["lr"] for group in state["param_groups"]] == [group["lr"] for group in expected["param_groups"]]
    assert (state["zero_stage"], state["overflow"], state["ds_version"]) == (stage, False, "0.19.8")
    assert type(state["loss_scaler"]).__name__ == "LossScaler"
    assert vars(state["loss_scaler"]) == {"cur_scale": 1.0, "dynamic": False}
    inner = state["optimizer_state_dict"]  # where ZeRO 3 looks
    assert (inner["state"][0]["step"], inner["param_groups"]) == (3, state["param_groups"])


def test_a_dynamic_loss_scaler_and_a_count_of_steps_that_is_a_number_stay_what_they_are(tmp_path: Path) -> None:
    def change(value: Any) -> None:
        state = value["optimizer_state_dict"]
        state["loss_scaler"].dynamic, state["loss_scaler"].cur_iter = True, 7
        for slots in state["base_optimizer_state"]["state"].values():
            slots["step"] = 3

    root = job().write(tmp_path / "ds")
    for rank in (0, 1):
        edit(optimizer_file(root, rank), change)
    fs.export(root, tmp_path / "universal", to="universal")
    zero = tmp_path / "universal" / TAG / "zero"
    assert loaded(zero / "norm" / "step.pt") == 3
    scaler = loaded(zero / "optimizer_state.pt")["loss_scaler"]
    assert (type(scaler).__name__, scaler.cur_iter) == ("DynamicLossScaler", 7)
    fs.import_checkpoint(tmp_path / "universal", tmp_path / "run")
    assert fs.open(tmp_path / "run").objects["optimizer"]["state"]["model.norm"] == {"step": 3}


class Network(torch.nn.Module):
    """Tied weights, a buffer, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(9, 9), torch.nn.Linear(9, 9)
        self.last.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(9)
        self.frozen = torch.nn.Parameter(torch.ones(9), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) * self.frozen


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Of two groups with settings of their own."""
    ours = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW([
        {"params": ours[:1], "lr": 0.125, "betas": (0.5, 0.75)}, {"params": ours[1:], "weight_decay": 0.0},
    ])


def trained(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    optimizer = optimizer_of(model.to(dtype))
    for _ in range(2):
        model(torch.randn(4, 9, dtype=dtype)).square().sum().backward()
        optimizer.step()
    return optimizer


def saved(place: Path, **more: Any) -> Path:
    """A store with a network and its optimizer, and what is given besides; step 3."""
    model = Network()
    with fs.Checkpointer(place / "run") as checkpointer:
        checkpointer.save(3, {"model": model, "optimizer": trained(model), **more})
    return place / "run"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_job_without_deepspeed_goes_out_and_comes_back_into_its_objects(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Network()
    optimizer = trained(model, dtype)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    client = {"text": "x", "parts": (1.5, None, b"\x00\xff", 2**80, -(2**40)), "seen": torch.arange(3)}
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(
            3, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "client": client, "epoch": 2}
        )
    report = fs.export(tmp_path / "run", tmp_path / "universal", to="universal")
    assert len(report.cast) == (0 if dtype is torch.float32 else 5)
    master = loaded(tmp_path / "universal" / TAG / "zero" / "first.weight" / "fp32.pt")["param"]
    assert (master.dtype, torch.equal(master.to(dtype), model.first.weight)) == (torch.float32, True)
    for prefix in ("", "zero_pp_rank_0_"):
        state = loaded(tmp_path / "universal" / TAG / f"{prefix}mp_rank_00_model_states.pt")
        assert (state["global_steps"], state["epoch"], state["lr_scheduler"]) == (3, 2, scheduler.state_dict())
        assert_equal(state["client"], client)
        assert state["shared_params"] == {"last.weight": "first.weight"}
    fs.import_checkpoint(tmp_path / "universal", tmp_path / "back")
    other = Network().to(dtype)
    resumed = optimizer_of(other)
    for group in resumed.param_groups:
        group.update(lr=1.0, betas=(0.0, 0.0), weight_decay=1.0)
    with fs.Checkpointer(tmp_path / "back") as checkpointer:
        checkpointer.load({"model": other, "optimizer": resumed})
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_equal(resumed.state_dict(), optimizer.state_dict())


def without_state(place: Path) -> Path:
    model = torch.nn.Linear(3, 3)
    with fs.Checkpointer(place / "run") as checkpointer:
        checkpointer.save(3, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    return place / "run"


def without_optimizer(place: Path) -> Path:
    with fs.Checkpointer(place / "run") as checkpointer:
        checkpointer.save(3, {"model": torch.nn.Linear(3, 3)})
    return place / "run"


def with_two_modules(place: Path) -> Path:
    return saved(place, ema=Network())


def with_two_optimizers(place: Path) -> Path:
    other = Network()
    return saved(place, critic=other, critic_optimizer=trained(other))


def named(name: str) -> Callable[[Path], Path]:
    def write(place: Path) -> Path:
        model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(3))})
        optimizer = torch.optim.AdamW(model.parameters())
        model[name].sum().backward()
        optimizer.step()
        with fs.Checkpointer(place / "run") as checkpointer:
            checkpointer.save(3, {"model": model, "optimizer": optimizer})
        return place / "run"

    return write


def with_a_slot_of_another_shape(place: Path) -> Path:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with fs.Checkpointer(place / "run") as checkpointer:
        checkpointer.save(3, {"model": model, "optimizer": optimizer})
    return place / "run"


def with_model_parallelism(place: Path) -> Path:
    made = job()
    made.client["mp_world_size"] = 2
    return made.write(place / "ds")


@pytest.mark.parametrize(("write", "message", "skips"), [
    (without_state, "has no state yet", ()),
    (without_optimizer, r"no optimizers[\s\S]*--to hf", ()),
    (with_two_optimizers, r"2 optimizers[\s\S]*critic_optimizer|2 optimizers[\s\S]*skip", ("critic*",)),
    (with_two_modules, r"cannot hold[\s\S]*ema\.", ("ema.*",)),
    (lambda place: saved(place, rng=fs.rng()), r"cannot hold[\s\S]*rng", ("rng*",)),
    (lambda place: saved(place, odd={"a": {1, 2}}), r"cannot hold 1 values[\s\S]*odd\.a", ("odd.a",)),
    (lambda place: saved(place, module={"a": 1}), r"cannot hold 1 values[\s\S]*module\.a", ("module.a",)),
    (named("a/b"), r"cannot hold[\s\S]*model\.a/b", ()),
    (named("x" * 260), r"cannot hold[\s\S]*model\.xxx", ()),
    (with_a_slot_of_another_shape, r"cannot hold[\s\S]*optimizer\.state\.model\.weight\.row_var", ("*_var",)),
    (with_model_parallelism, r"model parallelism[\s\S]*ds_to_universal", ()),
])
def test_what_has_no_place_is_named_and_may_be_left_out(
    tmp_path: Path, write: Callable[[Path], Path], message: str, skips: tuple[str, ...]
) -> None:
    source = write(tmp_path)
    with pytest.raises(fs.FlowstoneError) as caught:
        fs.export(source, tmp_path / "universal", to="universal")
    assert caught.match(message)
    assert not (tmp_path / "universal").exists()
    if skips:
        report = fs.export(source, tmp_path / "universal", to="universal", rules=[fs.Skip(skip) for skip in skips])
        assert report.skipped
        names = {path.parent.name for path in (tmp_path / "universal" / TAG / "zero").glob("*/fp32.pt")}
        assert names >= {"first.weight"} or names == {"weight", "bias"}


@pytest.mark.parametrize(("options", "message"), [
    ({"dtype": "bf16"}, "leave out --dtype"), ({"section": None}, "name the module's section"),
])
def test_what_would_be_another_training_state_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.ArgumentError, match=message):
        fs.export(saved(tmp_path), tmp_path / "universal", to="universal", **options)


def test_rules_move_parameters_with_their_slots_and_groups(tmp_path: Path) -> None:
    rules = [
        fs.Split("model.first.weight", ("model.upper", "model.lower"), 0, (1, 2)),
        fs.Rename("model.norm", "model.scale"),
    ]
    fs.export(saved(tmp_path), tmp_path / "universal", to="universal", rules=[*rules, fs.Skip("model.last.weight")])
    fs.export(tmp_path / "run", tmp_path / "as-it-is", to="universal")
    zero, before = (tmp_path / place / TAG / "zero" for place in ("universal", "as-it-is"))
    assert {path.name for path in zero.iterdir()} >= {"upper", "lower", "scale.weight", "first.bias"}
    for slot in ("fp32", "exp_avg", "exp_avg_sq"):
        whole = loaded(before / "first.weight" / f"{slot}.pt")["param"]
        assert torch.equal(loaded(zero / "upper" / f"{slot}.pt")["param"], whole[:3])
        assert torch.equal(loaded(zero / "lower" / f"{slot}.pt")["param"], whole[3:])
    assert loaded(zero / "lower" / "step.pt") == loaded(before / "first.weight" / "step.pt")
    groups = loaded(zero / "optimizer_state.pt")["param_groups"]
    assert [group["lr"] for group in groups] == [0.125, 0.001]


def test_a_parameter_that_the_optimizer_has_no_state_of_keeps_its_weights(tmp_path: Path) -> None:
    """As ds_to_universal has it: frozen ones that were handed to the optimizer all the same."""
    model = Network()
    model.unused = torch.nn.Linear(3, 3)
    optimizer = trained(model)
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(3, {"model": model, "optimizer": optimizer})
    fs.export(tmp_path / "run", tmp_path / "universal", to="universal")
    zero = tmp_path / "universal" / TAG / "zero"
    assert [path.name for path in (zero / "unused.weight").iterdir()] == ["fp32.pt"]
    assert torch.equal(loaded(zero / "unused.weight" / "fp32.pt")["param"], model.unused.weight)


def large(place: Path) -> Path:
    made = job()
    for name in ("b.weight", "a.weight"):
        made.master[name] = torch.randn(2000, 1500)
        made.slots[name] = {slot: torch.randn(2000, 1500) for slot in made.slots[name]}
    return made.write(place / "ds")


def test_an_export_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    source = large(tmp_path)
    whole = fs.export(source, tmp_path / "whole", to="universal", budget_bytes=BUDGET)
    interrupted_export(source, tmp_path / "universal", 9, to="universal", budget_bytes=BUDGET)
    assert not (tmp_path / "universal").exists()
    report = fs.export(source, tmp_path / "universal", to="universal", budget_bytes=BUDGET)
    assert 0 < report.resumed_bytes < report.bytes == whole.bytes
    for name in whole.files:
        assert (tmp_path / "universal" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_stopped_at_any_call_that_changes_the_disk_the_same_command_goes_on(tmp_path: Path) -> None:
    source = saved(tmp_path)
    whole = fs.export(source, tmp_path / "whole", to="universal")
    for last in range(0, 1000, 6):
        calls = iter(range(last))

        def counted(name: str, calls: Iterator[int] = calls) -> mock._patch:
            real = getattr(System, name)

            def call(*given: Any, **named: Any) -> Any:
                if next(calls, None) is None:
                    raise KeyboardInterrupt
                return real(*given, **named)

            return mock.patch.object(System, name, call)

        names = ("make_directory", "create", "write", "sync", "sync_directory", "rename")
        with contextlib.ExitStack() as patched, contextlib.suppress(KeyboardInterrupt):
            for name in names:
                patched.enter_context(counted(name))
            fs.export(source, tmp_path / "universal", to="universal")
        is_done = next(calls, None) is not None
        fs.export(source, tmp_path / "universal", to="universal") if not is_done else None
        for name in whole.files:
            assert (tmp_path / "universal" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        assert not list(tmp_path.glob(".*"))
        shutil.rmtree(tmp_path / "universal")
        if is_done:
            return
    raise AssertionError("it never came to its end")


def test_another_plan_begins_anew_where_a_draft_has_directories(tmp_path: Path) -> None:
    source = large(tmp_path)
    interrupted_export(source, tmp_path / "universal", 9, to="universal", budget_bytes=BUDGET)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    (draft,) = tmp_path.glob(".*draft")
    os.symlink(tmp_path / "outside", draft / "link")
    rules = fs.Skip("client_state.*")
    report = fs.export(source, tmp_path / "universal", to="universal", rules=rules, budget_bytes=BUDGET)
    assert report.resumed_bytes == 0
    assert not (tmp_path / "universal" / "link").exists()
    assert (tmp_path / "outside" / "kept").exists()
