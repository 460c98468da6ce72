"""Codecs on the state of a real training: ratios and rates a core, beside others'; and saves with them, by device rate.

    python -m bench.codecs rates [--steps 200] [--rounds 5]
    python -m bench.codecs saves DIRECTORY [--bytes 4e8] [--rates 0.5 0.2 0.05] [--rounds 3]

`rates` trains the demo's GPT with AdamW, and encodes chunks of 1 MiB of its weights (fp32, and rounded to bf16) and of
both moments: by this codec, and where they are installed (`pip install blosc2 zipnn`) by blosc2 (shuffle and zstd at
level 1) and ZipNN. Rates are of the process' time on processors, the best of the rounds, of what goes in when encoding,
and comes out when decoding.

    python -m bench.codecs near DIRECTORY [--steps 60] [--rates 0.5 0.2] [--rounds 3]

`saves` measures from `save` to `committed`, and a cold load, in a process of its own that a control group (version 1,
blkio) holds to a rate; by turns without and with `compress`. It needs root; without such a group it says so.

`near` does so with that training's state, saved after each step: raw, by planes, and by what has changed since the last
save that was stored by itself (`kept_bytes`). Beside these, what the difference to the step before takes by zstd alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import flowstone as fs
from bench.meter import cool, files_below
from bench.script import folder_in
from flowstone import _native
from flowstone_demo.sizes import Sizes
from flowstone_demo.train import Training

CHUNK = _native.CHUNK_BYTES
SIZES = Sizes(width=384, depth=6, heads=6, length=64, batch=8, corpus_bytes=1 << 20, steps=1000)
GROUP = Path("/sys/fs/cgroup/blkio/flowstone-bench")

Chunks = list[np.ndarray]
Codec = tuple[Callable[[np.ndarray, int], bytes | None], Callable[[bytes, int], object]]


def trained(steps: int) -> dict[str, tuple[Chunks, int]]:
    """Whole chunks of each part of a training's state, and the length of their numbers in bytes."""
    run = Training(SIZES, seed=1)
    for _ in range(steps):
        run.learn()
    weights = [parameter.detach() for parameter in run.model.parameters()]
    states = list(run.optimizer.state.values())
    parts = {
        "weights": (weights, 4), "exp_avg": ([one["exp_avg"] for one in states], 4),
        "exp_avg_sq": ([one["exp_avg_sq"] for one in states], 4),
        "weights, bf16": ([weight.bfloat16().view(torch.int16) for weight in weights], 2),
    }
    found = {}
    for name, (tensors, width) in parts.items():
        data = torch.cat([tensor.flatten() for tensor in tensors]).numpy().view(np.uint8)
        found[name] = ([data[at : at + CHUNK] for at in range(0, len(data) - CHUNK + 1, CHUNK)], width)
    return found


def codecs() -> Iterator[tuple[str, Codec]]:
    """This codec, and those of others that are installed."""
    yield "flowstone planes", (_native.encode_planes, lambda stored, _: _native.decode_planes(stored, CHUNK))
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
    parts = trained(options.steps)
    print("| codec | part | ratio | encode GB/s | decode GB/s |\n|---|---|---|---|---|")
    for name, (encode, decode) in codecs():
        for part, (chunks, width) in parts.items():
            stored = [encode(chunk, width) for chunk in chunks]
            for chunk, one in zip(chunks, stored, strict=True):
                assert one is None or bytes(decode(one, width)) == chunk.tobytes(), (name, part)  # type: ignore[call-overload]
            length = sum(CHUNK if one is None else len(one) for one in stored)
            total = len(chunks) * CHUNK
            encoding = _best(options.rounds, lambda e=encode, c=chunks, w=width: [e(one, w) for one in c])
            coded = [one for one in stored if one is not None]
            decoding = _best(options.rounds, lambda d=decode, c=coded, w=width: [d(one, w) for one in c])
            print(
                f"| {name} | {part} | {total / length:.3f} | {total / encoding / 1e9:.2f} | "
                f"{len(coded) * CHUNK / decoding / 1e9:.2f} |", flush=True,
            )


def _best(rounds: int, work: Callable[[], object]) -> float:
    found = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return max(min(found), 1e-9)


