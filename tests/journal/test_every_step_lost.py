"""Durable steps of a journal that a load cannot reach are reported; the remains of a crash are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flowstone as fs
from flowstone.config import MIB
from flowstone.journal import journals
from flowstone.journal.journals import Journal
from flowstone.store.local import LocalStore
from journaled import Training, run


def spoil(root: Path, journal: Journal, offset: int) -> None:
    """Flip a bit of a journal's file."""
    with (root / journal.directory / "rank-00000.journal").open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def spoil_heads(root: Path, *steps: int, journal: Journal | None = None) -> None:
    """Damage the heads of these steps in a journal, the only one unless it is given; 0: of its opening."""
    store = LocalStore(root)
    journal = journal or journals.list_journals(store)[0]
    places = {place.step: place.offset for place in journals.complete_frames(store, journal, 0)}
    for step in steps:
        spoil(root, journal, places.get(step, 0) + 20)


def loaded(root: Path, caplog: pytest.LogCaptureFixture, **options: object) -> tuple[int, tuple[str, ...]]:
    """The step that a load came to, and its notes, which the log has as well."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flowstone"), fs.Checkpointer(root) as checkpointer:
        report = checkpointer.load(Training().state(), **options)  # type: ignore[arg-type]
    warned = [record.getMessage() for record in caplog.records if "are lost" in record.getMessage()]
    assert len(warned) == len(report.notes)
    assert all("flowstone verify" in warning for warning in warned)
    return report.step, report.notes


def proceed(root: Path, first: int, last: int) -> Training:
    training = Training(seed=9)
    with fs.Checkpointer(root, every_step=True) as checkpointer:
        checkpointer.load(training.state())
        for step in range(first, last + 1):
            training.train_step(step)
            checkpointer.save(step, training.state(step))
    return training


@pytest.mark.parametrize(("damaged", "reached", "message"), [
    (4, 3, "step 5 and later steps"), (5, 4, "step 6 and later steps"), (2, 1, "step 3 and later steps"),
    (0, 1, "the frame at byte 0 is damaged; step 2 and later steps"),
])
def test_a_load_that_ends_before_a_damaged_head_says_that_steps_behind_it_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: int, reached: int, message: str
) -> None:
    run(Training(), tmp_path, 1, 6)
    spoil_heads(tmp_path, damaged)
    step, notes = loaded(tmp_path, caplog)
    assert step == reached
    assert len(notes) == 1
    assert message in notes[0]
    assert loaded(tmp_path, caplog, step=1) == (1, ()), "what was asked for is there"


def test_a_load_says_nothing_of_a_torn_tail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(Training(), tmp_path, 1, 6)
    assert loaded(tmp_path, caplog) == (6, ())
    spoil_heads(tmp_path, 6)
    assert loaded(tmp_path, caplog) == (5, ())
    proceed(tmp_path, 6, 8)  # in a journal of its own
    assert loaded(tmp_path, caplog) == (8, ())


@pytest.mark.parametrize(("damaged", "reached", "is_told"), [
    ((6, 7), 5, False), ((6,), 5, False), ((8,), 7, False), ((5,), 4, True), ((4, 5, 6), 3, True),
])
def test_with_steps_that_may_lag_as_many_torn_frames_are_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: tuple[int, ...], reached: int, is_told: bool
) -> None:
    run(Training(), tmp_path, 1, 8, lag_steps=3)
    spoil_heads(tmp_path, *damaged)
    step, notes = loaded(tmp_path, caplog)
    assert (step, len(notes)) == (reached, int(is_told))


def test_the_end_of_a_journal_from_which_another_goes_on_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(Training(), tmp_path, 1, 5)
    (first,) = journals.list_journals(LocalStore(tmp_path))
    proceed(tmp_path, 6, 9)
    spoil_heads(tmp_path, 5, journal=first)
    step, notes = loaded(tmp_path, caplog)
    assert step == 4
    assert len(notes) == 1
    assert f"continues after step 5, which {first.directory} no longer has; steps 6 to 9" in notes[0]


@pytest.mark.parametrize("spoiled", [(), (5,), (6,), (5, 6)])
def test_steps_that_were_set_aside_are_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoiled: tuple[int, ...]
) -> None:
    run(Training(), tmp_path, 1, 8)
    (first,) = journals.list_journals(LocalStore(tmp_path))
    with fs.Checkpointer(tmp_path) as checkpointer:
        checkpointer.rewind(4)
    spoil_heads(tmp_path, *spoiled, journal=first)
    assert loaded(tmp_path, caplog) == (4, ())


@pytest.mark.parametrize("act", [lambda: None, lambda: fs.StorageError("no", errno=5)], ids=["appended", "unreadable"])
def test_what_is_appended_or_cannot_be_read_while_a_load_looks_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    act: Callable[[], Exception | None],
) -> None:
    """The head of a frame comes last: while it is away, as it is not yet written, what follows is not there either."""
    run(Training(), tmp_path, 1, 6)
    (journal,) = journals.list_journals(LocalStore(tmp_path))
    spoil_heads(tmp_path, 4)
    path, read, upset = f"{journal.directory}/rank-00000.journal", LocalStore.read, act()

    def reading(store: LocalStore, name: str, **options: Any) -> bytes:
        if name == path and options.get("length") == MIB:  # behind the last frame
            if upset is not None:
                raise upset
            places = journals.complete_frames(store, journal, 0)
            if places[-1].step == 3:  # the flipped bit is flipped back
                spoil(tmp_path, journal, places[-1].offset + places[-1].frame.frame_bytes + 20)
        return read(store, name, **options)

    monkeypatch.setattr(LocalStore, "read", reading)
    assert loaded(tmp_path, caplog) == (3, ())
