"""The cost of watching a state for writes until it is captured: by samples, and exactly, the default.

    PYTHONPATH=src python -m bench.watching DIRECTORY [--bytes 5e9] [--tensors 1800] [--saves 10]

Parameters and their AdamW, of equal size, in three kinds of memory, each in a process of its own:

    collapsed  as torch allocates them, and as the default leaves them after the first save's pass
    small      the same, with collapse=False
    huge       one mapping, with MADV_HUGEPAGE

It saves alternately into two stores, one for each method, so that noise affects both. The first saves, which plan, are
left out. Prints medians and ranges: for how long `save` blocks, and the processor time of its thread in it; then the
wait at the fence, the optimizer's step after it, and a step without a save. The goal limits how much longer `save`
blocks than with samples: 2 ms, and 16 ms for each GB in small pages.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

import flowstone as fs
from bench.script import folder_in
from flowstone.events import phases as events
from flowstone.save.saves import Saves

WAYS = ("samples", "auto")
PAGES = ("collapsed", "small", "huge")
MINUTES_MAX = 10
HUGE_PAGE_BYTES = 2 << 20
MS = 1e3


class Pool:
    """One mapping, in huge pages if the system has them, that tensors are moved into."""

    def __init__(self, size: int) -> None:
        size = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._at = -start % HUGE_PAGE_BYTES

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in this mapping, directly after the previous one."""
        made = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._at)
        self._at += -(-tensor.nbytes // 64) * 64
        return made.view(tensor.shape).copy_(tensor)


def build(tensors: int, size: int, *, huge: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    count = max(1, tensors // 3)  # parameters, and two moments of each
    elements = size // (4 * 3 * count)
    pool = Pool(3 * count * (4 * elements + 64)) if huge else None
    taken: Callable[[torch.Tensor], torch.Tensor] = pool.take if pool is not None else lambda tensor: tensor
    model = torch.nn.ParameterList([taken(torch.randn(elements)) for _ in range(count)])
    for parameter in model:
        parameter.grad = torch.randn(elements)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    for slots in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            slots[name] = taken(slots[name])
    return model, optimizer


def measure(options: argparse.Namespace, pages: str) -> None:
    """In a process of its own: one kind of memory, every method."""
    model, optimizer = build(options.tensors, options.bytes, huge=pages == "huge")
    emitted: list[events.Event] = []
    timed = {way: Timed() for way in WAYS}
    with ExitStack() as stack:
        open_one = partial(opened, pages=pages, on_event=emitted.append)
        checkpointers = {way: stack.enter_context(open_one(options.directory / way, way)) for way in WAYS}
        for number in range(options.saves + 1):
            for way, checkpointer in checkpointers.items():
                emitted.clear()
                sample = save_once(checkpointer, number, model, optimizer, emitted)
                if number > 0:
                    timed[way].append(sample)
                elif pages == "collapsed" and way == "auto":
                    await_pass(checkpointer)
    size = options.bytes / 1e9
    print(f"{pages} pages, {options.tensors:,} tensors of {size:g} GB, {options.saves} saves each; milliseconds")
    for way in WAYS:
        exact = median(sample.exact for sample in timed[way])
        cells = (
            f"{name.replace('_', ' ')} {median(got):.1f} ({min(got):.1f}-{max(got):.1f})"
            for name in ("blocked", "processor", "fence", "step_after", "step_alone")
            for got in [[getattr(sample, name) for sample in timed[way]]]
        )
        print(f"  {way:<8} {exact:4.0%} exact: " + ", ".join(cells), flush=True)
    extra = median(sample.blocked for sample in timed["auto"]) - median(sample.blocked for sample in timed["samples"])
    small = median(sample.small_gb for sample in timed["auto"])
    goal = f"{extra:+.1f} ms longer than with samples, goal {2 + 16 * small:.1f} ms"
    print(f"  {size - small:.2f} GB in huge pages; {goal}", flush=True)


def await_pass(checkpointer: fs.Checkpointer) -> None:
    """Wait until the memory that the last save has captured is in huge pages."""
    saves = checkpointer._saves
    assert isinstance(saves, Saves)
    saves._threads.writer.submit(int).result()  # a pass begins after the commit
    current = saves.collapsing._pass
    if current is not None:
        current.wait(MINUTES_MAX * 60)
        share = f"{current.huge_bytes / current.wanted_bytes:.1%} of the memory is in huge pages"
        print(f"  {share}, {current.collapsed_bytes / 1e9:.2f} GB anew in {current.processor_s:.1f} s", flush=True)


@dataclass
class Sample:
    """Times of one save, in milliseconds; the share of late captures watched exactly, and the bytes in small pages."""

    blocked: float
    processor: float
    fence: float
    step_after: float
    step_alone: float
    exact: float
    small_gb: float


Timed = list[Sample]


def save_once(
    checkpointer: fs.Checkpointer, number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
    emitted: list[events.Event],
) -> Sample:
    optimizer.step()  # leaves the caches as a training does
    alone = timed_ms(optimizer.step)
    processor = time.thread_time()
    started = time.perf_counter()
    save = checkpointer.save(number, {"model": model, "optimizer": optimizer})
    blocked, processor = MS * (time.perf_counter() - started), MS * (time.thread_time() - processor)
    after = timed_ms(optimizer.step)
    fence = MS * sum(event.waited_s for event in emitted if isinstance(event, events.Fenced))
    io = save.committed.result().manifest.io
    exact, sampled = io.exact_bytes or 0, io.sampled_bytes or 0
    small_gb = (exact - (io.huge_bytes or 0)) / 1e9
    return Sample(blocked, processor, fence, after - fence, alone, exact / (exact + sampled), small_gb)


def opened(directory: Path, way: str, pages: str, on_event: Callable[[events.Event], None]) -> fs.Checkpointer:
    engine = fs.EngineOptions(watch=way, collapse=pages == "collapsed")  # type: ignore[arg-type]
    return fs.Checkpointer(directory, keep=fs.Keep(last=1), engine=engine, budget_bytes=1 << 30, on_event=on_event)


def timed_ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return MS * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where files go meanwhile, in a folder of its own")
    parser.add_argument("--tensors", type=int, default=1800)
    parser.add_argument("--bytes", type=lambda text: int(float(text)), default=int(5e9))
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=list(PAGES))
    options = parser.parse_args()
    place = options.directory
    for pages in options.pages:
        with folder_in(place) as options.directory:
            process = multiprocessing.get_context("spawn").Process(target=measure, args=(options, pages))
            process.start()
            process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
