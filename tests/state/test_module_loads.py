"""A module's own load: it reads, misses and does no less than torch's load_state_dict() with the same entries."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import load, save, stored
from torch import nn
from torch.ao import quantization

import flowstone as fs
from flowstone.errors import DamagedError, MismatchError, StateError
from flowstone.state import prepare


class Scaled(nn.Module):
    """A frozen layer of 8 bits, whose state_dict() shows the scale, which is an attribute."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        self.absmax = weight.abs().amax(1, keepdim=True)
        self.weight = nn.Parameter((weight / self.absmax * 127).round().to(torch.int8), requires_grad=False)

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.absmax


class Reading(Scaled):
    """The same, with a load that reads the scale."""

    def _load_from_state_dict(self, entries: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.absmax = entries.pop(prefix + "weight.absmax")
        super()._load_from_state_dict(entries, prefix, *rest)


class Half(Scaled):
    """A load of its own that does not read it either: only a call shows that."""

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)


def nested(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer))


def test_an_entry_that_no_load_reads_is_unexpected_and_nothing_changes(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"m": nested(Scaled(0))}).committed.result()
    target = nested(Scaled(1))
    before = copy.deepcopy(target.state_dict())
    with fs.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(MismatchError, match=r"unexpected  m\.1\.0\.weight\.absmax") as caught:
            ckpt.load({"m": target})
        assert "the load_state_dict() of 'm' does not read '1.0.weight.absmax'" in str(caught.value)
        assert all(torch.equal(tensor, before[key]) for key, tensor in target.state_dict().items())
        report = ckpt.load({"m": target}, rules=[fs.Skip("*.absmax")])
    assert report.skipped == ("m.1.0.weight.absmax",)
    assert "m.1.0.weight.absmax" not in report.matched


def test_a_save_logs_which_entries_a_load_will_refuse(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="flowstone"):
        save({"logged": Scaled(0)})
        save({"logged": Reading(0)})
    assert [record.getMessage().count("'weight.absmax'") for record in caplog.records] == [1]


def test_an_entry_that_a_load_of_its_own_reads_is_restored() -> None:
    source, target = nested(Reading(0)), nested(Reading(1))
    load(save({"m": source}), {"m": target})
    assert torch.equal(target[1][0].absmax, source[1][0].absmax)  # type: ignore[index]
    assert torch.equal(target[1][0].weight, source[1][0].weight)  # type: ignore[index]


def test_an_entry_that_a_load_of_its_own_leaves_is_an_error_and_the_state_is_not_saved(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"m": Half(0)}).committed.result()
    with fs.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(StateError, match="'m'") as caught:
            ckpt.load({"m": Half(1)})
        assert "does not read 'weight.absmax'" in str(caught.value)
        with pytest.raises(DamagedError, match="did not finish"):
            ckpt.save(2, {"m": Half(1)})
        ckpt.load({"m": Half(1)}, rules=[fs.Skip("m.weight.absmax")])


class OneWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> object:
        return {"scale": 2}


def test_extra_state_that_nothing_sets_is_unexpected() -> None:
    differences = prepare({"m": nested(OneWay())}, stored(save({"m": nested(OneWay())}))).differences
    assert [(difference.kind, difference.name) for difference in differences] == [("unexpected", "m.1.0._extra_state")]


class Hidden(Reading):
    """A buffer that its state_dict() leaves out."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_buffer("mean", torch.zeros(1))

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "mean"]


def test_what_the_load_misses_is_an_error_unless_a_rule_allows_it(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"m": Hidden(0)}).committed.result()
        with pytest.raises(StateError, match="'m'") as caught:
            ckpt.load({"m": Hidden(1)})
        assert "finds nothing for 'mean'" in str(caught.value)
        ckpt.load({"m": Hidden(1)}, rules=[fs.Init("m.mean")])


class Object:
    """No module, but made of one, whose load is lenient."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, object]:
        return self.inner.state_dict()

    def load_state_dict(self, entries: dict[str, object]) -> object:
        return self.inner.load_state_dict(entries, strict=False)


def test_what_an_objects_load_reports_as_not_read_is_an_error() -> None:
    with pytest.raises(StateError, match="'ema'") as caught:
        load(save({"ema": Object(Scaled(0))}), {"ema": Object(Scaled(1))})
    assert "does not read 'weight.absmax'" in str(caught.value)


