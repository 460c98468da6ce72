"""No space for a step in its journal: that step is told, training goes on, and the next one is saved whole."""

from __future__ import annotations

import errno

import pytest
from faulty_disk import FaultyDisk, Trouble
from journaled import Training, bits, same

import flowstone as fs


@pytest.mark.parametrize("operation", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_step_for_which_there_is_no_space_fails_alone_and_the_next_one_is_whole(
    disk: FaultyDisk, operation: str, code: int
) -> None:
    run, training, events = disk.path / "run", Training(), list[fs.Event]()
    with fs.Checkpointer(run, every_step=True, on_error="continue", on_event=events.append) as checkpointer:
        for step in range(1, 8):
            training.learn(step)
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
    assert [one.step for one in events if isinstance(one, fs.Committed)] == [1, 5]
    assert [one.step for one in events if isinstance(one, fs.Journaled)] == [2, 3, 6, 7]
    assert [one.step for one in events if isinstance(one, fs.NotJournaled)] == [5]
    again = Training(seed=9)
    with fs.Checkpointer(run) as checkpointer:
        report = checkpointer.load(again.state())
    assert report.step == 7
    assert report.replay is not None
    assert (report.replay.base, report.replay.exactness) == (5, "exact")
    assert same(bits(again), bits(training))
