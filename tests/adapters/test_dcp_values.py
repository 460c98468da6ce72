"""Configurations and streams through DCP: typed, as Flowstone itself stores them."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from apart import warnings_heard
from torch.distributed.checkpoint.api import CheckpointException

import flowstone as fs
from flowstone.adapters.dcp import FlowstoneReader, FlowstoneWriter

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


def test_a_class_that_is_not_registered_is_refused_by_name(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Unknown:
        x: int

    with warnings_heard() as heard:
        dcp.save({"c": Unknown(1)}, storage_writer=FlowstoneWriter(tmp_path / "step-00000001"))
    assert ["Unknown, is not registered" in line for line in heard] == [True], "the save says it already"
    with pytest.raises(CheckpointException, match=r"DCP cannot load '.*', an object of .*Unknown") as caught:
        dcp.load({"c": Unknown(0)}, storage_reader=FlowstoneReader(tmp_path / "step-00000001"))
    assert "fs.register_class()" in str(caught.value)
