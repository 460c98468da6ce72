"""Stage "performance": saves and loads of 900 tensors beside matrix products: of 20 GB, or what there is room for."""

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
BLOCKED_LIMIT_S = 40.0  # for so many saves; fewer, where each takes longer


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
    """Of a state that fits into the arena: the fence comes at once, so that it is captured as fast as can be."""
    state_bytes = options.state_bytes // 4
    loop, told = Loop(device, options, state_bytes), Told()
    where = folder(options, "captures")
    budget = state_bytes * 3 // 2 + 64 * MIB
    rates = []
    with fs.Checkpointer(where, keep=1, budget_bytes=budget, on_event=told.seen.append) as checkpointer:
        for number in range(1, CAPTURES + 2):
            loop.step()
            device.synchronize()
            save = checkpointer.save(number, loop.state)
            checkpointer.fence()
            save.captured.result()
            save.committed.result()
            rates.append(loop.bytes / 1e9 / told.captured(number).captured_s)
    emit("capture, first", rates[0], "GB/s")
    emit("capture, warm", median(rates[1:]), "GB/s", all=rates[1:])
    shutil.rmtree(where)


def _usual(loop: Loop) -> Usual:
    train(loop, 4)
    without = train(loop, BLOCKED)
    return Usual(without.seconds / without.steps, median(without.others_s))


def _blocked(loop: Loop, saves: int, usual: Usual, *, watch: Watch = "auto", named: str = "") -> None:
    """Into memory, where that has room, so that many saves are durable soon: what `save` blocks, what the fence and the
    optimizer wait.

    Nothing but the optimizer changes the state, so a save that fails is a false alarm.
    """
    told, steps, engine = Told(), saves * 2, fs.EngineOptions(watch=watch)
    memory = loop.options.in_memory(loop.bytes * CHECKPOINTS_MAX)
    with tempfile.TemporaryDirectory(dir=memory) as shm, fs.Checkpointer(
        Path(shm) / "run", keep=1, on_event=told.seen.append, on_error="continue", max_unsaved_steps=None,
        engine=engine,
    ) as checkpointer:
        train(loop, 4, every=2, checkpointer=checkpointer)
        checkpointer.wait()
        alarms = told.failed()
        told.seen.clear()
        found = train(loop, steps, every=2, checkpointer=checkpointer, limit_s=BLOCKED_LIMIT_S * saves / BLOCKED)
        checkpointer.wait()
    blocked = sorted(1e3 * one for one in found.blocked_s)
    emit(f"save, p50{named}", median(blocked), "ms")
    emit(f"save, p95{named}", blocked[round(0.95 * (len(blocked) - 1))], "ms", all=blocked)
    emit(f"saves, false alarms{named}", alarms + told.failed(), "", of=len(blocked))
    emit(f"fence, for each save{named}", 1e3 * told.fences_s() / len(blocked), "ms")
    emit(f"optimizer behind a save, on the device{named}", 1e3 * (median(found.behind_s) - usual.optimizer_s), "ms")
    loss = (found.seconds - told.fences_s()) / found.steps / usual.step_s - 1
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
