"""The device's own rate, measured by fio, as the base of all ratios.

The memory of fio's buffers matters as much as request size and depth. Plain memory consists of scattered pages of 4
KiB, so the device gets four times as many, smaller requests, and a read touches its buffers for the first time inside
the timer. A virtio disk read 0.8 to 1.9 GB/s with plain memory, and 2.6 to 3.0 with registered huge pages. So both are
tried, and the better one counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.records import Device, FioSample

MIB = 1 << 20
PLAIN, REGISTERED = "plain", "registered"
MEMORY = (PLAIN, REGISTERED)
REQUEST_BYTES = (1 * MIB, 4 * MIB, 8 * MIB)
DEPTHS = (8, 16, 32)
PASSES = 2  # over all candidates by default, since a shared device's rate can double from one second to the next


@dataclass(frozen=True, slots=True)
class Setting:
    memory: str
    request_bytes: int
    depth: int


CANDIDATES = tuple(
    Setting(memory, request, depth) for memory in MEMORY for request in REQUEST_BYTES for depth in DEPTHS
)


class FioError(Exception):
    """fio ended with an error; its message."""


def is_installed() -> bool:
    return shutil.which("fio") is not None


def write(directory: Path, total_bytes: int, setting: Setting, jobs: int = 1) -> FioSample:
    """Write new files, fsync inside the timer. They stay, for `read`; fio allocates them before its timer starts."""
    clear(directory)
    return _run(directory, total_bytes, setting, "write", jobs)


def read(directory: Path, total_bytes: int, setting: Setting, jobs: int = 1) -> FioSample:
    """Read the files that `write` left."""
    return _run(directory, total_bytes, setting, "read", jobs)


def clear(directory: Path) -> None:
    for path in directory.glob("fio.*.bin"):
        path.unlink()


def choose(
    directory: Path, file_bytes: int, *, passes: int, settle: Callable[[], None], on_done: Callable[[], object]
) -> tuple[FioSample, ...]:
    """`passes` writes and reads with every candidate, interleaved. A candidate that is refused is left out."""
    samples: list[FioSample] = []
    for setting in CANDIDATES * passes:
        for job in (write, read):
            settle()
            try:
                samples.append(job(directory, file_bytes, setting))
            except FioError:
                if setting.memory == PLAIN:  # the others need a higher limit on locked memory than the usual one
                    raise
            on_done()
    return tuple(samples)


def best(samples: Iterable[FioSample], direction: str, memory: Sequence[str] = MEMORY) -> Setting:
    """The candidate with the highest median rate."""
    rates: dict[Setting, list[float]] = {}
    for sample in samples:
        if sample.direction == direction and sample.memory in memory:
            setting = Setting(sample.memory, sample.request_bytes, sample.depth)
            rates.setdefault(setting, []).append(sample.gb_per_s)
    return max(rates, key=lambda setting: median(rates[setting]))


def measure_round(
    directory: Path, file_bytes: int, candidates: Sequence[FioSample], settle: Callable[[], None], jobs: int
) -> Device:
    """One sample of each kind. `jobs` at once share the bytes; 1: no such sample is taken."""
    best_by: dict[tuple[str, str], FioSample] = {}
    kinds = [("best", MEMORY, 1), ("plain", (PLAIN,), 1), *([("many", MEMORY, jobs)] if jobs > 1 else ())]
    for kind, memory, at_once in kinds:
        for direction, job in (("write", write), ("read", read)):
            settle()
            setting = best(candidates, direction, memory)
            best_by[direction, kind] = job(directory, file_bytes, setting, at_once)
    clear(directory)

    def of(direction: str, kind: str) -> tuple[FioSample, ...]:
        return (best_by[direction, kind],) if (direction, kind) in best_by else ()

    return Device(
        tuple(candidates), of("write", "best"), of("read", "best"), of("write", "plain"), of("read", "plain"),
        of("write", "many"), of("read", "many"),
    )


def join(rounds: Sequence[Device]) -> Device:
    return Device(
        rounds[0].candidates, tuple(s for r in rounds for s in r.writes), tuple(s for r in rounds for s in r.reads),
        tuple(s for r in rounds for s in r.plain_writes), tuple(s for r in rounds for s in r.plain_reads),
        tuple(s for r in rounds for s in r.many_writes), tuple(s for r in rounds for s in r.many_reads),
    )


def _run(directory: Path, total_bytes: int, setting: Setting, direction: str, jobs: int) -> FioSample:
    requests = -(-total_bytes // jobs // setting.request_bytes)
    command = [
        "fio", "--name=device", f"--directory={directory}", "--filename_format=fio.$jobnum.bin", f"--numjobs={jobs}",
        "--ioengine=io_uring", "--direct=1", f"--rw={direction}", f"--bs={setting.request_bytes}",
        f"--iodepth={setting.depth}", f"--size={requests * setting.request_bytes}", "--output-format=json",
        *(("--end_fsync=1",) if direction == "write" else ()),
    ]
    environment = dict(os.environ)
    if setting.memory == REGISTERED:
        command.append("--fixedbufs=1")
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # malloc then requests transparent huge pages
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise FioError(f"fio failed ({done.returncode}): {done.stderr.strip() or done.stdout.strip()}")
    rows = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    seconds = [max(row[direction]["runtime"], 1) / 1000 for row in rows]
    cpu_s = sum((row["usr_cpu"] + row["sys_cpu"]) / 100 * taken for row, taken in zip(rows, seconds, strict=True))
    moved = sum(row[direction]["io_bytes"] for row in rows)
    return FioSample(
        direction, setting.memory, setting.request_bytes, setting.depth, moved, max(seconds), cpu_s, jobs
    )
