"""Checkpoints of DeepSpeed, merged without it: bit for bit, and no code in them is executed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_layout import SLOTS, Job, edit, fragment_address, job, optimizer_file, save
from models import assert_same, raw, read_all
from safetensors.torch import save_file
from test_torch_files import Malicious

import flowstone as fs

BUDGET = 32 << 20


def expected(made: Job) -> dict[str, torch.Tensor]:
    """All tensors that an import of the job has, by name."""
    # ZeRO 3 leaves no weights of its own to the model.
    weights = {name: tensor if made.stage == 3 else tensor.to(made.dtype) for name, tensor in made.master.items()}
    weights |= made.frozen
    weights |= {name: weights[owner] for name, owner in made.shared.items()} | made.buffers
    result = {f"model.{name}": weight for name, weight in weights.items()}
    result |= {f"master.{name}": tensor for name, tensor in made.master.items()}
    for name, slots in made.slots.items():
        result |= {f"optimizer.state.model.{name}.{slot}": value for slot, value in slots.items()}
        result[f"optimizer.state.model.{name}.step"] = torch.tensor(3.0)
    return result | {"client_state.seen": made.client["seen"]}


def check(made: Job, source: Path, store: Path) -> None:
    report = fs.import_checkpoint(source, store, budget_bytes=BUDGET)
    assert (report.kind, report.skipped) == ("deepspeed", ())
    assert_same(read_all(store, ""), expected(made))
    objects = fs.open(store).objects
    assert objects["client_state"]["epoch"] == 3
    assert objects["lr_scheduler"] == {"last_batch": 2}
    assert objects["deepspeed"]["global_steps"] == 3
    assert objects["deepspeed"]["zero_stage"] == made.stage
    assert objects["deepspeed"]["optimizer"]["loss_scaler"] == {"cur_scale": 1.0, "dynamic": False}
    diff = fs.diff(source, store, budget_bytes=BUDGET)
    assert diff.equal, diff
    assert len(diff.tensors) == len(expected(made))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_partitions_of_all_ranks_become_whole_tensors(tmp_path: Path, stage: int, ranks: int) -> None:
    made = job(stage=stage, ranks=ranks)
    check(made, made.write(tmp_path / "ds"), tmp_path / "run")


@pytest.mark.parametrize("options", [
    {"with_mappings": False}, {"elastic": True}, {"prefix": ""}, {"prefix": "fp16_", "dtype": torch.float16},
    {"dtype": torch.float32}, {"with_mappings": False, "ranks": 5, "stage": 1}, {"is_reordered": True},
    {"is_reordered": True, "stage": 1},
], ids=str)
def test_what_other_versions_and_settings_write_comes_in(tmp_path: Path, options: dict[str, Any]) -> None:
    made = job(**options)
    check(made, made.write(tmp_path / "ds"), tmp_path / "run")


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoints_come_in(tmp_path: Path, stage: int) -> None:
    made = job(stage=stage, ranks=3)
    check(made, made.write_universal(tmp_path / "ds"), tmp_path / "run")
    assert fs.diff(tmp_path / "ds", made.write(tmp_path / "zero"), budget_bytes=BUDGET).equal


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_and_shared_parameters_come_in(tmp_path: Path, stage: int) -> None:
    made = job(
        stage=stage, ranks=3, frozen={"ice": torch.randn(5, 7).bfloat16()}, shared={"head.weight": "b.weight"},
    )
    check(made, made.write(tmp_path / "ds"), tmp_path / "run")


def test_a_directory_with_a_tag_is_a_checkpoint_too(tmp_path: Path) -> None:
    made = job()
    made.write(tmp_path / "ds", "global_step1")
    made.client["epoch"] = 4
    made.write(tmp_path / "ds", "global_step2")
    fs.import_checkpoint(tmp_path / "ds", tmp_path / "newest")
    fs.import_checkpoint(tmp_path / "ds" / "global_step1", tmp_path / "older")
    assert fs.open(tmp_path / "newest").objects["client_state"]["epoch"] == 4
    assert fs.open(tmp_path / "older").objects["client_state"]["epoch"] == 3


def test_training_goes_on_without_deepspeed(tmp_path: Path) -> None:
    """The parameters of a module and AdamW's state, saved in parts by three ranks, load into torch's own objects."""
    model = torch.nn.Sequential(torch.nn.Linear(9, 11), torch.nn.Linear(11, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 9)).sum().backward()
    optimizer.step()
    master = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    slots = {name: {slot: optimizer.state[param][slot] for slot in SLOTS} for name, param in model.named_parameters()}
    made = Job([list(master)], master, slots, dtype=torch.float32, ranks=3, prefix="")
    fs.import_checkpoint(made.write(tmp_path / "ds"), tmp_path / "run", step=3)
    other = torch.nn.Sequential(torch.nn.Linear(9, 11), torch.nn.Linear(11, 3))
    resumed = torch.optim.AdamW(other.parameters())
    with fs.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.load({"model": other, "optimizer": resumed})
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert resumed.param_groups[0]["lr"] == 0.5
    for parameter, two in zip(model.parameters(), other.parameters(), strict=True):
        assert raw(optimizer.state[parameter]["exp_avg_sq"]) == raw(resumed.state[two]["exp_avg_sq"])
        assert resumed.state[two]["step"] == 3


def test_the_master_weights_go_out_as_a_model(tmp_path: Path) -> None:
    made = job(stage=3)
    fs.import_checkpoint(made.write(tmp_path / "ds"), tmp_path / "run")
    fs.export(tmp_path / "run", tmp_path / "model.pt", to="torch", section="master")
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), made.master)


@pytest.mark.parametrize(("harm", "message"), [
    ("missing rank", "lacks optimizer states"), ("missing last", "optimizer states of 2 ranks"),
    ("torn", "truncated"), ("mixed versions", r"different versions[\s\S]*0\.5\.0"), ("other stage", "ZeRO stages"),
    ("other prefix", "mixes files of different jobs"), ("shape", r"elements of 'b\.weight' from 0 on, but"),
    ("address", "elements of 'b.weight' from 9 on, but"), ("short slot", "ends after"),
    ("no slot", "lacks the optimizer tensor 'exp_avg'"),
    ("groups", "is not the number"), ("latest", "names"), ("latest outside", "names"), ("no module", "has no `module`"),
    ("no shapes", "no param_shapes"), ("not a file", "ends early|truncated|no file"), ("group member", "refers to"),
    ("no optimizer", r"no optimizer states[\s\S]*a\.|no optimizer states[\s\S]*b\."),
    ("no model of rank 0", "model states of rank 0"), ("two names", "param_shapes cannot be read"),
    ("two tensors", "no `module`, a dict of tensors"), ("two addresses", "an unexpected form"),
])
def test_what_contradicts_itself_is_refused(tmp_path: Path, harm: str, message: str) -> None:
    root = job(ranks=3, **({"stage": 3} if harm == "no optimizer" else {})).write(tmp_path / "ds")
    model, last = root / "global_step3" / "mp_rank_00_model_states.pt", optimizer_file(root, 2)

    def state(change: Any, rank: int = 1) -> None:
        edit(optimizer_file(root, rank), lambda value: change(value["optimizer_state_dict"]))

    match harm:
        case "missing rank":
            optimizer_file(root, 1).unlink()
        case "missing last":
            last.unlink()
        case "torn":
            os.truncate(last, last.stat().st_size - 1000)
        case "mixed versions":
            edit(last, lambda value: value.update(ds_version="0.5.0"))
        case "other stage":
            state(lambda value: value.update(zero_stage=1))
        case "other prefix":
            shutil.copy(last, root / "global_step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt")
        case "shape":
            edit(model, lambda value: value["param_shapes"][0].update({"b.weight": torch.Size((501, 1000))}))
        case "address":
            state(lambda value: value["param_slice_mappings"][0].update(
                {"b.weight": fragment_address(value["param_slice_mappings"][0]["b.weight"].numel, 9)}))
        case "short slot":
            state(lambda value: value["base_optimizer_state"]["state"][0].update(exp_avg=torch.zeros(5)))
        case "no slot":
            state(lambda value: value["base_optimizer_state"]["state"][0].pop("exp_avg"))
        case "groups":
            state(lambda value: value["single_partition_of_fp32_groups"].pop())
        case "latest" | "latest outside":
            (root / "latest").write_text("global_step9" if harm == "latest" else "../ds")
        case "no optimizer":
            for file in (root / "global_step3").glob("*_optim_states.pt"):
                file.unlink()
        case "no model of rank 0":
            model.rename(model.with_name("zero_pp_rank_1_mp_rank_00_model_states.pt"))
        case "two names":
            edit(model, lambda value: value["param_shapes"][0].update({"1": torch.Size((4,)), 1: torch.Size((4,))}))
        case "two tensors":
            edit(model, lambda value: value["module"].update({"1": 5, 1: 6}))
        case "two addresses":
            two = dict.fromkeys(["1", 1], fragment_address(3, 0))
            state(lambda value: value["param_slice_mappings"][0].update(two))
        case "no module":
            edit(model, lambda value: value.pop("module"))
        case "no shapes":
            edit(model, lambda value: value.update(param_shapes=None))
        case "not a file":
            last.write_bytes(b"PK\x03\x04" + bytes(3000))
        case "group member":
            state(lambda value: value["base_optimizer_state"]["param_groups"][0].update(params=[7]), rank=0)
    with pytest.raises(fs.FormatError, match=message):
        fs.import_checkpoint(root, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("harm", "message"), [
    ("parameter", r"lacks 1 parameters[\s\S]*a\.bias"), ("master", r"no fp32\.pt"),
    ("shape", "does not have the parameter's shape"),
    ("optimizer", "optimizer_state"), ("group member", "refers to parameters that do not exist"),
])
def test_a_universal_checkpoint_that_is_not_whole_is_refused(tmp_path: Path, harm: str, message: str) -> None:
    made = job(stage=1)
    root = made.write_universal(tmp_path / "ds")
    zero = root / "global_step3_universal" / "zero"
    match harm:
        case "parameter":
            shutil.rmtree(zero / "a.bias")
        case "master":
            (zero / "a.bias" / "fp32.pt").unlink()
        case "shape":
            save({"param": torch.zeros(5)}, zero / "a.bias" / "exp_avg.pt")
        case "optimizer":
            (zero / "optimizer_state.pt").unlink()
        case "group member":
            edit(zero / "optimizer_state.pt", lambda value: _groups_of(value)[0].update(params=[99]))
    with pytest.raises(fs.FormatError, match=message):
        fs.import_checkpoint(root, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _groups_of(value: Any) -> Any:
    """The param_groups, however deep they lie."""
    if isinstance(value, dict):
        if "param_groups" in value:
            return value["param_groups"]
        return next((groups for item in value.values() if (groups := _groups_of(item)) is not None), None)
    return None


def test_a_folder_of_a_trainer_whose_deepspeed_part_is_gone_is_its_safetensors(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "latest").write_text("global_step500")
    fs.import_checkpoint(tmp_path, tmp_path / "run")
    assert fs.open(tmp_path / "run").read("model.w").tolist() == [1, 1, 1]


def test_megatrons_name_for_the_latest_iteration_does_not_hide_deepspeeds(tmp_path: Path) -> None:
    made = job()
    root = made.write(tmp_path / "ds")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    check(made, root, tmp_path / "run")


@pytest.mark.parametrize("where", ["model", "optimizer", "client", "slot"])
def test_a_payload_never_runs_and_is_named(tmp_path: Path, where: str) -> None:
    root, payload = job().write(tmp_path / "ds"), Malicious(tmp_path / "touched")
    model = root / "global_step3" / "mp_rank_00_model_states.pt"
    match where:
        case "model":
            save(payload, model)
        case "client":
            edit(model, lambda value: value.update(args=payload))
        case "optimizer":
            edit(optimizer_file(root, 0), lambda value: value["optimizer_state_dict"].update(loss_scaler=payload))
        case "slot":
            change: Any = lambda value: value["optimizer_state_dict"]["base_optimizer_state"].update(state=payload)  # noqa: E731
            edit(optimizer_file(root, 0), change)
    with pytest.raises(fs.FormatError):
        fs.import_checkpoint(root, tmp_path / "run")
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "run").exists()
    if where == "client":
        report = fs.import_checkpoint(root, tmp_path / "run", rules=fs.Skip("client_state.args"))
        assert report.skipped == ("client_state.args",)
        assert not (tmp_path / "touched").exists()


def test_what_files_alone_cannot_put_together_is_refused_with_what_to_do(tmp_path: Path) -> None:
    root = job().write(tmp_path / "ds")
    tag = root / "global_step3"
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_01_model_states.pt")
    with pytest.raises(fs.UnsupportedFormatError, match=r"tensor or pipeline parallelism[\s\S]*ds_to_universal"):
        fs.import_checkpoint(root, tmp_path / "run")
    (tag / "mp_rank_01_model_states.pt").rename(tag / "layer_00-model_states.pt")
    with pytest.raises(fs.UnsupportedFormatError, match=r"layers or experts[\s\S]*ds_to_universal"):
        fs.import_checkpoint(root, tmp_path / "run")
    (tag / "layer_00-model_states.pt").rename(tag / "extra.pt")
    with pytest.raises(fs.UnsupportedFormatError, match=r"extra\.pt \(a file of an unknown kind\)"):
        fs.import_checkpoint(root, tmp_path / "run")
    assert fs.import_checkpoint(root, tmp_path / "run", rules=fs.Skip("extra.pt")).skipped == ("extra.pt",)


def test_tensors_longer_than_a_window_come_in(tmp_path: Path) -> None:
    made = job(stage=3, ranks=2)
    made.master["b.weight"] = torch.randn(9001, 1003)
    made.slots["b.weight"] = {slot: torch.randn(9001, 1003) for slot in SLOTS}
    assert made.master["b.weight"].nbytes > BUDGET
    check(made, made.write(tmp_path / "ds"), tmp_path / "run")
