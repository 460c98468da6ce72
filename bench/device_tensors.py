"""How long `save` blocks for a state of many tensors on a device: p50, p95, phases, and the number of Python calls.

    python -m bench.device_tensors DIRECTORY [--simulate] [--parameters 450] [--bytes 65536] [--rounds 60]

A model with that many parameters, and its capturable Adam: four tensors for each parameter, one of which is the step
count. Each save is durable before the next step, so no save waits for an earlier one. `--first` measures first saves
instead, each by a new Checkpointer.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import FrameType

import torch

import flowstone as fs
from bench.gpu.accelerator import Accelerator, Cuda, simulated
from bench.script import folder_in
from bench.small_tensors import Clock, print_table

SAVE = {
    "describe": "flowstone.save.planning.describe", "plan": "flowstone.save.planning.plan_save",
    "begin: watch": "flowstone.save.capturing.watch_sources", "begin: gather": "flowstone.stage.gather.gather_for",
    "begin: draft": "flowstone.commit.publish.begin_draft", "begin: stage": "flowstone.save.capturing.start_capture",
    "objects": "flowstone.save.pending_save.encode_sections",
    "early": "flowstone.store.jobs.JobWriteHandle.wait_early",
}


def made(device: Accelerator, parameters: int, bytes_each: int) -> dict[str, object]:
    """A model and its optimizer on the device, after a step."""
    values = [device.tensor(torch.randn(bytes_each // 4)) for _ in range(parameters)]
    model = torch.nn.ParameterList(values)
    optimizer = torch.optim.Adam(model.parameters(), capturable=values[0].is_cuda)
    for parameter in model:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    for slots in optimizer.state.values():
        slots.update({name: device.tensor(slot) for name, slot in slots.items() if not slot.is_cuda})
    return {"model": model, "optimizer": optimizer, "step": 1}


def later(state: dict[str, object], directory: Path, rounds: int) -> tuple[list[float], list[Clock]]:
    """Seconds for which each save but the first blocks, and its phases."""
    clocks = []
    with fs.Checkpointer(directory, keep=fs.Keep(last=1)) as checkpointer:
        _blocked(checkpointer, 0, state)
        blocked = [_blocked(checkpointer, step, state) for step in range(1, rounds + 1)]
        for step in range(rounds + 1, rounds + 1 + rounds // 4):  # separate saves: clocks take time
            clocks.append(clock := Clock(SAVE))
            with clock.running():
                _blocked(checkpointer, step, state, clock)
    return blocked, clocks


def first(state: dict[str, object], directory: Path, rounds: int) -> tuple[list[float], list[Clock]]:
    """The same for the first saves of new Checkpointers."""
    blocked = []
    for number in range(rounds):
        with fs.Checkpointer(directory / str(number)) as checkpointer:
            blocked.append(_blocked(checkpointer, 1, state))
    return blocked, []


def _blocked(checkpointer: fs.Checkpointer, step: int, state: dict[str, object], clock: Clock | None = None) -> float:
    """The seconds for which a save blocks, after a step of training."""
    state["optimizer"].step()  # type: ignore[attr-defined]
    gc.collect()
    with Clock({}).timing("") if clock is None else clock.timing("= blocked"):
        begin = perf_counter()
        save = checkpointer.save(step, state)
        seconds = perf_counter() - begin
    save.committed.result()
    checkpointer.wait()
    return seconds


def calls(state: dict[str, object], directory: Path) -> Counter[tuple[str, str]]:
    """The calls that a later save makes before it returns, by file and function; calls of C count for their caller.

    On a thread of its own, since a profile covers one thread: on the main thread, a save delegates to another one.
    """
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code.co_filename, frame.f_code.co_name] += 1

    def save() -> fs.Save:
        sys.setprofile(count)
        try:
            return checkpointer.save(2, state)
        finally:
            sys.setprofile(None)

    with fs.Checkpointer(directory, keep=fs.Keep(last=1)) as checkpointer:
        for step in range(2):
            _blocked(checkpointer, step, state)
        state["optimizer"].step()  # type: ignore[attr-defined]
        with ThreadPoolExecutor(1) as thread:
            thread.submit(save).result().committed.result()
    return calls


@contextmanager
def opened(*, simulate: bool, memory_bytes: int) -> Iterator[Accelerator]:
    """A CUDA GPU, or the simulated device of the tests with that much memory."""
    if not simulate:
        yield Cuda()
        return
    with simulated(memory_bytes) as device:
        device.far.sync = False  # no kernel of training follows a save, so the processor need not wait for the device
        yield device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where files go meanwhile, in a folder of its own")
    parser.add_argument("--simulate", action="store_true", help="on the simulated device, from a checkout")
    parser.add_argument("--parameters", type=int, default=450)
    parser.add_argument("--bytes", type=int, default=65536, help="of each parameter")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--first", action="store_true", help="first saves")
    options = parser.parse_args()
    memory_bytes = (options.parameters * 4 + 8) * (options.bytes + 512)
    with opened(simulate=options.simulate, memory_bytes=memory_bytes) as device, folder_in(options.directory) as own:
        state = made(device, options.parameters, options.bytes)
        blocked, clocks = (first if options.first else later)(state, own / "run", options.rounds)
        called = 0 if options.first else calls(state, own / "calls").total()
    which = "first saves" if options.first else "later saves"
    print(f"{which} of {4 * options.parameters:,} tensors on a device ({device.name}), what each blocks")
    print(f"  p50 {1e3 * statistics.median(blocked):.1f} ms, p95 {1e3 * p95(blocked):.1f} ms, of {len(blocked)}")
    if called:
        print(f"  {called:,} calls of functions: {called / options.parameters:.1f} for each parameter")
    if clocks:
        print("  by phase, those within another one too")
        print_table(clocks, 4 * options.parameters)


def p95(seconds: Sequence[float]) -> float:
    return sorted(seconds)[round(0.95 * (len(seconds) - 1))]


if __name__ == "__main__":
    main()