class Noting(nn.Linear):
    """Its load computes what follows from its weight, which no entry has."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.norm = 0.0

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self.norm = float(self.weight.detach().norm())


class Hooked(Noting):
    """The same by a hook."""

    _load_from_state_dict = nn.Module._load_from_state_dict

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_norm)


def _norm(module: nn.Module, _: object) -> None:
    module.norm = float(module.weight.detach().norm())  # type: ignore[union-attr, operator, assignment]


class Outermost(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.norm = 0.0

    def load_state_dict(self, entries: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(entries)
        _norm(self, None)


@pytest.mark.parametrize("make", [Noting, Hooked, Outermost])
def test_a_load_of_its_own_is_called_for_entries_in_place(make: Any) -> None:
    source, target = make(), make()
    held = target.weight.data_ptr()
    load(save({"m": source}), {"m": target})
    assert target.norm == float(source.weight.detach().norm())
    assert target.weight.data_ptr() == held
    if make is not Outermost:
        inside = nn.Sequential(make())
        load(save({"m": nn.Sequential(source)}), {"m": inside})
        assert inside[0].norm == target.norm


def test_torchs_own_modules_are_not_called() -> None:
    target = nn.Sequential(nn.BatchNorm1d(2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    source = copy.deepcopy(target)
    for inner in target.modules():
        inner.load_state_dict = None  # type: ignore[assignment, method-assign]
    del target.load_state_dict
    load(save({"m": source}), {"m": target})


def qat() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    ).train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
    model = quantization.fuse_modules_qat(model, [["0", "1", "2"]])
    quantization.prepare_qat(model, inplace=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before", [(), (77,)], ids=["fresh", "after a pass"])
def test_quantization_aware_training_resumes_exactly(tmp_path: Path, before: tuple[int, ...]) -> None:
    model, optimizer = qat()
    train(model, optimizer, 0, 1, 2)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(3, {"m": model, "o": optimizer}).committed.result()
    train(model, optimizer, 3, 4)
    again, its_optimizer = qat()
    train(again, its_optimizer, *before)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.load({"m": again, "o": its_optimizer})
    train(again, its_optimizer, 3, 4)
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key


class Growing(nn.Module):
    """A bank that its load resizes, and one that its load makes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("bank", torch.arange(float(rows)))
        self.register_buffer("late", torch.ones(rows) if rows else None)

    def _load_from_state_dict(self, entries: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.bank = torch.empty_like(entries[prefix + "bank"])
        self.late = torch.empty_like(entries[prefix + "late"])
        super()._load_from_state_dict(entries, prefix, *rest)


@pytest.mark.parametrize("wrap", [nn.Sequential, torch.compile], ids=["inside", "compiled"])
def test_tensors_that_a_load_of_its_own_resizes_or_makes_take_the_stored_shape(wrap: Any) -> None:
    target = Growing(0)
    load(save({"m": wrap(Growing(3))}), {"m": wrap(target)})
    assert target.bank.tolist() == [0, 1, 2]  # type: ignore[operator]
    assert target.late.tolist() == [1, 1, 1]  # type: ignore[operator]


def test_without_a_load_of_its_own_another_shape_is_a_difference(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"m": nn.BatchNorm1d(3)}).committed.result()
        with pytest.raises(MismatchError, match="shape"):
            ckpt.load({"m": nn.BatchNorm1d(2)})


def test_a_size_that_its_load_does_not_take_is_an_error_that_names_it(tmp_path: Path) -> None:
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"m": nn.Sequential(Noting())}).committed.result()
        target = nn.Sequential(Noting())
        target[0].bias = nn.Parameter(torch.zeros(5))
        with pytest.raises(StateError, match="'m'") as caught:
            ckpt.load({"m": target})
        assert "size mismatch for 0.bias" in str(caught.value)


class Rounding(nn.Linear):
    """Its state_dict() holds a copy of the weight."""

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach().round()


def test_a_copy_that_the_checkpoint_lacks_by_a_rule_is_not_loaded_from_unset_memory(tmp_path: Path) -> None:
    target = Rounding(2, 2)
    nn.init.constant_(target.weight, 7)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"m": nn.ParameterDict({"bias": torch.ones(2)})}).committed.result()
        report = ckpt.load({"m": target}, rules=[fs.Init("m.weight")])
    assert report.initialised == ("m.weight",)
    assert target.weight.unique().tolist() == [7]
