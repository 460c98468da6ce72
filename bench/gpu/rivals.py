"""Stage "rivals": how long rivals block and until they are durable, with the same state in the same run.

They are torch.save, DCP's async_save with a stager that keeps its pinned memory from save to save (its best setting),
and the background process of torch_checkpointing. Each runs as its documentation says, with everything synced inside
the timer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from time import perf_counter

import torch

import flowstone as fs
from bench.gpu.accelerator import opened
from bench.gpu.loop import Loop, folder
from bench.gpu.options import Options, emit, note, parse
from bench.meter import make_durable

SAVES = 3


def main() -> None:
    options = parse()
    with opened(options) as device:
        loop = Loop(device, options, options.state_bytes // 8)
        ways: dict[str, Callable[[], None]] = {
            "flowstone": lambda: _flowstone(loop, options),
            "torch.save": lambda: _torch_save(loop, options),
            "DCP async, pinned": lambda: _dcp(loop, options),
            "torch_checkpointing": lambda: _manager(loop, options),
        }
        for name, way in ways.items():
            try:
                way()
            except Exception as error:  # a rival that fails is a row, and does not end the session
                emit(f"{name}: failed", f"{type(error).__name__}: {error}"[:300])
            shutil.rmtree(folder(options, "rival"), ignore_errors=True)


def _measure(name: str, loop: Loop, save: Callable[[int], Callable[[], object]]) -> None:
    """`save` returns once the state may change; its result waits until the save is durable."""
    blocked, durable = [], []
    for number in range(1, SAVES + 1):
        loop.step()
        loop.device.synchronize()
        begin = perf_counter()
        wait = save(number)
        blocked.append(perf_counter() - begin)
        wait()
        durable.append(perf_counter() - begin)
    gb = loop.bytes / 1e9
    emit(f"{name}: blocked", 1e3 * median(blocked[1:]), "ms", all=blocked)
    emit(f"{name}: perceived", gb / median(blocked[1:]), "GB/s")
    emit(f"{name}: durable", gb / median(durable[1:]), "GB/s", all=durable)


def _flowstone(loop: Loop, options: Options) -> None:
    """As in a training: `save` returns, and steps follow; the stage before measures the fence."""
    with fs.Checkpointer(folder(options, "rival"), keep=1) as checkpointer:
        _measure("flowstone", loop, lambda number: checkpointer.save(number, loop.state).committed.result)


def _tensors(loop: Loop) -> dict[str, object]:
    return {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}


def _torch_save(loop: Loop, options: Options) -> None:
    def save(number: int) -> Callable[[], object]:
        path = folder(options, "rival") / f"save-{number}"
        path.mkdir(parents=True)
        torch.save(_tensors(loop), path / "state.pt")
        make_durable(path)
        return lambda: None

    _measure("torch.save", loop, save)


def _dcp(loop: Loop, options: Options) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    folder(options, "rival").mkdir(parents=True)
    dist.init_process_group("gloo", init_method=f"file://{folder(options, 'rival')}/meeting", rank=0, world_size=1)
    pinned = not options.simulate  # pinned memory, and staging in the background, need a GPU
    stager = DefaultStager(StagingOptions(pinned, pinned, pinned, pinned))
    names = {str(index): parameter for index, parameter in enumerate(loop.model)}
    numbered = enumerate(loop.optimizer.state.values())
    slots = {f"{index}.{slot}": value for index, of in numbered for slot, value in of.items()}

    def save(number: int) -> Callable[[], object]:
        path = folder(options, "rival") / f"save-{number}"
        writer = dcp.FileSystemWriter(path, thread_count=2)
        response = dcp.async_save({"model": names, "slots": slots}, storage_writer=writer, async_stager=stager)
        if hasattr(response, "staging_completion"):
            response.staging_completion.result()  # until then the state may not change
            response = response.upload_completion

        def wait() -> None:
            response.result()
            make_durable(path)

        return wait

    try:
        _measure("DCP async, pinned", loop, save)
    finally:
        stager.close()
        dist.destroy_process_group()


def _manager(loop: Loop, options: Options) -> None:
    if find_spec("torch_checkpointing") is None:
        note("torch_checkpointing is not installed here")
        emit("torch_checkpointing: skipped", "not installed")
        return
    from bench.rivals.torch_checkpointing_manager import TorchCheckpointing

    folder(options, "rival").mkdir(parents=True)
    rival = TorchCheckpointing(folder(options, "rival"), background=True)
    state = _tensors(loop)
    rival.prepare(state, "save")
    try:
        _measure("torch_checkpointing", loop, lambda number: rival.save(_tensors(loop), number))
    finally:
        rival.close()
