"""Stage "kinds": states with a separate code path: replicas, working copies with their masters, strided memory.

Stores are in memory, if it is large enough, so that many saves are durable soon. Replicas have two ranks, both on the
one device.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

import flowstone as fs
from bench.gpu.accelerator import MIB, Accelerator, opened
from bench.gpu.loop import Told
from bench.gpu.options import CHECKPOINTS_MAX, Options, emit, parse
from flowstone.config import Compress, Watch

RANKS, SAVES = 2, 5  # the first save of each Checkpointer is not counted
RANKS_LIMIT_S, SAVE_LIMIT_S = 25.0, 20.0
COPIES = 6  # a working copy's master takes twice its bytes, and each of two moments too
State = dict[str, torch.Tensor]


def main() -> None:
    options = parse()
    _ranks(options)  # first, because they are forked from a process that has no device yet
    with opened(options) as device:
        _derived(device, options)
        _strided(device, options)


class Saves:
    """The cost of saves of a state; the last checkpoint stays for a load.

    blocked_ms    in `save`
    device_s      of the work of `save` in the current stream, and its waits
    captured_s    until everything was captured
    copied_bytes  from the device, in the last save
    """

    def __init__(self, device: Accelerator, saver: fs.Checkpointer, events: Told, state: Mapping[str, object]) -> None:
        self.blocked_ms: list[float] = []
        self.device_s: list[float] = []
        self.captured_s: list[float] = []
        for number in range(1, SAVES + 1):
            device.synchronize()
            before, begin = device.mark(), perf_counter()
            save = saver.save(number, state, fence="manual")
            blocked, after = perf_counter() - begin, device.mark()
            saver.fence()
            self.last = save.committed.result(SAVE_LIMIT_S)
            if number > 1:
                self.blocked_ms.append(1e3 * blocked)
                self.device_s.append(after() - before())
                self.captured_s.append(events.captured(number).captured_s)
        assert self.last.manifest.io is not None
        self.copied_bytes = self.last.manifest.io.copied_bytes


@contextmanager
def _opened(
    options: Options, *, watch: Watch = "auto", compress: Compress = "off", folder: Path | None = None
) -> Iterator[tuple[fs.Checkpointer, Told]]:
    """`folder`: of the store of several ranks, which one of them removes."""
    events, engine = Told(), fs.EngineOptions(watch=watch, compress=compress)
    budget = options.kind_bytes * 2 + 64 * MIB  # so that a fence does not wait for a disk
    with tempfile.TemporaryDirectory(dir=_memory(options)) as shm, fs.Checkpointer(
        folder or Path(shm) / "run", keep=1, budget_bytes=budget, on_event=events.seen.append, on_error="continue",
        max_unsaved_steps=None, engine=engine,
    ) as saver:
        yield saver, events


def _memory(options: Options) -> Path:
    return options.in_memory(options.kind_bytes * CHECKPOINTS_MAX)


def _size(state: State) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in state.values())


def _is_stored(stored: fs.Checkpoint, state: State) -> bool:
    return stored.verify().sound and all(torch.equal(stored.read(name), tensor.cpu()) for name, tensor in state.items())


def _derived(device: Accelerator, options: Options) -> None:
    """Working copies in bfloat16: copied and compared on the host, or recognised by the device's digests."""
    elements = options.kind_bytes // (14 * COPIES)
    torch.manual_seed(1)
    masters = {f"master.{index}": device.tensor(torch.randn(elements)) for index in range(COPIES)}
    slots = {f"slot.{index}": device.tensor(torch.randn(elements)) for index in range(2 * COPIES)}
    working = {f"model.{index}": device.tensor(torch.empty(elements, dtype=torch.bfloat16)) for index in range(COPIES)}
    for copy, master in zip(working.values(), masters.values(), strict=True):
        copy.copy_(master)
    state = masters | slots | working
    ways: Mapping[str, tuple[Watch, Compress]] = {
        "all stored": ("digests", "off"), "compared on the host": ("auto", "derived"),
        "told by digests": ("digests", "derived"),
    }
    for name, (watch, compress) in ways.items():
        with _opened(options, watch=watch, compress=compress) as (saver, events):
            saves = Saves(device, saver, events, state)
            emit(f"working copies, {name}: captured", median(saves.captured_s), "s", all=saves.captured_s)
            emit(f"working copies, {name}: save, p50", median(saves.blocked_ms), "ms", all=saves.blocked_ms)
            emit(f"working copies, {name}: copied, of the state", 100 * saves.copied_bytes / _size(state), "%")
            emit(f"working copies, {name}: the same bits", _is_stored(saves.last, state))
            emit(f"saves, false alarms, working copies, {name}", events.failed(), "", of=SAVES)
    emit("what follows is not copied", saves.copied_bytes < _size(masters | slots) * 1.01 + MIB)


