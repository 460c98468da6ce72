"""OmegaConf's and tensordict's containers in a state: real packages, saved, loaded and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flowstone as fs

pytest.importorskip("omegaconf", reason="`make test-integrations` installs it")
pytest.importorskip("tensordict", reason="`make test-integrations` installs it")
pytest.importorskip("attrs", reason="`make test-integrations` installs it")

import attrs
from omegaconf import OmegaConf
from tensordict import TensorDict


def reloaded(folder: Path, saved: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    with fs.Checkpointer(folder) as ckpt:
        ckpt.save(1, saved).committed.result()
        ckpt.load(target)
    return target


@pytest.mark.parametrize("there", [None, {"z": 3}], ids=["nothing there", "another there"])
def test_a_configuration_of_omegaconf_keeps_interpolations_and_flags(tmp_path: Path, there: object) -> None:
    config = OmegaConf.create({"a": {"b": 1, "c": "${a.b}"}, "l": [1, {"x": None}]})
    OmegaConf.set_readonly(config, True)
    target = {"config": there and OmegaConf.create(there), "s": {"l": None}, "w": torch.zeros(1)}
    result = reloaded(tmp_path, {"config": config, "s": {"l": config.l}, "w": torch.ones(1)}, target)
    assert type(result["config"]) is type(config)
    assert OmegaConf.to_container(result["config"]) == OmegaConf.to_container(config)
    assert result["config"].a.c == 1
    assert OmegaConf.is_readonly(result["config"])
    assert result["s"]["l"] == [1, {"x": None}]


def test_a_class_of_attrs_comes_back(tmp_path: Path) -> None:
    @attrs.define
    class Mutable:
        x: int

    @attrs.frozen
    class Frozen:
        x: int

    kept = Mutable(0)
    saved = {"s": {"m": Mutable(1), "f": Frozen(2)}, "w": torch.ones(1)}
    result = reloaded(tmp_path, saved, {"s": {"m": kept, "f": Frozen(0)}, "w": torch.zeros(1)})
    assert result["s"]["m"] is kept
    assert result["s"] == {"m": Mutable(1), "f": Frozen(2)}


def test_a_nested_tensordict_is_loaded_as_torch_loads_it(tmp_path: Path) -> None:
    def made(factor: int) -> TensorDict:
        inner = {"c": torch.arange(4.0) * factor, "d": {"e": torch.ones(4, 2) * factor}}
        return TensorDict({"a": torch.arange(4) * factor, "n": inner}, batch_size=[4])

    result = reloaded(tmp_path, {"first": torch.ones(3), "td": made(2)}, {"first": torch.zeros(3), "td": made(0)})
    assert (result["td"] == made(2)).all()
    assert result["first"].tolist() == [1, 1, 1]
