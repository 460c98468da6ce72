"""Saves with and without `compress`, alternating in one process, so that all run in the same conditions.

    python -m bench.codec_turns DIRECTORY [--bytes 1e9] [--saves 13] [--training] --of off:1 off:2 auto:2 fio

A setting is a `compress` and a number of the engine's threads (0: the default). Two more numbers are the requests in
flight, and the MiB of each: `auto:2:32:8`. `fio` writes as many bytes in its turn, for comparison, with the settings of
bench/fio.py that were the fastest in two passes before. For all saves but the first two, it prints:

- the median rate, and its ratios to the first setting's (the median of turns, and that of all seconds);
- processor seconds of the process;
- the written bytes, relative to the state;
- the engine's threads that copied or encoded, on average;
- the processors that others used meanwhile, including kernel threads;
- the ratio of the state's bytes per second to fio's (the median of turns).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median

import flowstone as fs
from bench import fio
from bench.codec_states import after, change, mixed_of
from bench.codecs import durable_save, settle
from bench.records import FioSample
from bench.script import folder_in

FIO = "fio"
Saved = tuple[float, float, float, float, float]  # seconds, processor seconds, seconds of a step, bytes, busy threads


def turns(
    directory: Path, ways: Sequence[str], *, total: int, saves: int, training: bool
) -> tuple[dict[str, list[Saved]], float]:
    """The saves of each setting, and how many processors others used."""
    state, run = mixed_of(total), after(2) if training else None
    setting = fastest(directory, total) if FIO in ways else None
    saved_by_way: dict[str, list[Saved]] = {way: [] for way in ways}
    with ExitStack() as open_ones:
        folders, opened = {}, {}
        for way in ways:
            if way == FIO:
                continue
            folders[way] = open_ones.enter_context(folder_in(directory))
            opened[way] = open_ones.enter_context(fs.Checkpointer(folders[way], engine=options_of(way), keep=1))
        begin, all_s, own_s = time.monotonic(), _processors_s(), _own_s()
        for step in range(saves):
            change(state)
            if run is not None:
                run.train_step()
            first = step % len(ways)
            for way in (*ways[first:], *ways[:first]):
                if way == FIO:
                    saved_by_way[way].append(_by_fio(directory, total, setting))
                    continue
                steps: list[float] = []
                with fs.Trace() as trace:
                    seconds, used = durable_save(opened[way], step, state, run, steps)
                settle(folders[way], kept=1)
                saved_by_way[way].append((seconds, used, mean(steps) if steps else 0.0, *_engine(trace)))
        others_s = _processors_s() - all_s - (_own_s() - own_s)
        return saved_by_way, others_s / (time.monotonic() - begin)


def options_of(way: str) -> fs.EngineOptions:
    compress, *numbers = way.split(":")
    workers, depth, mib = (int(number) or None for number in (*numbers, *"000"[len(numbers) :]))
    return fs.EngineOptions(
        compress=compress, workers=workers, queue_depth=depth,  # type: ignore[arg-type]
        request_bytes=mib and mib * fio.MIB,
    )


def fastest(directory: Path, total: int) -> fio.Setting:
    """The settings with which fio writes fastest here, of those that are not refused."""
    samples: list[FioSample] = []
    with folder_in(directory) as folder:
        for setting in fio.CANDIDATES * fio.PASSES:
            try:
                samples.append(fio.write(folder, total, setting))
            except fio.FioError:
                if setting.memory == fio.PLAIN:  # the others need a higher limit on locked memory than the usual one
                    raise
    best = fio.best(samples, "write")
    print(f"fio's best: {best.memory} memory, {best.depth} requests of {best.request_bytes >> 20} MiB", flush=True)
    return best


def _by_fio(directory: Path, total: int, setting: fio.Setting) -> Saved:
    with folder_in(directory) as folder:
        sample = fio.write(folder, total, setting)
    return sample.seconds * total / sample.bytes, sample.cpu_s, 0.0, sample.bytes, 0.0


def _engine(trace: fs.Trace) -> tuple[float, float]:
    """Bytes that were written, and the average number of threads that copied or encoded."""
    writes = [span for span in trace.spans if span.phase == "write"]
    works = [span for span in trace.spans if span.phase in ("capture", "encode")]
    lasted = max(span.end for span in writes) - min(span.begin for span in works)
    return sum(span.bytes for span in writes), sum(span.seconds for span in works) / lasted


def _own_s() -> float:
    """Processor seconds of this process and its children, such as fio."""
    return sum(os.times()[:4])


def _processors_s() -> float:
    """Processor seconds of the whole machine (proc_stat(5): user, nice, system, irq, softirq)."""
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
    if options.saves < 3:
        parser.error("--saves must be 3 or more: the first two of each way are left out")
    total = int(options.bytes)
    measured, others = turns(options.directory, options.of, total=total, saves=options.saves, training=options.training)
    print(f"others used {others:.2f} processors")
    heads = "setting", "durable GB/s", "of the first, median", "of all seconds", "of fio's", "CPU s per GB", "step ms"
    print(f"| {' | '.join(heads)} | written | threads |\n{'|---' * (len(heads) + 2)}|")
    base, device = measured[options.of[0]][2:], measured.get(FIO, [])[2:]
    for way, rows in measured.items():
        seconds, used, step, written, busy = map(median, zip(*rows[2:], strict=True))
        ratio = median(raw[0] / mine[0] for raw, mine in zip(base, rows[2:], strict=True))
        of_all = sum(raw[0] for raw in base) / sum(mine[0] for mine in rows[2:])
        of_fio = [its[0] / mine[0] for its, mine in zip(device, rows[2:], strict=True)] if device else []
        print(
            f"| {way} | {total / seconds / 1e9:.3f} | {ratio:.2f} | {of_all:.2f} | "
            f"{f'{median(of_fio):.2f}' if of_fio else ''} | {used / total * 1e9:.2f} | {step * 1e3:.0f} | "
            f"{written / total:.3f} | {busy:.1f} |"
        )


if __name__ == "__main__":
    main()