@contextmanager
def held_to(bytes_per_s: float, directory: Path) -> Iterator[None]:
    """This process' requests on the device of the directory, at most at that rate; 0: no limit."""
    if not bytes_per_s:
        yield
        return
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    GROUP.mkdir(exist_ok=True)
    for direction in ("read", "write"):
        (GROUP / f"blkio.throttle.{direction}_bps_device").write_text(f"{device} {int(bytes_per_s)}")
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (GROUP.parent / "cgroup.procs").write_text(str(os.getpid()))
        GROUP.rmdir()


def state_of(total: int) -> dict[str, object]:
    """Mixed precision: bf16 weights, an fp32 copy, two moments."""
    torch.manual_seed(0)
    elements, layers = total // 14, max(1, total // 14 // 4_000_000)
    size = elements // layers
    tensors: dict[str, object] = {}
    for layer in range(layers):
        master = torch.randn(size) * 0.02
        tensors[f"{layer}.master"], tensors[f"{layer}.weight"] = master, master.bfloat16()
        tensors[f"{layer}.exp_avg"] = torch.randn(size) * 1e-4 * torch.rand(size)
        tensors[f"{layer}.exp_avg_sq"] = (torch.randn(size) * 1e-5) ** 2
    return tensors


def one_save(directory: Path, compress: str, total: int, rate: float) -> tuple[float, float, int, float]:
    """Seconds of the third save and of a cold load, bytes on disk, processor seconds of that save."""
    state = state_of(total)
    with folder_in(directory) as folder, held_to(rate, directory):
        with fs.Checkpointer(folder, engine=fs.EngineOptions(compress=compress), keep=fs.Keep()) as checkpointer:  # type: ignore[arg-type]
            for step in (1, 2, 3):
                for tensor in state.values():
                    assert isinstance(tensor, torch.Tensor)
                    tensor.view(torch.int16)[::4096] ^= 1  # no chunk is the one before
                begin, cpu = time.perf_counter(), time.process_time()
                checkpointer.save(step, state).committed.result()
                saving, used = time.perf_counter() - begin, time.process_time() - cpu
        stored = sum(path.stat().st_size for path in files_below(folder))
        cool(files_below(folder))
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}  # type: ignore[call-overload]
        with fs.Checkpointer(folder) as checkpointer:
            begin = time.perf_counter()
            checkpointer.load(into)
            loading = time.perf_counter() - begin
        assert all(torch.equal(into[name], tensor) for name, tensor in state.items())  # type: ignore[arg-type]
    return saving, loading, stored, used


