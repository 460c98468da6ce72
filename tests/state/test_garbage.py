"""Describing a state leaves the garbage collector's settings, and creates almost nothing for it to collect."""

from __future__ import annotations

import gc
from pathlib import Path
from unittest import mock

import torch

import flowstone as fs
from flowstone.state import describe


def state(tensors: int) -> dict[str, object]:
    return {"model": {f"layers.{index}.weight": torch.ones(8, 2) for index in range(tensors)}}


def test_describing_makes_no_object_for_each_tensor_that_the_collector_would_look_at() -> None:
    many = state(20_000)
    known = describe(many).layout
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    described = describe(many, known=known)
    assert gc.get_stats()[0]["collections"] - before <= 20_000 // gc.get_threshold()[0] // 4
    assert described.layout is known


def test_neither_a_save_nor_a_load_turns_the_collector_off(tmp_path: Path) -> None:
    refused = mock.Mock(side_effect=AssertionError("the collector is the process's"))
    with mock.patch("gc.disable", refused), mock.patch("gc.freeze", refused), fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(100)).committed.result(60)
        checkpointer.load(state(100))
    assert gc.isenabled()
