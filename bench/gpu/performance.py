"""Stage "performance": saves and loads of 900 tensors beside matrix products: 20 GB, or as much as fits."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

import flowstone as fs
from bench.gpu.accelerator import MIB, Accelerator, opened
from bench.gpu.loop import Loop, Told, folder, train
from bench.gpu.options import CHECKPOINTS_MAX, Options, emit, parse
from bench.meter import Meter, cool, files_below
from flowstone.config import Watch

CAPTURES, DURABLE, BLOCKED = 3, 3, 20
BLOCKED_LIMIT_S = 40.0  # for all saves; fewer are made if each takes longer


@dataclass(frozen=True, slots=True)
class Usual:
    """Seconds of a step without saves, by the clock, and of the optimizer in it, on the device."""

    step_s: float
    optimizer_s: float


def main() -> None:
    options = parse()
    with opened(options) as device:
        _capture(device, options)
        loop = Loop(device, options)
        emit("state", loop.bytes / 1e9, "GB", tensors=options.tensors)
        usual_s = _usual(loop)
        _blocked(loop, BLOCKED, usual_s)
        _blocked(loop, BLOCKED // 2, usual_s, watch="digests", named=", with digests")
        _durable_and_load(loop, options)


def _capture(device: Accelerator, options: Options) -> None:
    """Saves of a state that fits into the arena: the fence follows at once, so the capture runs at full speed."""
    state_bytes = options.state_bytes // 4
    loop, events = Loop(device, options, state_bytes), Told()
    where = folder(options, "captures")
    budget = state_bytes * 3 // 2 + 64 * MIB
    rates = []
    with fs.Checkpointer(where, keep=1, budget_bytes=budget, on_event=events.seen.append) as checkpointer:
        for number in range(1, CAPTURES + 2):
            loop.step()
            device.synchronize()
            save = checkpointer.save(number, loop.state)
            checkpointer.fence()
            save.captured.result()
            save.committed.result()
            rates.append(loop.bytes / 1e9 / events.captured(number).captured_s)
    emit("capture, first", rates[0], "GB/s")
    emit("capture, warm", median(rates[1:]), "GB/s", all=rates[1:])
    shutil.rmtree(where)


def _usual(loop: Loop) -> Usual:
    train(loop, 4)
    without = train(loop, BLOCKED)
    return Usual(without.seconds / without.steps, median(without.others_s))


def _blocked(loop: Loop, saves: int, usual: Usual, *, watch: Watch = "auto", named: str = "") -> None:
    """What `save` blocks, and the waits of the fence and the optimizer.

    Into memory, if it is large enough, so that many saves are durable soon. Only the optimizer changes the state, so
    a save that fails is a false alarm.
    """
    events, steps, engine = Told(), saves * 2, fs.EngineOptions(watch=watch)
    memory = loop.options.in_memory(loop.bytes * CHECKPOINTS_MAX)
    with tempfile.TemporaryDirectory(dir=memory) as shm, fs.Checkpointer(
        Path(shm) / "run", keep=1, on_event=events.seen.append, on_error="continue", max_unsaved_steps=None,
        engine=engine,
    ) as checkpointer:
        train(loop, 4, every=2, checkpointer=checkpointer)
        checkpointer.wait()
        alarms = events.failed()
        events.seen.clear()
        trained = train(loop, steps, every=2, checkpointer=checkpointer, limit_s=BLOCKED_LIMIT_S * saves / BLOCKED)
        checkpointer.wait()
    blocked = sorted(1e3 * seconds for seconds in trained.blocked_s)
    emit(f"save, p50{named}", median(blocked), "ms")
    emit(f"save, p95{named}", blocked[round(0.95 * (len(blocked) - 1))], "ms", all=blocked)
    emit(f"saves, false alarms{named}", alarms + events.failed(), "", of=len(blocked))
    emit(f"fence, for each save{named}", 1e3 * events.fences_s() / len(blocked), "ms")
    emit(f"optimizer behind a save, on the device{named}", 1e3 * (median(trained.behind_s) - usual.optimizer_s), "ms")
    loss = (trained.seconds - events.fences_s()) / trained.steps / usual.step_s - 1
    emit(f"step time lost outside of the fence{named}", 100 * loss, "%", usual_s=usual.step_s)


def _durable_and_load(loop: Loop, options: Options) -> None:
    where = folder(options, "durable")
    with fs.Checkpointer(where, keep=1) as checkpointer:
        rates, cpu = [], []
        for number in range(1, DURABLE + 1):
            loop.step()
            loop.device.synchronize()
            watch = Meter()
            checkpointer.save(1000 + number, loop.state).committed.result()
            reading = watch.read()
            rates.append(loop.bytes / 1e9 / reading.seconds)
            cpu.append(reading.cpu_s / (loop.bytes / 1e9))
    emit("durable, first of the process", rates[0], "GB/s")
    emit("durable, later", median(rates[1:]), "GB/s", all=rates[1:])
    emit("processor seconds of a save", median(cpu[1:]), "s/GB")
    expected = [tensor.detach().clone() for tensor in list(loop.model)[:3]]
    with torch.no_grad():
        for parameter in loop.model:
            parameter.fill_(-1)
    cool(files_below(where))
    loop.device.synchronize()
    begin = perf_counter()
    with fs.Checkpointer(where) as checkpointer:
        checkpointer.load({"model": loop.model, "optimizer": loop.optimizer, "step": 0})
    loop.device.synchronize()
    emit("load, cold", loop.bytes / 1e9 / (perf_counter() - begin), "GB/s")
    same = all(torch.equal(a, b) for a, b in zip(loop.model, expected, strict=False))
    emit("what was loaded is what was saved", same)
    shutil.rmtree(where)
