"""Golden files whose data is computed from other bytes: derived tensors, and a journal. They stay readable."""

from __future__ import annotations

import struct
from pathlib import Path

import plain_reader
import pytest
import torch

import flowstone as fs
from flowstone import _native
from flowstone.format.codec import CAST
from flowstone.journal import journals
from flowstone.store.local import LocalStore
from forge import content
from golden import make_derived, make_device_journal, make_journal, make_lag_journal

HEAD = struct.Struct("<8sIIQQQQQQQ")  # of a frame: see docs/FORMAT.md, Journal


def files(store: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def test_the_golden_derived_checkpoint_loads_bit_for_bit() -> None:
    before, into = files(make_derived.STORE), make_derived.state()
    into["m"] = {name: torch.full_like(tensor, 9) for name, tensor in make_derived.state()["m"].items()}
    with fs.Checkpointer(make_derived.STORE) as checkpointer:
        checkpointer.load(into)
    assert content(into) == content(make_derived.state())
    assert files(make_derived.STORE) == before
    checkpoint = fs.open(make_derived.STORE)
    assert checkpoint.manifest.critical == ("delta", "copies", "codec.cast")
    assert (checkpoint.index.chunks.codecs() == CAST.id).sum() == 2
    assert checkpoint.verify().sound


def test_the_plain_reader_reads_the_golden_derived_checkpoint() -> None:
    tensors, _, _ = plain_reader.read(make_derived.STORE / "step-00000001")
    for name, tensor in make_derived.state()["m"].items():
        assert tensors[f"m.{name}"].tobytes() == tensor.view(torch.uint8).numpy().tobytes(), name


def test_the_golden_journal_is_replayed() -> None:
    before = files(make_journal.STORE)
    for step in range(1, make_journal.STEPS + 1):
        expected, training = make_journal.Training(), make_journal.Training()
        for number in range(1, step + 1):
            expected.train_step(number)
        into = training.state()
        with fs.Checkpointer(make_journal.STORE, every_step=True) as checkpointer:
            report = checkpointer.load(into, step=step)
        assert report.step == step
        assert content(into) == content(expected.state(step))
    after = files(make_journal.STORE)
    assert {name: data for name, data in after.items() if not name.endswith("flowstone.lock")} == before


def test_the_golden_journal_of_a_device_is_replayed_on_the_host_with_its_fingerprints() -> None:
    expected, training = make_journal.Training(), make_journal.Training()
    for number in range(1, make_journal.STEPS + 1):
        expected.train_step(number)
    into = training.state()
    with fs.Checkpointer(make_device_journal.STORE) as checkpointer:
        report = checkpointer.load(into)
    assert content(into) == content(expected.state(make_journal.STEPS))
    assert report.replay is not None
    assert (report.replay.exactness, report.replay.differs_from) == ("tolerance", None)


def test_the_golden_journal_of_steps_that_may_lag_ends_before_the_frame_that_a_power_loss_has_torn() -> None:
    before, last = files(make_lag_journal.STORE), make_lag_journal.TORN - 1
    expected = make_journal.Training()
    for step in range(1, last + 1):
        expected.train_step(step)
        for whole in (step, None) if step == last else (step,):
            into = make_journal.Training().state()
            with fs.Checkpointer(make_lag_journal.STORE, every_step=True) as checkpointer:
                report = checkpointer.load(into, step=whole)
            assert report.step == step
            assert content(into) == content(expected.state(step))
            assert report.replay is None or (report.replay.reason, report.replay.differs_from) == ("", None)
    (journal,) = journals.list_journals(LocalStore(make_lag_journal.STORE))
    assert journal.header.torn_max == make_lag_journal.LAG_STEPS
    after = files(make_lag_journal.STORE)
    assert {name: data for name, data in after.items() if not name.endswith("flowstone.lock")} == before


@pytest.mark.parametrize(
    ("store", "least", "last"),
    [(make_journal.STORE, 1, 4), (make_device_journal.STORE, 3, 4), (make_lag_journal.STORE, 1, 6)],
)
def test_the_frames_of_the_golden_journals_are_as_the_format_says(store: Path, least: int, last: int) -> None:
    (path,) = store.glob("journal-*/rank-00000.journal")
    data, position, collected = path.read_bytes(), 0, []
    while position < len(data):
        magic, version, kind, number, step, name, length, bytes_, text, head = HEAD.unpack_from(data, position)
        assert (magic, version, f"{name:016x}") == (b"FLOWJRNL", least, path.parent.name[-16:])
        assert head == _native.xxh3_64(data[position : position + 64])
        assert text == _native.xxh3_64(data[position + 72 : position + 72 + length])
        collected.append((kind, number, step))
        position += bytes_
    assert collected == [(1, 0, 1), *((2, step - 1, step) for step in range(2, last + 1))]
