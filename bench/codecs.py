"""Codecs on the state of a real training: ratios and rates a core compared with others, and saves with them.

    python -m bench.codecs rates [--steps 200] [--rounds 5]
    python -m bench.codecs saves DIRECTORY [--bytes 4e8] [--rates 0.5 0.2 0.05] [--rounds 3] [--training]

`rates` trains the demo's GPT with AdamW, and encodes chunks of 1 MiB of its weights (fp32, and rounded to bf16) and of
both moments: by this codec, and by blosc2 (shuffle and zstd at level 1) and ZipNN if they are installed
(bench/pins/codecs.txt). Rates are bytes before encoding, or after decoding, per second of processor time; the best of
the rounds counts.

    python -m bench.codecs near DIRECTORY [--steps 60] [--rates 0.5 0.2] [--rounds 3] [--rivals ENVIRONMENTS]
                                [--distances 1 10 50] [--lr 6e-5]

`saves` measures from `save` to `committed`, and a cold load, in a process whose device rate a control group (version 1,
blkio) limits, with and without `compress` in turn. It needs root, and reports if there is no such group.

`near` measures the same with that training's state, saved after each step: raw, by planes, and by the difference from
the last save that was stored without a base (`kept_bytes`). `--rivals` adds Orbax, with its zstd and without, and the
difference from the step before by zstd; their packages are installed there (bench/pins). `--distances` sets how many
steps each save's base is before it. `--lr` is the learning rate of these steps, and of a tenth as many before them, to
measure a late training without all steps up to there.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

import flowstone as fs
from bench.codec_rivals import KINDS
from bench.codec_states import CHUNK, after, change, mixed, mixed_of, trained
from bench.environments import Environment
from bench.launch import ROOT
from bench.meter import cool, files_below
from bench.script import folder_in
from bench.throttle import held_to
from flowstone import _native
from flowstone.config import Compress
from flowstone.format.codec import PLANES
from flowstone_demo.train import Training

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>

Codec = tuple[Callable[[np.ndarray, int], bytes | None], Callable[[bytes, int], object]]


def codecs() -> Iterator[tuple[str, Codec]]:
    """This codec, and the installed codecs of others."""
    yield "flowstone planes", (_native.encode_planes, lambda stored, _: _native.decode_chunk(PLANES.id, stored, CHUNK))
    for name, rival in (("blosc2, shuffle and zstd 1", _blosc2), ("ZipNN", _zipnn)):
        try:
            yield name, rival()
        except ImportError:
            print(f"{name} is not installed, and left out")


def _blosc2() -> Codec:
    import blosc2

    options = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filter": blosc2.Filter.SHUFFLE}
    blosc2.set_nthreads(1)
    return (
        lambda data, width: blosc2.compress(data, typesize=width, **options),
        lambda stored, _: blosc2.decompress(stored),
    )


def _zipnn() -> Codec:
    from zipnn import ZipNN

    made = {
        width: ZipNN(input_format="byte", bytearray_dtype=kind, threads=1)
        for width, kind in ((4, "float32"), (2, "bfloat16"))
    }
    return (
        lambda data, width: made[width].compress(data.tobytes()),
        lambda stored, width: made[width].decompress(stored),
    )


def rates(options: argparse.Namespace) -> None:
    _reuse_memory()
    parts, within = trained(options.steps), dict[str, float]()
    print("| codec | part | ratio | encode GB/s | decode GB/s |\n|---|---|---|---|---|")
    for name, (encode, decode) in codecs():
        for part, (chunks, width) in parts.items():
            stored = [encode(chunk, width) for chunk in chunks]
            for chunk, frame in zip(chunks, stored, strict=True):
                assert frame is None or bytes(decode(frame, width)) == chunk.tobytes(), (name, part)  # type: ignore[call-overload]
            length = sum(CHUNK if frame is None else len(frame) for frame in stored)
            total = len(chunks) * CHUNK
            encoding = _best(options.rounds, lambda e=encode, c=chunks, w=width: _each(e, c, w))
            coded = [frame for frame in stored if frame is not None]
            decoding = _best(options.rounds, lambda d=decode, c=coded, w=width: _each(d, c, w))
            handing = _best(options.rounds, lambda c=coded: _each(_copy, c, 0))
            within[f"{name}, {part}"] = total / max(encoding - handing, 1e-9) / 1e9
            print(
                f"| {name} | {part} | {total / length:.3f} | {total / encoding / 1e9:.2f} | "
                f"{len(coded) * CHUNK / decoding / 1e9:.2f} |", flush=True,
            )
    print("\nEncode GB/s without the copy into Python's bytes, which a save does not make: "
          + "; ".join(f"{key} {rate:.2f}" for key, rate in within.items()))


def _each(act: Callable[..., object], values: Sequence[object], width: int) -> None:
    """The result's memory is reused for the next one, like the arena in a save."""
    for value in values:
        act(value, width)


