"""Configurations and streams through DCP: typed, like those that Flowstone itself stores."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import flowstone as fs
from flowstone.adapters.dcp import FlowstoneReader, FlowstoneStager, FlowstoneWriter
from flowstone.state.classes import CLASSES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@fs.register_class
class Mode(enum.Enum):
    FAST = 1


@fs.register_class
@dataclasses.dataclass
class Config:
    rate: Decimal
    mode: Mode


def state(rate: str = "0.10") -> dict[str, Any]:
    return {
        "w": torch.ones(2), "config": Config(Decimal(rate), Mode.FAST), "args": argparse.Namespace(path=Path("/data")),
        "counts": collections.defaultdict(int, {"a": 1}), "stream": io.BytesIO(b"bytes" + rate.encode()),
        "words": np.array(["a", rate]),
    }


def test_typed_values_come_back_through_dcp(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=FlowstoneWriter(tmp_path / "step-00000001"))
    into = {**state("9"), "args": argparse.Namespace()}
    dcp.load(into, storage_reader=FlowstoneReader(tmp_path / "step-00000001"))
    assert into["config"] == Config(Decimal("0.10"), Mode.FAST)
    assert into["args"] == argparse.Namespace(path=Path("/data"))
    assert into["counts"] == {"a": 1}
    assert into["counts"].default_factory is int
    assert into["stream"].getvalue() == b"bytes0.10"
    assert into["words"].tolist() == ["a", "0.10"]


def test_a_checkpointer_loads_typed_values_that_dcp_has_saved(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=FlowstoneWriter(tmp_path / "step-00000001"))
    into = state("9")
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.load(into)
    assert into["config"] == Config(Decimal("0.10"), Mode.FAST)
    assert into["stream"].getvalue() == b"bytes0.10"


def test_what_no_load_could_make_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    """DCP makes all values anew: a class that nothing shows, and objects that only an existing one is restored into."""
    @dataclasses.dataclass
    class Unknown:
        x: int

    for value, actual in (
        (Unknown(1), "Unknown"), ((torch.nn.Linear(1, 1),), "Linear"), (torch.Generator(), "Generator"),
        ((random.Random(1),), "Random"),
    ):
        with pytest.raises(CheckpointException, match=actual):
            dcp.save({"c": value}, storage_writer=FlowstoneWriter(tmp_path / "step-00000001"))
    assert list(tmp_path.glob("step-*")) == []


def test_a_class_that_is_not_registered_at_the_load_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"c": Config(Decimal(1), Mode.FAST)}, storage_writer=FlowstoneWriter(tmp_path / "step-00000001"))
    monkeypatch.setattr(CLASSES, "_by_name", {})
    with pytest.raises(CheckpointException, match=r"DCP cannot load '.*', an object of .*Config") as caught:
        dcp.load({"c": Config(Decimal(0), Mode.FAST)}, storage_reader=FlowstoneReader(tmp_path / "step-00000001"))
    assert "fs.register_class()" in str(caught.value)


@pytest.mark.parametrize("is_staged", [False, True])
def test_attributes_of_a_state_dict_come_back(tmp_path: Path, is_staged: bool) -> None:
    """As one object, which a tuple is to DCP: of a dict it would look into, DCP itself keeps no attributes."""
    given = {"modules": (torch.nn.BatchNorm1d(2).state_dict(),)}
    writer = FlowstoneWriter(tmp_path / "step-00000001")
    if is_staged:
        dcp.async_save(given, storage_writer=writer, async_stager=FlowstoneStager()).result()
    else:
        dcp.save(given, storage_writer=writer)
    into: dict[str, Any] = {"modules": ()}
    dcp.load(into, storage_reader=FlowstoneReader(tmp_path / "step-00000001"))
    assert into["modules"][0]._metadata == given["modules"][0]._metadata
