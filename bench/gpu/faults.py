"""Stage "faults": a failing device, an exit with a queued save, a fork, a full device, a sanitizer.

Each case is a process that has to end by itself; then the session checks what it has left behind.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

import flowstone as fs
from bench.gpu import bounded
from bench.gpu.accelerator import Accelerator, opened
from bench.gpu.loop import Loop
from bench.gpu.options import Options, Row, parse

CASE_LIMIT_S = 40.0
SMALL_BYTES = 12_000_000


def main() -> None:
    """Runs in the process of a case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=tuple(CASES), required=True)
    case, rest = parser.parse_known_args()
    options = parse(rest)
    with opened(options) as device:
        CASES[case.case].run(device, options)


def _store(options: Options) -> Path:
    return options.scratch / "faults"


def _device_fails(device: Accelerator, options: Options) -> None:
    """The save in flight fails by name, or was captured already; the process ends, and does not hang."""
    loop = Loop(device, options, SMALL_BYTES)
    checkpointer = fs.Checkpointer(_store(options), on_error="continue")
    checkpointer.save(1, loop.state).committed.result()
    loop.step()
    device.synchronize()
    device.break_down()
    try:
        error = checkpointer.save(2, loop.state).committed.exception(30)
    except (fs.FlowstoneError, RuntimeError) as raised:  # torch's error for a failed device
        error = raised
    print(f"step 2: {type(error).__name__}: {error}", flush=True)
    assert error is not None, "a device that fails gives no bytes"
    try:
        checkpointer.close()
    except fs.FlowstoneError as caught:
        print(f"close: {type(caught).__name__}", flush=True)
    os._exit(0)  # torch's own exit may raise once more


def _exit_with_a_save_queued(device: Accelerator, options: Options) -> None:
    """The exit of the process waits for the save, although the device still has other work first."""
    loop = Loop(device, options, SMALL_BYTES)
    checkpointer = fs.Checkpointer(_store(options))
    checkpointer.save(1, loop.state).committed.result()
    device.work(2.0)
    checkpointer.save(2, loop.state)


def _fork(device: Accelerator, options: Options) -> None:
    """Children that are forked during saves, like loaders' workers, and end: the saves continue."""
    loop = Loop(device, options, SMALL_BYTES)
    context = multiprocessing.get_context("fork")
    with fs.Checkpointer(_store(options)) as checkpointer:
        for number in (1, 2):
            loop.step()
            save = checkpointer.save(number, loop.state)
            children = [context.Process(target=int) for _ in range(4)]
            for child in children:
                child.start()
            for child in children:
                child.join(20)
                assert child.exitcode == 0, f"a forked child ended with {child.exitcode}"
            save.committed.result(30)


def _full_device(device: Accelerator, options: Options) -> None:
    """A save needs no device memory that it has not allocated before."""
    loop = Loop(device, options, SMALL_BYTES)
    with fs.Checkpointer(_store(options)) as checkpointer:
        checkpointer.save(1, loop.state).committed.result()
        held = device.fill_up()
        checkpointer.save(2, loop.state).committed.result()
        del held


class Case:
    """The process of a case, and the newest step that has to exist afterwards."""

    def __init__(self, run: Callable[[Accelerator, Options], None], newest: int) -> None:
        self.run, self.newest = run, newest


CASES: Mapping[str, Case] = {
    "device fails": Case(_device_fails, 1),
    "exit with a save queued": Case(_exit_with_a_save_queued, 2),
    "fork": Case(_fork, 2),
    "full device": Case(_full_device, 2),
}


def judged(options: Options, log: TextIO, limit_s: float) -> Iterator[Row]:
    """Run every case, and report how it ended. All together end after `limit_s`."""
    end = time.monotonic() + limit_s
    for name in CASES:
        yield {"what": f"fault: {name}", "unit": "", **_judge(name, options, log, end)}
    yield {"what": "fault: memory sanitizer", "unit": "", **_sanitizer(options, log, end)}


def _left(end: float) -> float:
    """Seconds that a case may take."""
    return min(CASE_LIMIT_S, end - time.monotonic())


def _command(name: str, options: Options) -> list[str]:
    return [sys.executable, "-m", "bench.gpu.stage", "faults", "--case", name, *options.words()]


def _judge(name: str, options: Options, log: TextIO, end: float) -> Row:
    limit_s = _left(end)
    if limit_s <= 0:
        return {"value": "not run: the cases before took all the time", "passed": False}
    shutil.rmtree(_store(options), ignore_errors=True)
    done = bounded.run(_command(name, options), limit_s)
    print(f"== {name}\n{done.out}{done.error}", file=log, flush=True)
    if done.status is None:
        return {"value": f"stood still for {limit_s:.0f} s", "passed": False}
    if done.status != 0:
        return {"value": f"ended with {done.status}: {done.error.strip()[-300:]}", "passed": False}
    try:
        newest = fs.open(_store(options))
        newest.verify()
    except fs.FlowstoneError as error:
        return {"value": f"{type(error).__name__}: {error}"[:300], "passed": False}
    passed = newest.step == CASES[name].newest
    return {"value": f"step {newest.step} is there and whole", "passed": passed, "told": done.out.strip()}


def _sanitizer(options: Options, log: TextIO, end: float) -> Row:
    """compute-sanitizer's memcheck over saves of a small state."""
    tool = shutil.which("compute-sanitizer")
    if options.simulate or tool is None:
        return {"value": "skipped: " + ("the simulated device" if options.simulate else "not installed")}
    limit_s = _left(end)
    if limit_s <= 0:
        return {"value": "skipped: the cases before took all the time"}
    shutil.rmtree(_store(options), ignore_errors=True)
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", *_command("full device", options)]
    done = bounded.run(command, limit_s)
    print(f"== sanitizer\n{done.out}{done.error}", file=log, flush=True)
    if done.status is None:
        return {"value": f"skipped: did not end within {limit_s:.0f} s"}
    summary = [line for line in done.out.splitlines() if "ERROR SUMMARY" in line]
    return {"value": " ".join(summary) or f"ended with {done.status}", "passed": done.status == 0}