def _copy(stored: bytes, _: int) -> bytes:
    return bytes(memoryview(stored))


def _reuse_memory() -> None:
    """Make malloc keep freed memory, for every codec: mapping new pages takes longer than encoding."""
    libc = ctypes.CDLL(None)
    for setting in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        assert libc.mallopt(setting, 1 << 30)


def _best(rounds: int, work: Callable[[], object]) -> float:
    rows = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        rows.append(time.process_time() - begin)
    return max(min(rows), 1e-9)


def one_process(
    directory: Path, compress: Compress, total: int, rate: float, saves: int, training: bool, workers: int | None = None
) -> tuple[float, float, int, float, float]:
    """Medians of all saves but the first two.

    Seconds, and processor seconds; seconds of a cold load; bytes on disk; and seconds of a training step meanwhile, 0
    without training.
    """
    state, samples, steps = mixed_of(total), [], list[float]()
    run = after(2) if training else None
    with folder_in(directory) as folder, held_to(rate, directory):
        engine = fs.EngineOptions(compress=compress, workers=workers)
        with fs.Checkpointer(folder, engine=engine, keep=1) as checkpointer:
            for step in range(saves):
                change(state)
                if run is not None:
                    run.train_step()
                samples.append(durable_save(checkpointer, step, state, run, steps))
                settle(folder, kept=1)
        stored = sum(path.stat().st_size for path in files_below(folder))
        cool(files_below(folder))
        into = {name: torch.ones_like(tensor) for name, tensor in state.items()}  # touched, which zeros would not be
        with fs.Checkpointer(folder, engine=fs.EngineOptions(workers=workers)) as checkpointer:
            begin = time.perf_counter()
            checkpointer.load(into)
            loading = time.perf_counter() - begin
        assert all(torch.equal(into[name], tensor) for name, tensor in state.items())
    saving, used = map(statistics.median, zip(*samples[2:], strict=True))
    return saving, loading, stored, used, statistics.median(steps) if steps else 0.0


def settle(folder: Path, *, kept: int) -> None:
    """Wait until retention has removed all but that many checkpoints.

    Removing 1 GB takes the file system 0.1 s, in which it allocates no space for the next save. Between the saves of a
    training there is time for that.
    """
    while sum(path.name.startswith(("step-", ".deleting-")) for path in folder.iterdir()) > kept:
        time.sleep(0.001)


def durable_save(
    checkpointer: fs.Checkpointer, step: int, state: dict[str, torch.Tensor], run: Training | None, steps: list[float]
) -> tuple[float, float]:
    """Seconds until it is durable, and processor seconds of this process; `run` trains meanwhile."""
    ended: list[float] = []
    begin, cpu = time.perf_counter(), time.process_time()
    save = checkpointer.save(step, state, fence="manual")
    save.committed.add_done_callback(lambda _: ended.append(time.perf_counter()))
    while run is not None and not save.committed.done():
        began = time.perf_counter()
        run.train_step()
        steps.append(time.perf_counter() - began)
    save.committed.result()
    return (ended[0] if ended else time.perf_counter()) - begin, time.process_time() - cpu


