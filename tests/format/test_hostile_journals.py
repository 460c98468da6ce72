"""Journals with any content: a load ends with one of our errors, or with the state of some step."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_codecs import Training

import flowstone as fs
from flowstone.store.local import LocalStore
from journal_forgery import Forge, forge

LAST = 5


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, bytes]]:
    """A store with a journal, and what each step was."""
    root, training, by_step = tmp_path_factory.mktemp("run"), Training(), {}
    with fs.Checkpointer(root, every_step=True) as checkpointer:
        for step in range(1, LAST + 1):
            training.train_step(step)
            checkpointer.save(step, training.state())
            by_step[step] = training.bits()
    return root, by_step


@pytest.fixture
def copied(store: tuple[Path, dict[int, bytes]], tmp_path: Path) -> tuple[Path, Path, dict[int, bytes]]:
    shutil.copytree(store[0], tmp_path / "run")
    (path,) = (tmp_path / "run").glob("journal-*/rank-00000.journal")
    return tmp_path / "run", path, store[1]


def outcome(root: Path) -> tuple[fs.LoadReport | None, Training]:
    """The report of a load; None if it ended with an error of ours. Any other error is a failure."""
    training = Training()
    try:
        with fs.Checkpointer(LocalStore(root)) as checkpointer:
            return checkpointer.load(training.state()), training
    except fs.FlowstoneError:
        return None, training


def test_no_flipped_or_lost_byte_is_believed(copied: tuple[Path, Path, dict[int, bytes]]) -> None:
    root, path, position = copied
    content, chance = path.read_bytes(), random.Random(7)
    reports = set()
    for turn in range(120):
        mutated = bytearray(content)
        if turn % 4 == 3:
            del mutated[chance.randrange(len(mutated)) :]
        else:
            begin = chance.choice([chance.randrange(len(mutated)), chance.randrange(0, len(mutated), 4096)])
            for place in range(begin, min(len(mutated), begin + chance.choice([1, 8, 600]))):
                mutated[place] = chance.randrange(256)
        path.write_bytes(mutated)
        report, training = outcome(root)
        reports.add(report is not None)
        if report is not None:
            assert training.bits() == position[report.step]
            assert training.progress["step"] == report.step
    assert reports == {True, False}, "some mutations tear the tail, some damage the middle"


FORGERIES: dict[str, tuple[int, Forge]] = {
    "claims many ranks": (0, lambda row: row.update(ranks=1 << 50)),
    "claims many threads": (0, lambda row: row.update(threads=1 << 50)),
    "is its own parent": (0, lambda row: row.update(checkpoint=None, parent=row["id"])),
    "has other optimizers": (0, lambda row: row.update(optimizers=[])),
    "proves nothing there": (0, lambda row: row.update(proven=["nothing"])),
    "claims a huge tensor": (2, lambda row: row["tensors"][0].update(shape=[1 << 60], bytes=1 << 62)),
    "claims no rows of many": (2, lambda row: row["tensors"][0].update(shape=[0, 1 << 62], bytes=0)),
    "lies behind the end": (2, lambda row: row["tensors"][0].update(offset=1 << 40)),
    "lies before the begin": (2, lambda row: row["tensors"][0].update(offset=-4096)),
    "has a misaligned tensor": (2, lambda row: row["tensors"][0].update(offset=row["tensors"][0]["offset"] + 1)),
    "has strides with gaps": (2, lambda row: row["tensors"][0].update(stride=[1 << 40, 1])),
    "has another dtype": (2, lambda row: row["tensors"][0].update(dtype="int32")),
    "has an unknown dtype": (2, lambda row: row["tensors"][0].update(dtype="float7")),
    "steps an optimizer that is not there": (2, lambda row: row["acts"][0].update(optimizer=7)),
    "has a gradient of no parameter": (2, lambda row: row["acts"][0].update(gradients=[[99, 0]])),
    "has a gradient of no tensor": (2, lambda row: row["acts"][0].update(gradients=[[0, 99]])),
    "sets what is no option": (1, lambda row: row["acts"][0].update(options=[{"step": 3}])),
    "sets a text": (1, lambda row: row["acts"][0]["options"][0].update(lr="fast")),
    "sets too many groups": (1, lambda row: row["acts"][0].update(options=[{}, {}])),
    "has no generator's state": (2, lambda row: row["acts"][0].update(generator=0)),
    "has another fingerprint": (2, lambda row: row.update(fingerprint="0" * 16)),
    "has objects that are tensors": (4, lambda row: row.update(replicated={"progress": 0})),
    "has values that do not fit": (4, lambda row: row.update(values={"model.weight": 1})),
    "has fields of other types": (2, lambda row: row.update(acts={})),
}


class Halves:
    """Gradients are exchanged in half the precision: for a journal of compressed gradients."""

    kind, exact = "halves.1", True

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters, self._buckets = list(model.parameters()), list[fs.CompressedBucket]()

    def exchange(self) -> None:
        flat = torch.cat([param.grad.view(-1) for param in self._parameters if param.grad is not None]).half()
        offsets, self._buckets = [0, self._parameters[0].numel()], []
        for parameter, begin in zip(self._parameters, offsets, strict=True):
            parameter.grad = flat[begin : begin + parameter.numel()].float().view_as(parameter)
        self._buckets = [fs.CompressedBucket(self._parameters, offsets, len(flat), {"half": flat})]

    def compressed(self) -> Sequence[fs.CompressedBucket]:
        return self._buckets

    def decompress(self, tensors: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        return tensors["half"].float()

    def replayed(self, bucket: fs.CompressedBucket) -> None: ...

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Mapping[str, object], /) -> None: ...


def bucket_of(row: dict[str, Any]) -> dict[str, Any]:
    (result,) = row["acts"][0]["compressed"]
    assert isinstance(result, dict)
    return result


BUCKETS: dict[str, Forge] = {
    "is of no source": lambda row: bucket_of(row).update(source=3),
    "is longer than its tensors": lambda row: bucket_of(row).update(length=bucket_of(row)["length"] - 1),
    "is longer than all parameters": lambda row: bucket_of(row).update(length=1 << 60),
    "is of no parameter": lambda row: bucket_of(row).update(parameters=[[9, 0]]),
    "has no parameter": lambda row: bucket_of(row).update(parameters=[]),
    "has a gradient behind its end": lambda row: bucket_of(row).update(parameters=[[0, 0], [1, 1 << 40]]),
    "has a negative offset": lambda row: bucket_of(row).update(parameters=[[0, 0], [1, -4]]),
    "has a tensor that is not there": lambda row: bucket_of(row).update(tensors={"half": 77}),
    "lacks its tensor": lambda row: bucket_of(row).update(tensors={}),
    "has another scale": lambda row: bucket_of(row).update(scale=0.5),
}


@pytest.mark.parametrize("change", BUCKETS.values(), ids=BUCKETS.keys())
def test_a_forged_bucket_ends_with_an_error(tmp_path: Path, change: Forge) -> None:
    training = Training()
    halves = Halves(training.model)
    with fs.Checkpointer(tmp_path, every_step=True) as checkpointer:
        for step in range(1, 4):
            training.optimizer.zero_grad()
            training.model(torch.randn(2, 160)).square().mean().backward()
            halves.exchange()
            training.optimizer.step()
            checkpointer.save(step, {**training.state(), "gradients": halves})
    (path,) = tmp_path.glob("journal-*/rank-00000.journal")
    forge(path, 1, change)
    again = Training()
    with pytest.raises(fs.FlowstoneError), fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load({**again.state(), "gradients": Halves(again.model)})


@pytest.mark.parametrize(("number", "change"), FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_journal_ends_with_an_error_or_short_of_the_forgery(
    copied: tuple[Path, Path, dict[int, bytes]], number: int, change: Forge
) -> None:
    root, path, position = copied
    forge(path, number, change)
    report, training = outcome(root)
    if report is None:
        return
    harmless = change is FORGERIES["claims many threads"][1]  # steps with as many threads as there may be
    assert report.step == (LAST if harmless else 1) or report.step < number + 1
    if report.step == 1 or harmless:
        assert training.bits() == position[report.step]
