"""Saves with and without `compress`, by turns in one process, so that all of them meet the same machine.

    python -m bench.codec_turns DIRECTORY [--bytes 1e9] [--saves 13] [--training] --of off:1 off:2 auto:2

Each way is a `compress` and a number of the engine's threads; 0: as many as it takes by itself. Told are, of all saves
but the first two, the median rate; its ratios to the first way's (the median of turns, and that of all seconds);
processor seconds of the process; what was written of the state; the engine's threads that copied or encoded, on
average; and what others on the machine used of its processors meanwhile, kernel threads included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median

import flowstone as fs
from bench.codec_states import after, change, mixed_of
from bench.codecs import durable_save, settle
from bench.script import folder_in

Saved = tuple[float, float, float, float, float]  # seconds, processor seconds, seconds of a step, bytes, busy threads


def turns(
    directory: Path, ways: Sequence[str], *, total: int, saves: int, training: bool
) -> tuple[dict[str, list[Saved]], float]:
    """What each way's saves took, and how many processors others used."""
    state, run = mixed_of(total), after(2) if training else None
    found: dict[str, list[Saved]] = {way: [] for way in ways}
    with ExitStack() as open_ones:
        folders, opened = {}, {}
        for way in ways:
            compress, _, workers = way.partition(":")
            folders[way] = open_ones.enter_context(folder_in(directory))
            options = fs.EngineOptions(compress=compress, workers=int(workers) or None)  # type: ignore[arg-type]
            opened[way] = open_ones.enter_context(fs.Checkpointer(folders[way], engine=options, keep=1))
        begin, all_s, own_s = time.monotonic(), _processors_s(), time.process_time()
        for step in range(saves):
            change(state)
            if run is not None:
                run.learn()
            first = step % len(ways)
            for way in (*ways[first:], *ways[:first]):
                steps: list[float] = []
                with fs.Trace() as trace:
                    seconds, used = durable_save(opened[way], step, state, run, steps)
                settle(folders[way], kept=1)
                found[way].append((seconds, used, mean(steps) if steps else 0.0, *_engine(trace)))
        others_s = _processors_s() - all_s - (time.process_time() - own_s)
        return found, others_s / (time.monotonic() - begin)


def _engine(trace: fs.Trace) -> tuple[float, float]:
    """Bytes that were written, and threads that copied or encoded, on average."""
    writes = [span for span in trace.spans if span.phase == "write"]
    works = [span for span in trace.spans if span.phase in ("capture", "encode")]
    lasted = max(span.end for span in writes) - min(span.begin for span in works)
    return sum(span.bytes for span in writes), sum(span.seconds for span in works) / lasted


def _processors_s() -> float:
    """Of all processors, spent by anything (proc_stat(5): user, nice, system, irq, softirq)."""
    spent = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]))
    return (sum(spent[:3]) + spent[5] + spent[6]) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--saves", type=int, default=13)
    parser.add_argument("--training", action="store_true", help="train a GPT on all processors meanwhile")
    parser.add_argument("--of", nargs="+", default=["off:1", "off:2", "auto:2"])
    options = parser.parse_args()
    total = int(options.bytes)
    found, others = turns(options.directory, options.of, total=total, saves=options.saves, training=options.training)
    print(f"others used {others:.2f} processors")
    print("| way | durable GB/s | of the first, median | of all seconds | CPU s per GB | step ms | written | threads |")
    print("|---|---|---|---|---|---|---|---|")
    base = found[options.of[0]][2:]
    for way, rows in found.items():
        seconds, used, step, written, busy = map(median, zip(*rows[2:], strict=True))
        ratio = median(raw[0] / mine[0] for raw, mine in zip(base, rows[2:], strict=True))
        of_all = sum(raw[0] for raw in base) / sum(mine[0] for mine in rows[2:])
        print(
            f"| {way} | {total / seconds / 1e9:.3f} | {ratio:.2f} | {of_all:.2f} | {used / total * 1e9:.2f} | "
            f"{step * 1e3:.0f} | {written / total:.3f} | {busy:.1f} |"
        )


if __name__ == "__main__":
    main()
