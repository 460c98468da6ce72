"""The rates of import, export and a stream of tensors relative to the device, and the memory that they use.

    PYTHONPATH=src python -m bench.conversion DIRECTORY [--bytes 4e9] [--rounds 3] [--budget 512e6] [--update PAGE]

A safetensors file of equal tensors of noise is imported, and exported again, in separate processes. Alternately, fio
reads and writes as much with one job each (8 MiB, 16 in flight, registered memory, fsync inside the timer): first
alone, then both at once. A conversion reads and writes at the same time. Both sides are on one device here, so its
limit is the slower of the two jobs that share it. The peak is the growth of the process's peak memory during the call.
`Checkpoint.stream` of the imported tensors only reads, so its limit is the fio job that only reads. DIRECTORY holds at
most two copies of the tensors at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from bench import fio
from bench.figures import spread
from bench.goals import Goal, cell

MIB = 1 << 20
TENSORS = 100
FIO_BYTES_MAX = 4_000_000_000  # its rate does not depend on more bytes
OF_SLOWER_SIDE, PEAK_MB, OF_READS = 0.8, 1000, 0.9  # the goals
_MARKED = re.compile(r"(?<=<!-- conversion:start -->\n).*(?=<!-- conversion:end -->)", re.DOTALL)
_CHILD = """
import json, sys, time
import flowstone as fs
import flowstone.convert.export, flowstone.convert.importing
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
verb, source, target, budget = sys.argv[1:]
before = peak()
report = getattr(fs, verb)(source, target, budget_bytes=int(budget))
print(json.dumps([report.bytes / report.seconds, peak() - before]))
"""

_STREAMING = """
import json, sys, time
import torch
import flowstone as fs
import flowstone.torch.streaming
checkpoint, total, started = fs.open(sys.argv[1]), 0, time.perf_counter()
for _, tensor in checkpoint.stream():
    total += tensor.nbytes
print(json.dumps(total / (time.perf_counter() - started)))
"""


def write_source(path: Path, total_bytes: int) -> None:
    """A safetensors file of float32 noise, never completely in memory."""
    elements = int(total_bytes) // TENSORS // 4
    entries = {
        f"layer.{number}": {
            "dtype": "F32", "shape": [elements], "data_offsets": [number * elements * 4, (number + 1) * elements * 4],
        }
        for number in range(TENSORS)
    }
    text = json.dumps(entries).encode()
    noise = np.random.default_rng(1).random(elements, np.float32)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number in range(TENSORS):
            noise[:1] = number  # no two are equal
            file.write(noise)


def convert(verb: str, source: Path, target: Path, budget: int) -> tuple[float, int]:
    """Bytes per second, and the growth of peak memory."""
    command = [sys.executable, "-c", _CHILD, verb, str(source), str(target), str(budget)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rate, peak = json.loads(done.stdout)
    return rate, peak


def stream(source: Path) -> float:
    """Bytes per second of a stream of all tensors, each verified, in host memory."""
    command = [sys.executable, "-c", _STREAMING, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout))


def at_once(work: Path, total_bytes: int, setting: fio.Setting) -> float:
    """Bytes per second of the slower of two jobs: one reads the files of `fio.write`, one writes as much."""
    beside = work / "beside"
    beside.mkdir()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(fio.write, beside, total_bytes, setting), pool.submit(fio.read, work, total_bytes, setting)]
    shutil.rmtree(beside)
    return min(job.result().gb_per_s for job in jobs) * 1e9


def measure(directory: Path, total_bytes: int, rounds: int, budget: int) -> list[dict[str, float]]:
    """A row for each round. Leaves nothing in the directory."""
    work = directory / "bench-conversion"
    work.mkdir(parents=True)
    setting = fio.Setting(fio.REGISTERED, 8 * MIB, 16)
    rows = []
    try:
        for _ in range(rounds):
            fio_bytes = min(total_bytes, FIO_BYTES_MAX)
            written = fio.write(work, fio_bytes, setting).gb_per_s * 1e9
            read = fio.read(work, fio_bytes, setting).gb_per_s * 1e9
            together = at_once(work, fio_bytes, setting)
            fio.clear(work)
            write_source(work / "model.safetensors", total_bytes)
            os.sync()  # otherwise unwritten data would use the device later
            imported, import_peak = convert("import_checkpoint", work / "model.safetensors", work / "run", budget)
            (work / "model.safetensors").unlink()
            streamed = stream(work / "run")
            exported, export_peak = convert("export", work / "run", work / "hf", budget)
            shutil.rmtree(work / "run")
            shutil.rmtree(work / "hf")
            rows.append({
                "fio_write": written, "fio_read": read, "fio_at_once": together, "import": imported, "export": exported,
                "stream": streamed,
                "peak": float(max(import_peak, export_peak)),
            })
    finally:
        shutil.rmtree(work)
    return rows


def goals(rows: list[dict[str, float]]) -> list[Goal]:
    """The goals, and whether they are met."""
    reached = [
        Goal(
            f"{verb}, relative to the slower of two fio jobs that read and write at once",
            spread(row[verb] / row["fio_at_once"] for row in rows), OF_SLOWER_SIDE,
        )
        for verb in ("import", "export")
    ]
    peak = Goal("peak of memory, MB", spread(row["peak"] / 1e6 for row in rows), PEAK_MB, at_most=True, digits=0)
    of_reads = spread(row["stream"] / row["fio_read"] for row in rows)
    streamed = Goal("stream, relative to a fio job that reads", of_reads, OF_READS)
    return [*reached, streamed, peak]


def told(rows: list[dict[str, float]]) -> str:
    """The goals and the measurements, as on a page: medians, and the range if there are several rounds."""
    names = {
        "fio_write": "fio writes, alone", "fio_read": "fio reads, alone",
        "fio_at_once": "fio reads and writes at once: the slower job", "import": "import", "export": "export",
        "stream": "stream",
    }
    lines = [f"- {goal}" for goal in goals(rows)]
    lines += ["", "| | GB/s |", "|---|---:|"]
    lines += [f"| {words} | {cell(spread(row[name] / 1e9 for row in rows))} |" for name, words in names.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bytes", type=float, default=4e9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=512 * MIB)
    parser.add_argument("--update", type=Path, help="the page between whose marks the result is written")
    options = parser.parse_args()
    table = told(measure(options.directory, int(options.bytes), options.rounds, int(options.budget)))
    print(table)
    if options.update is not None:
        command = f"python -m bench.conversion DIRECTORY --bytes {options.bytes:.0e} --rounds {options.rounds}"
        text = f"`PYTHONPATH=src {command}`, {datetime.now(UTC):%Y-%m-%d}\n\n{table}\n"
        options.update.write_text(_MARKED.sub(lambda _: text, options.update.read_text()))


if __name__ == "__main__":
    main()
