"""bench/every_step.py: a store whose syncs are slow."""

from __future__ import annotations

from pathlib import Path

import flowstone as fs
from bench.every_step import SlowSyncs
from flowstone.store.local import LocalStore
from journaled import Training, bits, same


def test_each_sync_of_a_journal_takes_longer_and_the_journal_is_what_it_was(tmp_path: Path) -> None:
    slept, training, again = list[float](), Training(), Training(seed=9)
    with fs.Checkpointer(SlowSyncs(LocalStore(tmp_path), 0.5, slept.append), every_step=True) as checkpointer:
        for step in range(1, 6):
            training.train_step(step)
            checkpointer.save(step, training.state(step))
    assert slept == [0.5] * 5, "of the opening, and of each of four steps"
    expected = bits(training)
    with fs.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(again.state()).step == 5
    assert same(bits(again), expected)
