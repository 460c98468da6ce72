"""Saves with and without `compress`, by turns in one process, so that all of them meet the same machine.

    python -m bench.codec_turns DIRECTORY [--bytes 1e9] [--saves 13] [--training] --of off:1 off:2 auto:2 fio

Each way is a `compress` and a number of the engine's threads; 0: as many as it takes by itself. Two more numbers are
requests in flight, and the MiB of each: `auto:2:32:8`. `fio` writes as many
bytes in its turn, to be compared with: with the settings of bench/fio.py that were the fastest of all, over two passes
before. Told are, of all saves
but the first two, the median rate; its ratios to the first way's (the median of turns, and that of all seconds);
processor seconds of the process; what was written of the state; the engine's threads that copied or encoded, on
average; what others on the machine used of its processors meanwhile, kernel threads included; and the ratio of the
state's bytes a second to fio's (the median of turns).
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
    """What each way's saves took, and how many processors others used."""
    state, run = mixed_of(total), after(2) if training else None
    setting = fastest(directory, total) if FIO in ways else None
    found: dict[str, list[Saved]] = {way: [] for way in ways}
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
                run.learn()
            first = step % len(ways)
            for way in (*ways[first:], *ways[:first]):
                if way == FIO:
                    found[way].append(_by_fio(directory, total, setting))
                    continue
                steps: list[float] = []
                with fs.Trace() as trace:
                    seconds, used = durable_save(opened[way], step, state, run, steps)
                settle(folders[way], kept=1)
                found[way].append((seconds, used, mean(steps) if steps else 0.0, *_engine(trace)))
        others_s = _processors_s() - all_s - (_own_s() - own_s)
        return found, others_s / (time.monotonic() - begin)


def options_of(way: str) -> fs.EngineOptions:
    compress, *numbers = way.split(":")
    workers, depth, mib = (int(one) or None for one in (*numbers, *"000"[len(numbers) :]))
    return fs.EngineOptions(
        compress=compress, workers=workers, queue_depth=depth,  # type: ignore[arg-type]
        request_bytes=mib and mib * fio.MIB,
    )


def fastest(directory: Path, total: int) -> fio.Setting:
    """The settings by which fio writes the fastest here, of those that are not refused."""
    samples: list[FioSample] = []
    with folder_in(directory) as folder:
        for setting in fio.CANDIDATES * fio.PASSES:
            try:
                samples.append(fio.write(folder, total, setting))
            except fio.FioError:
                if setting.memory == fio.PLAIN:  # the others need a higher limit on locked memory than usual
                    raise
    found = fio.best(samples, "write")
    print(f"fio's best: {found.memory} memory, {found.depth} requests of {found.request_bytes >> 20} MiB", flush=True)
    return found


def _by_fio(directory: Path, total: int, setting: fio.Setting) -> Saved:
    with folder_in(directory) as folder:
        sample = fio.write(folder, total, setting)
    return sample.seconds * total / sample.bytes, sample.cpu_s, 0.0, sample.bytes, 0.0


def _engine(trace: fs.Trace) -> tuple[float, float]:
    """Bytes that were written, and threads that copied or encoded, on average."""
    writes = [span for span in trace.spans if span.phase == "write"]
    works = [span for span in trace.spans if span.phase in ("capture", "encode")]
    lasted = max(span.end for span in writes) - min(span.begin for span in works)
    return sum(span.bytes for span in writes), sum(span.seconds for span in works) / lasted


def _own_s() -> float:
    """Of processors, spent by this process and its children: fio is one."""
    return sum(os.times()[:4])


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
    if options.saves < 3:
        parser.error("--saves must be 3 or more: the first two of each way are left out")
    total = int(options.bytes)
    found, others = turns(options.directory, options.of, total=total, saves=options.saves, training=options.training)
    print(f"others used {others:.2f} processors")
    heads = "way", "durable GB/s", "of the first, median", "of all seconds", "of fio's", "CPU s per GB", "step ms"
    print(f"| {' | '.join(heads)} | written | threads |\n{'|---' * (len(heads) + 2)}|")
    base, device = found[options.of[0]][2:], found.get(FIO, [])[2:]
    for way, rows in found.items():
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
