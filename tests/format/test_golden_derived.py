"""Golden files of what is made again from other bytes: derived tensors, and a journal. They are read for ever."""

from __future__ import annotations

import struct
from pathlib import Path

import plain_reader
import pytest
import torch
from forge import content
from golden import make_derived, make_device_journal, make_journal, make_lag_journal

import flowstone as fs
from flowstone import _native
from flowstone.commit import journals
from flowstone.format.codec import CAST
from flowstone.store.local import LocalStore

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
        expected, found = make_journal.Training(), make_journal.Training()
        for number in range(1, step + 1):
            expected.learn(number)
        into = found.state()
        with fs.Checkpointer(make_journal.STORE, every_step=True) as checkpointer:
            report = checkpointer.load(into, step=step)
        assert report.step == step
        assert content(into) == content(expected.state(step))
    after = files(make_journal.STORE)
    assert {name: data for name, data in after.items() if not name.endswith("flowstone.lock")} == before


def test_the_golden_journal_of_a_device_is_replayed_on_the_host_with_its_fingerprints() -> None:
    expected, found = make_journal.Training(), make_journal.Training()
    for number in range(1, make_journal.STEPS + 1):
        expected.learn(number)
    into = found.state()
    with fs.Checkpointer(make_device_journal.STORE) as checkpointer:
        report = checkpointer.load(into)
    assert content(into) == content(expected.state(make_journal.STEPS))
    assert report.replay is not None
    assert (report.replay.exactness, report.replay.differs_from) == ("tolerance", None)


def test_the_golden_journal_of_steps_that_may_lag_ends_before_the_frame_that_a_power_loss_has_torn() -> None:
    before, last = files(make_lag_journal.STORE), make_lag_journal.TORN - 1
    expected = make_journal.Training()
    for step in range(1, last + 1):
        expected.learn(step)
        for wanted in (step, None) if step == last else (step,):
            into = make_journal.Training().state()
            with fs.Checkpointer(make_lag_journal.STORE, every_step=True) as checkpointer:
                report = checkpointer.load(into, step=wanted)
            assert report.step == step
            assert content(into) == content(expected.state(step))
            assert report.replay is None or (report.replay.reason, report.replay.differs_from) == ("", None)
    (journal,) = journals.listed(LocalStore(make_lag_journal.STORE))
    assert journal.opening.torn_max == make_lag_journal.LAG_STEPS
    after = files(make_lag_journal.STORE)
    assert {name: data for name, data in after.items() if not name.endswith("flowstone.lock")} == before


@pytest.mark.parametrize(
    ("store", "least", "last"),
    [(make_journal.STORE, 1, 4), (make_device_journal.STORE, 3, 4), (make_lag_journal.STORE, 1, 6)],
)
def test_the_frames_of_the_golden_journals_are_as_the_format_says(store: Path, least: int, last: int) -> None:
    (path,) = store.glob("journal-*/rank-00000.journal")
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        magic, version, kind, number, step, name, length, bytes_, text, head = HEAD.unpack_from(data, at)
        assert (magic, version, f"{name:016x}") == (b"FLOWJRNL", least, path.parent.name[-16:])
        assert head == _native.xxh3_64(data[at : at + 64])
        assert text == _native.xxh3_64(data[at + 72 : at + 72 + length])
        found.append((kind, number, step))
        at += bytes_
    assert found == [(1, 0, 1), *((2, step - 1, step) for step in range(2, last + 1))]