def saves(options: argparse.Namespace) -> None:
    total, modes = int(options.bytes), ("off", options.compress)
    context = multiprocessing.get_context("spawn")
    print("| device GB/s | compress | durable GB/s | of raw | load GB/s | of raw's time | bytes | CPU s per GB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for rate in options.rates:
        found: dict[str, list[tuple[float, float, int, float]]] = {mode: [] for mode in modes}
        for round_ in range(options.rounds):
            for mode in modes if round_ % 2 else reversed(modes):
                with context.Pool(1) as pool:
                    found[mode].append(pool.apply(one_save, (options.directory, mode, total, rate * 1e9)))
        middle = {mode: list(map(statistics.median, zip(*rows, strict=True))) for mode, rows in found.items()}
        for mode, (saving, loading, stored, used) in middle.items():
            print(
                f"| {rate or 'full'} | {mode} | {total / saving / 1e9:.3f} | {middle['off'][0] / saving:.2f} | "
                f"{total / loading / 1e9:.3f} | {loading / middle['off'][1]:.2f} | {stored / total:.3f} | "
                f"{used / total * 1e9:.2f} |", flush=True,
            )


def mixed(run: Training) -> dict[str, torch.Tensor]:
    """The state of a training in mixed precision: fp32 weights, what they are rounded to, two moments."""
    found: dict[str, torch.Tensor] = {}
    for at, (parameter, state) in enumerate(run.optimizer.state.items()):
        weight = parameter.detach()  # type: ignore[attr-defined]
        found |= {f"{at}.master": weight, f"{at}.weight": weight.bfloat16()}
        found |= {f"{at}.{slot}": state[slot] for slot in ("exp_avg", "exp_avg_sq")}
    return found


def near_saves(directory: Path, compress: str, kept_bytes: int, steps: int, rate: float) -> tuple[float, ...]:
    """Medians of four saves, each a step after the one before: seconds, bytes written, processor seconds. Then the
    bytes of a state, and of its difference to the step before by zstd at level 1, if blosc2 is installed.
    """
    run = Training(SIZES, seed=1)
    for _ in range(steps):
        run.learn()
    found, total, last = [], 0, mixed(run)
    options = fs.EngineOptions(compress=compress, kept_bytes=kept_bytes)  # type: ignore[arg-type]
    with folder_in(directory) as folder, held_to(rate, directory):
        with fs.Checkpointer(folder, engine=options, keep=fs.Keep(last=2)) as checkpointer:
            for step in range(6):
                last = {name: tensor.clone() for name, tensor in mixed(run).items()}
                run.learn()
                state = mixed(run)
                total = sum(tensor.nbytes for tensor in state.values())
                begin, cpu = time.perf_counter(), time.process_time()
                saved = checkpointer.save(step, state).committed.result()
                spent = time.perf_counter() - begin, time.process_time() - cpu
                written = sum(row.bytes for row in saved.manifest.segments if row.home is None)
                found.append((spent[0], written, spent[1]))
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        with fs.Checkpointer(folder) as checkpointer:
            checkpointer.load(into)
        assert all(torch.equal(into[name], tensor) for name, tensor in state.items())
    return (*map(statistics.median, zip(*found[2:], strict=True)), total, _difference(last, state))


def _difference(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> int:
    try:
        import blosc2
    except ImportError:
        return 0
    length = 0
    for name, tensor in now.items():
        a, b = (one.contiguous().view(torch.uint8).flatten().numpy() for one in (tensor, before[name]))
        left = a ^ b
        for at in range(0, len(left), CHUNK):
            part = left[at : at + CHUNK]
            length += len(blosc2.compress(
                part, typesize=1, codec=blosc2.Codec.ZSTD, clevel=1, filter=blosc2.Filter.NOFILTER
            ))
    return length


def near(options: argparse.Namespace) -> None:
    modes = {"raw": ("off", 0), "planes": ("max", 0), "xor and planes": ("max", 1 << 40)}
    context = multiprocessing.get_context("spawn")
    print("| device GB/s | how | durable GB/s | of raw | written of the state | CPU s per GB |")
    print("|---|---|---|---|---|---|", flush=True)
    for rate in options.rates:
        found: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in modes}
        for _ in range(options.rounds):
            for mode, (compress, kept) in modes.items():
                with context.Pool(1) as pool:
                    work = options.directory, compress, kept, options.steps, rate * 1e9
                    found[mode].append(pool.apply(near_saves, work))
        middle = {mode: list(map(statistics.median, zip(*rows, strict=True))) for mode, rows in found.items()}
        for mode, (saving, written, used, total, _) in middle.items():
            print(
                f"| {rate or 'full'} | {mode} | {total / saving / 1e9:.3f} | {middle['raw'][0] / saving:.2f} | "
                f"{written / total:.3f} | {used / total * 1e9:.2f} |", flush=True,
            )
    if total and middle["raw"][4]:
        print(f"the difference to the step before, by zstd alone: {middle['raw'][4] / total:.3f} of the state")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("rates")
    one.add_argument("--steps", type=int, default=200)
    one.set_defaults(run=rates)
    other = verbs.add_parser("saves")
    other.add_argument("directory", type=Path)
    other.add_argument("--bytes", type=float, default=4e8)
    other.add_argument("--rates", type=float, nargs="*", default=[0, 0.5, 0.2, 0.05])
    other.add_argument("--compress", default="max")
    other.set_defaults(run=saves)
    third = verbs.add_parser("near")
    third.add_argument("directory", type=Path)
    third.add_argument("--steps", type=int, default=60)
    third.add_argument("--rates", type=float, nargs="*", default=[0.5, 0.2])
    third.set_defaults(run=near)
    for verb in (one, other, third):
        verb.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
