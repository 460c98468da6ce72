"""State dicts in all forms of torch: whichever form was saved, every form loads, bit for bit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import flowstone as fs

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
State = dict[str, Any]
Form = Callable[[torch.nn.Module, torch.optim.Optimizer], State]

FORMS: dict[str, Form] = {
    "objects": lambda model, optimizer: {"model": model, "optimizer": optimizer},
    "torch": lambda model, optimizer: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    "named": lambda model, optimizer: {
        "model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)
    },
    "flat": lambda model, optimizer: {
        "model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)
    },
    "nested": lambda model, optimizer: {
        "app": {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    },
}


def trained(seed: int, steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    plain = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1 + seed}, {"params": plain, "weight_decay": 0.0, "lr": 0.3 + seed}]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def equal(left: object, other: object) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(other, torch.Tensor) and left.dtype == other.dtype and torch.equal(left, other)
    if isinstance(left, dict):
        return isinstance(other, dict) and left.keys() == other.keys() and all(equal(left[k], other[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(other) and len(left) == len(other) and all(map(equal, left, other))
    return type(left) is type(other) and left == other


def contents(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save(path: Path, form: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with fs.Checkpointer(path) as ckpt:
        verb = ckpt.save if form == "objects" else ckpt.save_state_dict
        verb(1, FORMS[form](model, optimizer))


@pytest.mark.parametrize("loaded", ["objects", "torch", "named", "flat"])
@pytest.mark.parametrize("saved", ["objects", "torch", "named", "flat"])
def test_every_form_loads_what_any_form_has_saved(tmp_path: Path, saved: str, loaded: str) -> None:
    source = trained(0)
    save(tmp_path, saved, *source)
    model, optimizer = trained(1)
    with fs.Checkpointer(tmp_path) as ckpt:
        if loaded == "objects":
            ckpt.load({"model": model, "optimizer": optimizer})
            assert equal(contents(model, optimizer), contents(*source))
            return
        state = copy.deepcopy(FORMS[loaded](model, optimizer))
        kept = state["model"]["0.weight"]
        report = ckpt.load_state_dict(state)
    assert equal(state, FORMS[loaded](*source))
    assert state["model"]["0.weight"] is kept, "tensors are written in place"
    assert report.step == 1


def test_names_are_those_that_the_objects_have(tmp_path: Path) -> None:
    source = trained(0)
    for form in ("objects", "named", "flat"):
        save(tmp_path / form, form, *source)
    names = {form: sorted(fs.open(tmp_path / form).tensors) for form in ("objects", "named", "flat")}
    assert names["objects"] == names["named"] == names["flat"]
    assert "optimizer.state.model.0.weight.exp_avg" in names["flat"]


def test_dicts_inside_of_dicts_are_found(tmp_path: Path) -> None:
    source, other = trained(0), trained(1)
    save(tmp_path, "nested", *source)
    assert "app.optimizer.state.app.model.0.weight.exp_avg" in fs.open(tmp_path).tensors
    state = copy.deepcopy(FORMS["nested"](*other))
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.load_state_dict(state)
    assert equal(state, FORMS["nested"](*source))


def test_slots_that_a_fresh_optimizer_has_not_yet_are_made_in_the_dict(tmp_path: Path) -> None:
    source = trained(0)
    save(tmp_path, "objects", *source)
    model, optimizer = trained(1, steps=0)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert not state["optimizer"]["state"]
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.load_state_dict(state)
    optimizer.load_state_dict(state["optimizer"])
    assert equal(contents(model, optimizer), contents(*source))


def test_all_of_it_may_change_once_save_state_dict_has_returned(tmp_path: Path) -> None:
    model = torch.nn.Linear(512, 512)  # large enough that `save` would capture it later
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(contents(model, optimizer))
    with fs.Checkpointer(tmp_path) as ckpt:
        save = ckpt.save_state_dict(1, FORMS["named"](model, optimizer))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.fill_(7.0)
                optimizer.state[parameter]["exp_avg"].data.zero_()
        save.committed.result()
    fresh = trained_like(model)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.load({"model": fresh[0], "optimizer": fresh[1]})
    assert equal(contents(*fresh), before)


def trained_like(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    fresh = copy.deepcopy(model)
    return fresh, torch.optim.AdamW(fresh.parameters())


def test_plain_values_and_extra_state_are_replaced_in_the_dicts(tmp_path: Path) -> None:
    def state(seed: int) -> State:
        return {
            "model": {"a.weight": torch.full((2,), float(seed)), "a._extra_state": {"seen": seed}},
            "loader": {"epoch": seed, "rng": torch.full((3,), seed)}, "step": seed, "note": f"n{seed}",
        }

    mine = state(1)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save_state_dict(1, state(5))
        ckpt.wait()
        ckpt.load_state_dict(mine)
    assert equal(mine, state(5))


def test_tied_tensors_stay_one(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save_state_dict(1, {"model": {"wte.weight": tensor, "head.weight": tensor}})
    checkpoint = fs.open(tmp_path)
    assert [entry.alias_of for entry in checkpoint.tensors.values()].count(None) == 1
    read = checkpoint.state_dict("model")
    assert read["wte.weight"] is read["head.weight"]


def test_a_load_that_fails_changes_no_dict(tmp_path: Path) -> None:
    source = trained(0)
    save(tmp_path, "named", *source)
    state = copy.deepcopy(FORMS["flat"](*trained(1)))
    state["model"]["another.weight"] = torch.zeros(3)
    before = copy.deepcopy(state)
    with fs.Checkpointer(tmp_path) as ckpt, pytest.raises(fs.MismatchError, match=r"another\.weight"):
        ckpt.load_state_dict(state)
    assert equal(state, before)


def test_what_is_no_dict_of_sections_is_refused(tmp_path: Path) -> None:
    model, _ = trained(0)
    with fs.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(fs.ArgumentError, match="state dict"):
            ckpt.save_state_dict(1, model)  # type: ignore[arg-type]
        with pytest.raises(fs.ArgumentError, match="wrong order"):
            ckpt.save_state_dict({"model": model.state_dict()}, 1)  # type: ignore[arg-type]
        assert ckpt.latest() is None


def test_sections_read_as_what_their_objects_state_dict_returned(tmp_path: Path) -> None:
    source, fresh = trained(0), trained(1)
    save(tmp_path, "objects", *source)
    checkpoint = fs.open(tmp_path)
    fresh[0].load_state_dict(checkpoint.state_dict("model"))
    fresh[1].load_state_dict(checkpoint.state_dict("optimizer"))
    assert equal(contents(*fresh), contents(*source))
    again = trained(2)
    set_optimizer_state_dict(again[0], again[1], checkpoint.state_dict("optimizer", by_name=True))
    assert equal(again[1].state_dict(), source[1].state_dict())
    assert equal(checkpoint.state_dict(), {
        "model": checkpoint.state_dict("model"), "optimizer": checkpoint.state_dict("optimizer")
    })


def test_a_section_of_anything_else_reads_as_it_was_saved(tmp_path: Path) -> None:
    tree = {
        "list": [torch.ones(2), 1, None], "bytes": b"x" * 100_000, "dtype": torch.bfloat16, "tuple": (1, {2: "b"}),
        "counts": Counter("abba"),
        "module": torch.nn.Linear(2, 2),
    }
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"tree": tree, "a": torch.zeros(1), "a.b": torch.ones(1), "rng": fs.rng()})
    checkpoint = fs.open(tmp_path)
    read = checkpoint.state_dict("tree")
    assert equal(dict(read.pop("module")), dict(tree.pop("module").state_dict()))  # type: ignore[attr-defined]
    assert equal(read, tree)
    assert torch.equal(checkpoint.state_dict("a"), torch.zeros(1))  # type: ignore[arg-type]
    assert "rng" not in checkpoint.state_dict()
    assert torch.equal(checkpoint.state_dict("rng", rank=0)["torch"], checkpoint.state_dict(rank=0)["rng"]["torch"])
    for wrong in (None, 1, -1):
        with pytest.raises(fs.ArgumentError, match="each of 1 ranks"):
            checkpoint.state_dict("rng", rank=wrong)
    with pytest.raises(fs.NoTensorError, match="'modle'"):
        checkpoint.state_dict("modle")
    assert isinstance(fs.NoTensorError("x"), KeyError)


def test_damage_is_found_as_a_section_is_read(tmp_path: Path) -> None:
    save(tmp_path, "objects", *trained(0))
    segment = next(tmp_path.glob("step-*/rank-*"))
    data = bytearray(segment.read_bytes())
    index = data.index(trained(0)[0].state_dict()["0.weight"].numpy().tobytes())
    data[index] ^= 1
    segment.write_bytes(data)
    with pytest.raises(fs.DamagedError):
        fs.open(tmp_path).state_dict("model")


def test_a_tensor_is_read_by_what_it_is_indexed_with(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": {"w": weight, "scalar": torch.tensor(3)}})
    checkpoint = fs.open(tmp_path)
    assert list(checkpoint) == list(checkpoint.keys()) == ["model.w", "model.scalar"]
    assert "model.w" in checkpoint
    assert "w" not in checkpoint
    stored = checkpoint["model.w"]
    assert (stored.shape, stored.dtype, stored.ndim, len(stored)) == ((3, 4), "float32", 2, 3)
    assert torch.equal(stored[0:2], weight[0:2])
    assert torch.equal(stored[1, 2:], weight[1, 2:])
    assert torch.equal(stored[...], weight)
    assert (stored.numpy(slice(1, 3)) == weight[1:].numpy()).all()
    assert checkpoint["model.scalar"][...] == 3
    with pytest.raises(TypeError, match="cannot iterate over"):
        list(stored)
    with pytest.raises(KeyError, match=r"model\.w"):
        checkpoint["other.w"]
    with pytest.raises(fs.NoTensorError):
        checkpoint[0]  # type: ignore[index]


def test_a_checkpoint_shows_what_is_in_it(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(7, {"model": {f"<b{n}>": torch.zeros(n) for n in range(30)}})
    checkpoint = fs.open(tmp_path)
    assert "step 7" in repr(checkpoint)
    assert "30 tensors" in repr(checkpoint)
    table = checkpoint._repr_html_()
    assert table.index("&lt;b29&gt;") < table.index("&lt;b28&gt;")
    assert "<b" not in table.replace("<b>", "")
    assert "10 smaller" in table
    assert bool(checkpoint), "as `if checkpoint` is how one asks whether there is one"
    (tmp_path / "step-00000007" / "index.safetensors").write_bytes(b"")
    assert "index" in fs.open(tmp_path)._repr_html_()