def _strided(device: Accelerator, options: Options) -> None:
    """Beside matrix products, compared with captures of the same bytes in row-major order."""
    count = options.kind_bytes // 3 // 4
    images = torch.randn(count // (9 * 64), 64, 3, 3).to(memory_format=torch.channels_last)
    side = int(count**0.5)
    strided: State = {
        "channels last": device.strided(images), "turned": device.tensor(torch.randn(side, side)).t(),
        "every other column": device.tensor(torch.randn(side, side))[:, ::2],
    }
    dense = {name: device.tensor(torch.zeros(tensor.shape)) for name, tensor in strided.items()}
    for name, state in (("row-major", dense), ("strided", strided)):
        for watch in ("auto", "digests"):
            with _opened(options, watch=watch) as (saver, events):  # type: ignore[arg-type]
                saves, title = Saves(device, saver, events, state), f"{name}, {watch}"
                rates = [_size(state) / 1e9 / seconds for seconds in saves.captured_s]
                emit(f"{title}: captured", median(rates), "GB/s", all=rates)
                emit(f"{title}: save, p50", median(saves.blocked_ms), "ms", all=saves.blocked_ms)
                emit(f"{title}: save, on the device", 1e3 * median(saves.device_s), "ms", all=saves.device_s)
                emit(f"{title}: the same bits", _is_stored(saves.last, state))
                longer = _longer(device, saver, state, options.step_s)
                emit(f"{title}: matrix products beside a capture, longer by", 100 * median(longer), "%", all=longer)
                emit(f"saves, false alarms, {title}", events.failed(), "", of=SAVES + len(longer))


def _longer(device: Accelerator, saver: fs.Checkpointer, state: State, seconds: float) -> list[float]:
    """By what share products take longer that follow `save` in the stream, without a fence."""
    usual, shares = [], []
    for number in range(6):
        device.synchronize()
        save = saver.save(SAVES + number, state, fence="manual") if number % 2 else None
        begin = device.mark()
        device.work(seconds)
        took = -begin() + device.mark()()
        if save is None:
            usual.append(took)
        else:
            shares.append(took / min(usual) - 1)
            save.committed.result(SAVE_LIMIT_S)
    return shares


def _ranks(options: Options) -> None:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir=_memory(options)) as shm:
        ranks = [context.Process(target=_rank, args=(rank, Path(shm), options)) for rank in range(RANKS)]
        end = perf_counter() + RANKS_LIMIT_S
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(max(0.0, end - perf_counter()))
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.join()
    emit("replicas: both ranks ended well", codes == [0] * RANKS, "", codes=codes)


def _rank(rank: int, shm: Path, options: Options) -> None:
    """In a process of its own, which ends here, because gloo's threads may prevent a normal exit."""
    code = 1
    try:
        _replicas(rank, shm, options)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _replicas(rank: int, shm: Path, options: Options) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{shm}/meeting", rank=rank, world_size=RANKS)
    with opened(options) as device:
        size = options.kind_bytes // 4
        torch.manual_seed(2)
        state = {f"t{index}": device.tensor(torch.randint(0, 256, (size,), dtype=torch.uint8)) for index in range(4)}
        for watch in ("auto", "digests"):
            with _opened(options, watch=watch, folder=shm / watch) as (saver, events):  # type: ignore[arg-type]
                saves = Saves(device, saver, events, state)
                if rank == 0:
                    emit(f"replicas, {watch}: save, p50", median(saves.blocked_ms), "ms", all=saves.blocked_ms)
                    emit(f"replicas, {watch}: save, on the device", 1e3 * median(saves.device_s), "ms")
                    emit(f"replicas, {watch}: captured", median(saves.captured_s), "s", all=saves.captured_s)
                    emit(f"replicas, {watch}: the same bits", _is_stored(saves.last, state))
                emit(f"saves, false alarms, replicas, {watch}, rank {rank}", events.failed(), "", of=SAVES)
                if watch == "digests":
                    problem = _one_byte_differs(rank, device, saver, state)
                    emit(f"replicas that differ in one byte are told, rank {rank}", "'t2' is not the same" in problem)


def _one_byte_differs(rank: int, device: Accelerator, saver: fs.Checkpointer, state: State) -> str:
    """The report of a save in which one byte on rank 1 differs."""
    if rank == 1:
        state["t2"][len(state["t2"]) // 2 + 12_345] ^= 1
    device.synchronize()
    return str(saver.save(SAVES + 1, state, fence="manual").committed.exception(SAVE_LIMIT_S))


if __name__ == "__main__":
    main()
