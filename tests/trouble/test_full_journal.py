"""No space for a step in its journal: the step is reported, training continues, and the next step is saved in full."""

from __future__ import annotations

import errno

import pytest

import flowstone as fs
from faulty_disk import FaultyDisk, Trouble
from journaled import Training, bits, same


@pytest.mark.parametrize("operation", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_step_for_which_there_is_no_space_fails_alone_and_the_next_one_is_whole(
    disk: FaultyDisk, operation: str, code: int
) -> None:
    run, training, events = disk.path / "run", Training(), list[fs.Event]()
    with fs.Checkpointer(run, every_step=True, on_error="continue", on_event=events.append) as checkpointer:
        for step in range(1, 8):
            training.train_step(step)
            if step == 4:
                disk.befall(Trouble(operation, error=code, name=".journal"))
            save = checkpointer.save(step, training.state(step))
            error = save.committed.exception(60)
            if step == 4:
                disk.befall()
                assert isinstance(error, fs.FullError)
                assert ".journal" in error.message
            else:
                assert error is None
    assert [event.step for event in events if isinstance(event, fs.Committed)] == [1, 5]
    assert [event.step for event in events if isinstance(event, fs.Journaled)] == [2, 3, 6, 7]
    assert [event.step for event in events if isinstance(event, fs.NotJournaled)] == [5]
    again = Training(seed=9)
    with fs.Checkpointer(run) as checkpointer:
        report = checkpointer.load(again.state())
    assert report.step == 7
    assert report.replay is not None
    assert (report.replay.base, report.replay.exactness) == (5, "exact")
    assert same(bits(again), bits(training))
