"""Journals of compressed gradients with any content: one of our errors, and no memory beyond the declared size."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_ddp_gradients
import torch
import torch.distributed as dist
from test_ddp_gradients import Training, loaded, run

import flowstone as fs
from flowstone.adapters.ddp import Int8Gradients, TopKGradients
from flowstone.config import MIB
from flowstone.journal import journals
from flowstone.journal.journal_format import StepRow, decode_document
from flowstone.store.local import LocalStore
from journal_forgery import forge, forge_tensor
from memory_taken import return_freed_memory, tried
from own_process import run_in_own_process

LAST = 3
FORGED = 1  # the frame: of step 2


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def saved(root: Path, make: type[Any]) -> tuple[Path, StepRow]:
    """A journal, and the document of the frame that is to be forged."""
    run(Training(make), root, LAST)
    (path,) = root.glob("journal-*/rank-00000.journal")
    store = LocalStore(root)
    (journal,) = journals.list_journals(store)
    place = journals.complete_frames(store, journal, 0)[FORGED - 1]
    head = path.read_bytes()[place.offset : place.offset + place.frame.payload_offset]
    row = decode_document(head, place.frame, StepRow, path="")
    assert row is not None
    return path, row


def refused(root: Path, make: type[Any]) -> None:
    """A load ends with the error of a journal that does not fit, and takes little more than what is imported for it."""
    outcome, taken = run_in_own_process(_load_alone, root, make, test_ddp_gradients.WIDTH)
    assert outcome == "DamagedError"
    assert taken < 128 * MIB


def _load_alone(root: Path, make: type[Any], width: int) -> tuple[str, int]:
    """What came of a load, and the memory that it took."""
    return_freed_memory()
    test_ddp_gradients.WIDTH = width
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = Training(make, seed=1)
    return tried(lambda: loaded(root, training))


@pytest.mark.parametrize("index", [-1, -(1 << 31), 1 << 20, (1 << 31) - 1])
def test_an_element_that_is_in_no_bucket_is_refused(tmp_path: Path, index: int) -> None:
    path, row = saved(tmp_path, TopKGradients)
    sent = row.acts[0].compressed[0].tensors["sent"]
    forge_tensor(path, FORGED, sent, lambda data: struct.pack("<i", index) + data[4:])
    refused(tmp_path, TopKGradients)


@pytest.mark.parametrize("rows", [[0, -1], [2, -1], [-1]])
def test_what_ranks_sent_in_another_shape_is_refused(tmp_path: Path, rows: list[int]) -> None:
    path, row = saved(tmp_path, TopKGradients)
    sent = row.acts[0].compressed[0].tensors["sent"]
    size = row.tensors[sent].bytes

    def change(record: dict[str, Any]) -> None:
        shape = [side if side >= 0 else size // max(1, rows[0] if len(rows) > 1 else 1) for side in rows]
        record["tensors"][sent].update(shape=shape)

    forge(path, FORGED, change)
    with pytest.raises(fs.FlowstoneError):
        loaded(tmp_path, Training(TopKGradients, seed=1))


BEGINS = {
    "far before": lambda length: [-(1 << 60), 0], "negative": lambda length: [-3, 0],
    "behind": lambda length: [length + 1] * 2, "backwards": lambda length: [length, 0],
    "not all of it": lambda length: [1, length],
}


@pytest.mark.parametrize("numbers", BEGINS.values(), ids=BEGINS.keys())
def test_gradients_that_begin_elsewhere_are_refused(tmp_path: Path, numbers: Callable[[int], list[int]]) -> None:
    path, row = saved(tmp_path, Int8Gradients)
    bucket = row.acts[0].compressed[0]
    forge_tensor(path, FORGED, bucket.tensors["begins"], lambda _: struct.pack("<2q", *numbers(bucket.length)))
    refused(tmp_path, Int8Gradients)


def test_many_blocks_of_few_bytes_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 256 times the file's bytes, here 0.3 GB: one byte was the value of every element of one gradient."""
    monkeypatch.setattr(test_ddp_gradients, "WIDTH", 1024)
    path, row = saved(tmp_path, Int8Gradients)
    bucket = row.acts[0].compressed[0]
    sent, begins = bucket.tensors["sent"], bucket.tensors["begins"]
    size = row.tensors[sent].bytes // 4 * 4 - 3

    def change(record: dict[str, Any]) -> None:
        record["tensors"][sent].update(shape=[1, size], bytes=size)
        record["tensors"][begins].update(shape=[1], bytes=8)

    forge(path, FORGED, change)
    forge_tensor(path, FORGED, sent, bytes)
    begin = bucket.length - 256 * (size // 4)
    forge_tensor(path, FORGED, begins, lambda _: struct.pack("<q", begin))
    refused(tmp_path, Int8Gradients)


def test_buckets_that_are_all_as_long_as_all_gradients_are_refused(tmp_path: Path) -> None:
    path, row = saved(tmp_path, TopKGradients)
    buckets = row.acts[0].compressed
    total = sum(bucket.length for bucket in buckets)

    def change(record: dict[str, Any]) -> None:
        act = record["acts"][0]
        act["compressed"] = [{**item, "length": total} for item in act["compressed"] * 2]

    forge(path, FORGED, change)
    refused(tmp_path, TopKGradients)


def test_what_is_not_forged_loads(tmp_path: Path) -> None:
    """With the means of these tests, which change nothing else."""
    for make in (TopKGradients, Int8Gradients):
        path, row = saved(tmp_path / make.__name__, make)
        forge(path, FORGED, lambda _: None)
        forge_tensor(path, FORGED, row.acts[0].compressed[0].tensors["sent"], bytes)
        training = Training(make, seed=1)
        report = loaded(tmp_path / make.__name__, training)
        assert report.step == LAST
        assert report.replay is not None
        assert report.replay.exactness == "exact"
    assert msgspec.structs.asdict(row)["acts"]
    assert torch.isfinite(next(training.model.parameters())).all()
