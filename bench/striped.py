"""Saves over several paths at once: shares that follow measured rates, and a path that is full.

    PYTHONPATH=src python -m bench.striped DIRECTORY [--slow DIRECTORY] [--slow-rate 100e6] [--bytes 1e9] [--saves 6]
    PYTHONPATH=src python -m bench.striped DIRECTORY --bucket [--bytes 1e9] [--saves 6]

Saves of that many bytes go, in turn, into one directory; over two directories of its disk; over these and --slow, a
directory on another device, which a control group limits to --slow-rate (needs root; 0: no limit). Then --slow is
filled to its last byte before the next save, and emptied again before three more. Each line has the seconds until the
save is committed, and the share of the bytes on each path. Loads read the last step. Rates are bytes per second.

With --bucket, the paths are a directory and a bucket of moto's server on loopback, which gets a quarter. Two budgets
alternate: one that holds all bytes that an upload has sent until its object is complete, and one that copies most of
them into a temporary file. Prints the seconds until a save is committed, and this process' processor seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

import flowstone as fs
from bench.throttle import held_to

TENSORS = 64  # a tensor is never divided between paths


def state(total_bytes: int, seed: int) -> dict[str, object]:
    made = np.random.default_rng(seed).integers(0, 256, total_bytes, np.uint8)
    return {"x": dict(enumerate(np.array_split(made, TENSORS))), "step": seed}


def parts(paths: Sequence[Path], step: int) -> list[float]:
    """The share of a step's segments on each path."""
    there = [paths[0].glob(f"step-{step:08d}/*.safetensors")]
    there += [path.glob(f"segments-{step:08d}-*/*.safetensors") for path in paths[1:]]
    sizes = [sum(file.stat().st_size for file in files if "rank" in file.name) for files in there]
    return [round(size / max(1, sum(sizes)), 2) for size in sizes]


@contextlib.contextmanager
def full(directory: Path) -> Iterator[None]:
    """Fill the device, so that nothing more can be written there."""
    filler = directory / "filler"
    end, length = 0, 1 << 30
    with filler.open("wb") as file:
        while length >= 1 << 16:
            try:
                os.posix_fallocate(file.fileno(), end, length)
                end += length
            except OSError:
                length //= 2
    try:
        yield
    finally:
        filler.unlink()


def save(ckpt: fs.Checkpointer, paths: Sequence[Path], total_bytes: int, step: int) -> dict[str, object]:
    values = state(total_bytes, step)
    begun = time.perf_counter()
    ckpt.save(step, values).committed.result()
    return {"seconds": round(time.perf_counter() - begun, 2), "parts": parts(paths, step)}


def measure(paths: Sequence[Path], total_bytes: int, saves: int, *, fills: bool) -> dict[str, object]:
    """Saves and a load over these paths. `fills`: the last path is full in between."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    store = fs.Striped(list(paths)) if len(paths) > 1 else paths[0]
    record: dict[str, object] = {}
    step = iter(range(1, 1000))
    with fs.Checkpointer(store, keep=1) as ckpt:
        lines = [save(ckpt, paths, total_bytes, next(step)) for _ in range(saves)]
        record["saves"] = lines
        record["rate"] = round(total_bytes / median(float(str(line["seconds"])) for line in lines[2:]))
        if fills:
            time.sleep(1.0)  # until retention (`keep`) has removed files
            with full(paths[-1].parent):
                record["while it is full"] = [save(ckpt, paths, total_bytes, next(step))]
            time.sleep(2.5)  # the path is tried again after 1 s, and after 2 s
            record["and after"] = [save(ckpt, paths, total_bytes, next(step)) for _ in range(3)]
        target: dict[str, object] = {
            "x": {key: np.zeros_like(tensor) for key, tensor in _tensors(total_bytes).items()}, "step": 0
        }
        begun = time.perf_counter()
        ckpt.load(target)
        record["load"] = round(total_bytes / (time.perf_counter() - begun))
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    return record


def measure_bucket(directory: Path, total_bytes: int, saves: int) -> dict[str, object]:
    """Medians of the saves but the first two, and all of them."""
    from bench.objects import local_server  # imported here: it needs obstore and moto

    record: dict[str, object] = {}
    with local_server() as url:
        for name, budget_bytes in (("held", 4 << 30), ("copied", 256 << 20)):
            store = fs.Striped([directory / name, f"{url}/{name}"], weights=[3, 1])
            lines = []
            with fs.Checkpointer(store, keep=1, budget_bytes=budget_bytes) as ckpt:
                for step in range(1, saves + 1):
                    before = time.process_time()
                    line = save(ckpt, [directory / name], total_bytes, step)
                    lines.append((float(str(line["seconds"])), round(time.process_time() - before, 2)))
            seconds, processor_seconds = zip(*lines[2:], strict=True)
            record[name] = {"seconds": median(seconds), "processor": median(processor_seconds), "saves": lines}
            shutil.rmtree(directory / name)
    return record


def _tensors(total_bytes: int) -> dict[int, NDArray[np.uint8]]:
    return dict(enumerate(np.array_split(np.zeros(total_bytes, np.uint8), TENSORS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--slow", type=Path, help="a directory on another device")
    parser.add_argument("--slow-rate", type=float, default=100e6)
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--bucket", action="store_true")
    given = parser.parse_args()
    if given.bucket:
        print(json.dumps(measure_bucket(given.directory, int(given.bytes), given.saves)))
        return
    total, fast = int(given.bytes), [given.directory / "one/gpt", given.directory / "two/gpt"]
    ways: list[tuple[str, list[Path]]] = [("one path", fast[:1]), ("two paths of one disk", fast)]
    if given.slow is not None:
        ways.append(("and a slow one", [*fast, given.slow / "three/gpt"]))
    results = {}
    with held_to(given.slow_rate if given.slow is not None else 0, given.slow or given.directory):
        for name, paths in ways:
            paths[-1].parent.mkdir(parents=True, exist_ok=True)
            results[name] = measure(paths, total, given.saves, fills=len(paths) == 3)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
