"""One measurement in a process of its own: `python -m bench.worker TASK.json OUTCOME.json`.

It runs in any environment with torch and msgspec: it imports only modules of the bench that need no more. Each rank of
a job is such a process, and the ranks connect before the first timer.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist

from bench.meter import Meter, cool, files_below, resident_bytes, warm
from bench.records import LoadSample, Outcome, SaveSample, Task
from bench.rivals import open_rival
from bench.rivals.base import Rival
from bench.state import State, build, choose_layout, is_exact, spoil

READY = "ready"  # a gated worker prints this before every timer, and starts after a line on its input
COLLECTIVE_MAX_S = 60.0
SETTLE_S = 1.0  # before every timer: the device discards deleted blocks and rate limits refill meanwhile


class CacheError(Exception):
    """The measurement is not possible: the page cache is too small."""


def perform(task: Task) -> Outcome:
    """Build the state, or this rank's part of it, then save or load it with a Meter."""
    if task.ranks > 1:
        meet(task)
    layout = choose_layout(task.shape, task.state_bytes)
    rival = open_rival(task.rival, Path(task.directory))
    # For a load the state has the layout of the save, as in a job that resumes; its values do not matter.
    empty = task.what == "load"
    part, parts = task.part
    state = layout.empty(task.phase, parts) if empty else build(layout, task.phase, part, parts)
    own_bytes = layout.state_bytes // task.ranks
    if task.what == "save":
        samples = save_repeatedly(rival, state, task)
        outcome = Outcome(own_bytes, saves=samples, note=rival.note(task.times))
    else:
        outcome = Outcome(own_bytes, loads=load_repeatedly(rival, state, task))
    rival.close()
    return outcome


def meet(task: Task) -> None:
    """All ranks of the job, over gloo."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a job on one machine, whatever its name leads to
    store = dist.TCPStore("127.0.0.1", task.port, None, False)
    timeout = timedelta(seconds=COLLECTIVE_MAX_S)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.ranks, timeout=timeout)


def save_repeatedly(rival: Rival, state: State, task: Task) -> tuple[SaveSample, ...]:
    samples = []
    gc.collect()
    before_bytes = resident_bytes()
    rival.prepare(state, "save")
    for number in range(1, task.times + 1):
        settle(task.settle_s)
        pass_gate(task)
        meter = Meter()
        wait_durable = rival.save(state, number)
        blocked_s = meter.seconds()
        wait_durable()
        reading = meter.read()
        files = files_below(rival.place(number)) if task.rank == 0 else []
        samples.append(
            SaveSample(
                number=number, blocked_s=blocked_s, durable_s=reading.seconds, cpu_s=reading.cpu_s,
                extra_peak_bytes=reading.peak_bytes - before_bytes, files=len(files),
                file_bytes=sum(path.stat().st_size for path in files),
            )
        )
    return tuple(samples)


def load_repeatedly(rival: Rival, state: State, task: Task) -> tuple[LoadSample, ...]:
    """Load into overwritten tensors, each time from files of which no page, or every one, is in the page cache."""
    samples = []
    spoil(state)
    gc.collect()
    before_bytes = resident_bytes()
    rival.prepare(state, "load")
    for number in range(1, task.times + 1):
        if number > 1:
            spoil(state)
        settle(task.settle_s)
        cold = fill_or_drop(rival.place(task.number), task)
        pass_gate(task)
        meter = Meter()
        rival.load(state, task.number, task.how)
        reading = meter.read()
        samples.append(
            LoadSample(
                number=number, how=task.how, load_s=reading.seconds, cpu_s=reading.cpu_s,
                extra_peak_bytes=reading.peak_bytes - before_bytes, cold=cold, exact=is_exact(state, task.part[0]),
                device_bytes=reading.device_bytes,
            )
        )
    return tuple(samples)


def fill_or_drop(directory: Path, task: Task) -> bool | None:
    """The files' pages, in the page cache; whether none is there, as LoadSample has it."""
    if not task.cached:
        return cool(files_below(directory))
    is_cached = warm(files_below(directory))
    if is_cached is False:
        raise CacheError("the page cache does not hold all of the files, which were just read")
    return None if is_cached is None else False


def settle(settle_s: float) -> None:
    """Wait until earlier data is written and the device has rested."""
    os.sync()
    time.sleep(settle_s)


def pass_gate(task: Task) -> None:
    if task.gated:
        print(READY, flush=True)
        sys.stdin.readline()


def main(task_path: str, outcome_path: str) -> None:
    task = msgspec.json.decode(Path(task_path).read_bytes(), type=Task)
    Path(outcome_path).write_bytes(msgspec.json.encode(perform(task)))
    if task.ranks > 1:
        os._exit(0)  # gloo in torch 2.13 aborts one process in eight while the interpreter ends


if __name__ == "__main__":
    main(*sys.argv[1:])
