"""One measurement in a process of its own: `python -m bench.worker TASK.json OUTCOME.json`."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import msgspec

from bench.meter import Meter, cool, files_below, resident_bytes
from bench.records import LoadSample, Outcome, SaveSample, Task
from bench.rivals import open_rival
from bench.rivals.base import Rival
from bench.state import State, build, choose_layout, is_exact, spoil


def perform(task: Task) -> Outcome:
    """Build the state, then save or load it under the meter."""
    layout = choose_layout(task.state_bytes)
    rival = open_rival(task.rival, Path(task.directory))
    state = build(layout)
    rival.prepare()
    if task.what == "save":
        outcome = Outcome(layout.state_bytes, saves=save_repeatedly(rival, state, task))
    else:
        outcome = Outcome(layout.state_bytes, loads=(load_once(rival, state, task),))
    rival.close()
    return outcome


def save_repeatedly(rival: Rival, state: State, task: Task) -> tuple[SaveSample, ...]:
    samples = []
    gc.collect()
    before_bytes = resident_bytes()
    for number in range(1, task.saves + 1):
        settle(task.settle_s)
        meter = Meter()
        wait_durable = rival.save(state, number)
        blocked_s = meter.seconds()
        wait_durable()
        reading = meter.read()
        files = files_below(rival.place(number))
        samples.append(
            SaveSample(
                number=number, blocked_s=blocked_s, durable_s=reading.seconds, cpu_s=reading.cpu_s,
                extra_peak_bytes=reading.peak_bytes - before_bytes, files=len(files),
                file_bytes=sum(path.stat().st_size for path in files),
            )
        )
    return tuple(samples)


def load_once(rival: Rival, state: State, task: Task) -> LoadSample:
    """The state was built as for the save, so memory is laid out as in a job that resumes; then it is spoiled."""
    spoil(state)
    gc.collect()
    settle(task.settle_s)
    before_bytes = resident_bytes()
    cold = cool(files_below(rival.place(task.saves)))
    meter = Meter()
    rival.load(state, task.saves, task.how)
    reading = meter.read()
    return LoadSample(
        how=task.how, load_s=reading.seconds, cpu_s=reading.cpu_s,
        extra_peak_bytes=reading.peak_bytes - before_bytes, cold=cold, exact=is_exact(state),
    )


def settle(settle_s: float) -> None:
    """Nothing of what came before is left to write, and the device has rested."""
    os.sync()
    time.sleep(settle_s)


def main(task_path: str, outcome_path: str) -> None:
    task = msgspec.json.decode(Path(task_path).read_bytes(), type=Task)
    Path(outcome_path).write_bytes(msgspec.json.encode(perform(task)))


if __name__ == "__main__":
    main(*sys.argv[1:])