def saves(options: argparse.Namespace) -> None:
    total, modes = int(options.bytes), ("off", *options.compress)
    context = multiprocessing.get_context("spawn")
    heads = "device GB/s", "compress", "durable GB/s", "of raw", "load GB/s", "of raw's time", "bytes", "CPU s per GB"
    print(f"| {' | '.join(heads)} | step ms |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for rate in options.rates:
        samples: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in modes}
        for round_ in range(options.rounds):
            for mode in modes if round_ % 2 else reversed(modes):
                work = options.directory, mode, total, rate * 1e9, options.saves, options.training, options.workers
                with context.Pool(1) as pool:
                    samples[mode].append(pool.apply(one_process, work))
        for mode, rows in samples.items():
            saving, loading, stored, used, step = map(statistics.median, zip(*rows, strict=True))
            of_raw, of_raws_time = _paired(samples, mode, 0, over=True), _paired(samples, mode, 1, over=False)
            used_text = "" if options.training else f"{used / total * 1e9:.2f}"
            durable, loaded = (f"{total / seconds / 1e9:.3f}" for seconds in (saving, loading))
            row = (
                str(rate or "full"), mode, durable, f"{of_raw:.2f}", loaded, f"{of_raws_time:.2f}",
                f"{stored / total:.3f}", used_text, f"{step * 1e3:.0f}" if step else "",
            )
            print(f"| {' | '.join(row)} |", flush=True)


def _paired(samples: dict[str, list[tuple[float, ...]]], mode: str, column: int, *, over: bool) -> float:
    """The median of the rounds' ratios to raw. `over`: raw divided by this mode."""
    ratios = [mine[column] / raw[column] for mine, raw in zip(samples[mode], samples["off"], strict=True)]
    return statistics.median(1 / ratio for ratio in ratios) if over else statistics.median(ratios)


