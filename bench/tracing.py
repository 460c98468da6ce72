"""The cost of an open trace: saves and loads of one process, alternately with fs.Trace and without.

    PYTHONPATH=src python -m bench.tracing DIRECTORY [--bytes 2e9] [--tensors 600] [--rounds 24] [--update PAGE]

Parameters and their AdamW, of equal size. A timer stops when a save is durable, or a load has ended; no trace file is
written, which happens once at the end of a run. Prints the medians of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import flowstone as fs
from bench.script import folder_in
from bench.watching import build

GOAL = 1.01
_MARKED = re.compile(r"(?<=<!-- tracing:start -->\n).*(?=<!-- tracing:end -->)", re.DOTALL)


def ratios(rounds: int, traced: Callable[[], float], plain: Callable[[], float]) -> list[float]:
    """Times with a trace divided by times without, ascending; the order alternates between rounds."""
    laps = []
    for number in range(rounds):
        if number % 2:
            before, after = plain(), traced()
            laps.append(after / before)
        else:
            before, after = traced(), plain()
            laps.append(before / after)
    return sorted(laps)


def measure(directory: Path, size: int, tensors: int, rounds: int) -> dict[str, list[float]]:
    """The ratios of saves and of loads."""
    model, optimizer = build(tensors, size, huge=True)
    state = {"model": model, "optimizer": optimizer}
    with fs.Checkpointer(directory, keep=fs.Keep(last=1)) as checkpointer:
        step = 0

        def save() -> float:
            nonlocal step
            step += 1
            started = time.perf_counter()
            checkpointer.save(step, state)
            checkpointer.wait()
            return time.perf_counter() - started

        def load() -> float:
            started = time.perf_counter()
            checkpointer.load(state)
            return time.perf_counter() - started

        def traced(call: Callable[[], float]) -> Callable[[], float]:
            def timed() -> float:
                with fs.Trace():
                    return call()

            return timed

        save()  # plans, and allocates the arena
        return {
            "time of a save with a trace, divided by the time without one": ratios(rounds, traced(save), save),
            "time of a load with a trace, divided by the time without one": ratios(rounds, traced(load), load),
        }


def goal_lines(samples: dict[str, list[float]]) -> list[str]:
    return [
        f"- {'pass' if median(of) <= GOAL else 'miss'}  {name}: "
        f"{median(of):.3f} ({of[0]:.3f}-{of[-1]:.3f}), goal at most {GOAL:.2f}"
        for name, of in samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where files go meanwhile, in a folder of its own")
    parser.add_argument("--bytes", type=lambda text: int(float(text)), default=int(2e9))
    parser.add_argument("--tensors", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--update", type=Path, help="the page between whose marks the result is written")
    options = parser.parse_args()
    with folder_in(options.directory) as own:
        lines = goal_lines(measure(own, options.bytes, options.tensors, options.rounds))
    print("\n".join(lines))
    if options.update is not None:
        command = f"python -m bench.tracing DIRECTORY --bytes {options.bytes:.0e} --rounds {options.rounds}"
        text = f"`PYTHONPATH=src {command}`, {datetime.now(UTC):%Y-%m-%d}\n\n" + "\n".join(lines) + "\n"
        options.update.write_text(_MARKED.sub(lambda _: text, options.update.read_text()))


if __name__ == "__main__":
    main()