def near_saves(
    directory: Path, compress: Compress, kept_bytes: int, states: str, rate: float, runs: int
) -> tuple[float, ...]:
    """Medians of saves: seconds, bytes written, processor seconds.

    In each run a new Checkpointer saves all states. The saves from the third on are measured, or the second if it is
    the last.
    """
    rows = []
    options = fs.EngineOptions(compress=compress, kept_bytes=kept_bytes)
    into: dict[str, torch.Tensor] = {}
    saved_states = torch.load(states)
    for _ in range(runs):
        with folder_in(directory) as folder, held_to(rate, directory):
            with fs.Checkpointer(folder, engine=options, keep=fs.Keep(last=2)) as checkpointer:
                checkpointer.prepare(saved_states[0])
                for step, state in enumerate(saved_states):
                    begin, cpu = time.perf_counter(), time.process_time()
                    saved = checkpointer.save(step, state).committed.result()
                    spent = time.perf_counter() - begin, time.process_time() - cpu
                    settle(folder, kept=2)
                    written = sum(row.bytes for row in saved.manifest.segments if row.home is None)
                    if step >= min(2, len(saved_states) - 1):
                        rows.append((spent[0], written, spent[1]))
                    # Touched, which zeros would not be.
                    into = {name: torch.ones_like(tensor) for name, tensor in state.items()}
            with fs.Checkpointer(folder) as checkpointer:
                checkpointer.load(into)
            assert all(torch.equal(into[name], tensor) for name, tensor in state.items())
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def successions(options: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, torch.Tensor]], int]]:
    """Lists of states that a Checkpointer saves one after the other, the number of Checkpointers, and a description.

    With a distance, a list has only two states: a chunk whose base gains too little would get another base, nearer to a
    third state.
    """
    run = after(options.steps)
    if options.lr:
        for group in run.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = options.lr
        run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda _: 1.0)
        for _ in range(options.steps // 10):
            run.train_step()
    expected = {0, *options.distances} if options.distances else range(options.saves)
    states = dict[int, dict[str, torch.Tensor]]()
    for step in range(max(expected) + 1):
        if step in expected:
            states[step] = {name: tensor.clone() for name, tensor in mixed(run).items()}
        run.train_step()
    if not options.distances:
        yield "as they come", list(states.values()), 1
    for distance in options.distances:
        yield str(distance), [states[0], states[distance]], options.saves // 2


def near(options: argparse.Namespace) -> None:
    modes: dict[str, tuple[Compress, int]] = {
        "raw": ("off", 0), "planes": ("max", 0), "xor and planes": ("max", 1 << 40),
    }
    heads = ("device GB/s", "steps since base", "method", "durable GB/s", "of raw", "written of the state",
             "CPU s per GB")
    print(f"| {' | '.join(heads)} |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for distance, states, runs in successions(options):
        total = sum(tensor.nbytes for tensor in states[0].values())
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            torch.save(states, f"{memory}/states")
            for rate in options.rates:
                result = _rounds(options, modes, f"{memory}/states", rate * 1e9, runs)
                for mode, (saving, written, used) in result.items():
                    print(
                        f"| {rate or 'full'} | {distance} | {mode} | {total / saving / 1e9:.3f} | "
                        f"{result['raw'][0] / saving:.2f} | {written / total:.3f} | {used / total * 1e9:.2f} |",
                        flush=True,
                    )


def _rounds(
    options: argparse.Namespace, modes: Mapping[str, tuple[Compress, int]], states: str, rate: float, runs: int
) -> dict[str, list[float]]:
    """By mode and rival: the medians that `near_saves` returns."""
    samples: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(options.rounds):
        for mode, (compress, kept) in modes.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                work = options.directory, compress, kept, states, rate, runs
                samples.setdefault(mode, []).append(pool.apply(near_saves, work))
        for kind in KINDS if options.rivals else ():
            samples.setdefault(kind, []).append(_rival(kind, options, states, rate))
    return {mode: list(map(statistics.median, zip(*rows, strict=True))) for mode, rows in samples.items()}


def _rival(kind: str, options: argparse.Namespace, states: str, rate: float) -> tuple[float, ...]:
    """Like `near_saves`, by bench/codec_rivals.py, in the environment of its packages."""
    python = Environment(options.rivals).python(KINDS[kind])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [str(python), "-m", "bench.codec_rivals", kind, str(options.directory), states, str(rate)]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return tuple(json.loads(completed.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    first = verbs.add_parser("rates")
    first.add_argument("--steps", type=int, default=200)
    first.set_defaults(run=rates)
    other = verbs.add_parser("saves")
    other.add_argument("directory", type=Path)
    other.add_argument("--bytes", type=float, default=4e8)
    other.add_argument("--workers", type=int, help="of the engine; by default as many as it takes by itself")
    other.add_argument("--rates", type=float, nargs="*", default=[0, 0.5, 0.2, 0.05])
    other.add_argument("--compress", nargs="*", default=["max", "auto"])
    other.add_argument("--saves", type=int, default=4, help="of a process; the first two are not measured")
    other.add_argument("--training", action="store_true", help="train a GPT on all processors meanwhile")
    other.set_defaults(run=saves)
    third = verbs.add_parser("near")
    third.add_argument("directory", type=Path)
    third.add_argument("--steps", type=int, default=60)
    third.add_argument("--rates", type=float, nargs="*", default=[0.5, 0.2])
    third.add_argument("--saves", type=int, default=6, help="of a process; the first two are not measured, "
                       "with a distance every other one")
    third.add_argument("--distances", type=int, nargs="*", default=[], help="steps between a save and its base")
    third.add_argument("--lr", type=float, help="the learning rate from there on")
    third.add_argument("--rivals", type=Path, help="where environments with their packages are made; none: no rivals")
    third.set_defaults(run=near)
    for verb in (first, other, third):
        verb.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.run is near and options.distances and options.rivals:
        parser.error("rivals have the step before as base: measure them without --distances")
    options.run(options)


if __name__ == "__main__":
    main()
