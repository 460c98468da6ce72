"""Stage "ceilings": the rates of copies, pinning, digests and the disk alone, to which all others are relative."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from bench import fio
from bench.gpu.accelerator import MIB, Accelerator, Cuda, opened
from bench.gpu.options import MEMORY, Options, emit, note, parse
from bench.meter import cool
from flowstone import _native
from flowstone.stage.device import SideStream, side_stream
from flowstone.torch import tensors

SIZES = (256 << 10, 1 * MIB, 8 * MIB, 32 * MIB, 64 * MIB)
DISK_THREADS, DISK_REQUEST_BYTES = 16, 8 * MIB


def main() -> None:
    options = parse()
    emit("XXH3 on one core", _digest_rate(), "GB/s")
    with opened(options) as device:
        _copies(device, options)
        _digests(device, options)
        _strided(device, options)
        if isinstance(device, Cuda):
            _completions(device)
        _pinning(device)
    for place, where in ((options.scratch, "disk"), (MEMORY, "tmpfs")):
        try:
            size = 64 * MIB if options.simulate else min(8192 * MIB, shutil.disk_usage(place).free // 4 // MIB * MIB)
            _file_system(place, where, size, by_fio=where == "disk" and not options.simulate)
        except OSError as error:  # a container's may be missing or too small
            emit(f"{where}: not measured", str(error))


def _copies(device: Accelerator, options: Options) -> None:
    """Copies in both directions, by length, from pinned and pageable memory, on one stream and on two."""
    whole = 8 * MIB if options.simulate else 1024 * MIB
    there = device.tensor(torch.zeros(whole, dtype=torch.uint8))
    for kind, here in (("pinned", device.pinned(whole)), ("pageable", torch.ones(whole, dtype=torch.uint8))):
        for size in [size for size in SIZES if size <= whole]:
            parts = list(zip(here.split(size), there.split(size), strict=True))
            for streams in (1, 2) if kind == "pinned" else (1,):
                seconds = [device.copies(parts, streams) for _ in range(4)][1:]
                emit(f"D2H {kind} {_size(size)} x {streams}", whole / 1e9 / median(seconds), "GB/s")
                back = [(far, near) for near, far in parts]
                seconds = [device.copies(back, streams) for _ in range(4)][1:]
                emit(f"H2D {kind} {_size(size)} x {streams}", whole / 1e9 / median(seconds), "GB/s")


def _digests(device: Accelerator, options: Options) -> None:
    """The kernel that digests when a save begins, compared with the rate of a copy within the device."""
    whole = 8 * MIB if options.simulate else 4096 * MIB
    there, other = (device.tensor(torch.zeros(whole, dtype=torch.uint8)) for _ in range(2))
    seconds = [_between(device, lambda: other.copy_(there)) for _ in range(4)][1:]
    emit("device memory, read and written by a copy", 2 * whole / 1e9 / median(seconds), "GB/s")
    memory = tensors.memory_of(there)
    stream = side_stream(memory.device)
    if stream is None or stream.digest(*_rows(memory.address, [MIB])) is None:
        emit("digest kernel", "refused by the driver")
        return
    for size in [size for size in (1 * MIB, 64 * MIB, 1024 * MIB, 4096 * MIB) if size <= whole]:
        digest = partial(stream.digest, *_rows(memory.address, [size]))
        seconds = [_between(device, digest) for _ in range(4)][1:]
        emit(f"digest kernel, {_size(size)}", size / 1e9 / median(seconds), "GB/s", seconds=median(seconds))
    emit("digests of the device are those of the host", _digests_agree(stream, there, memory.address))


def _digests_agree(stream: SideStream, there: torch.Tensor, address: int) -> bool:
    """Rows at unaligned places, with short ends."""
    chance = torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8)
    there[: len(chance)] = chance.to(there.device)
    rows = [(0, 3 * MIB), (1, MIB + 241), (6, MIB + 240), (8, 777_777), (16, 300)]
    digested = [stream.digest(*_rows(address + first, [size])) for first, size in rows]
    stream.wait_current()
    stream.native.synchronize()
    data = chance.numpy()
    return all(
        batch is not None
        and batch.digests()[number] == _native.xxh3_64(data[first + start : first + min(start + MIB, size)])
        for batch, (first, size) in zip(digested, rows, strict=True) for number, start in enumerate(range(0, size, MIB))
    )


def _strided(device: Accelerator, options: Options) -> None:
    """The kernels for strided memory: one copies it in order into pinned memory, the other digests it.

    By width of an element, and by layout.
    """
    side = 512 if options.simulate else 8192
    raw = device.tensor(torch.randint(0, 256, (side * side * 4,), dtype=torch.uint8))
    matrix = side, side
    laid = {
        f"turned, {dtype.itemsize} bytes": raw.view(dtype)[: side * side].view(matrix).t()
        for dtype in (torch.uint8, torch.bfloat16, torch.float32)
    } | {
        "channels last, 4 bytes": raw.view(torch.float32)[: side * side].view(-1, 16, 16, 256).movedim(3, 1),
        "narrow columns, 4 bytes": raw.view(torch.float32).view(matrix)[:, 1 : side // 2 : 2],
    }
    for name, tensor in laid.items():
        memory = tensors.memory_of(tensor)
        stream, size = side_stream(memory.device), tensor.numel() * tensor.itemsize
        if stream is None or not stream.native.packs:
            emit("strided kernel", "refused by the driver")
            return
        layout = _native.GatherLayout(
            item_bytes=memory.item_bytes, shape=memory.shape, strides_bytes=memory.strides_bytes
        )
        pack = partial(
            stream.gather, address=np.array([memory.address], np.uint64), begin=np.zeros(1, np.uint64),
            length=np.array([size], np.uint32), layout=np.zeros(1, np.int64), layouts=(layout,),
        )
        seconds = [_between(device, pack) for _ in range(4)][1:]
        emit(f"strided kernel, {name}", size / 1e9 / median(seconds), "GB/s", seconds=median(seconds))
        actual = pack()
        stream.wait_current()
        stream.native.synchronize()
        expected = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
        emit(f"strided kernel, {name}: in order", bool(np.array_equal(actual[:size], expected)))
        _strided_digests(device, stream, name, memory.address, layout, expected)


def _strided_digests(
    device: Accelerator, stream: SideStream, name: str, address: int, layout: _native.GatherLayout,
    expected: NDArray[np.uint8],
) -> None:
    """The kernel that digests the same memory in place. `expected`: its bytes in order."""
    rows = *_rows(address, [len(expected)]), np.zeros(1, np.int64), (layout,)
    digest = partial(stream.digest, *rows)
    seconds = [_between(device, digest) for _ in range(4)][1:]
    rate = len(expected) / 1e9 / median(seconds)
    emit(f"strided digest kernel, {name}", rate, "GB/s", seconds=median(seconds))
    actual = digest()
    stream.wait_current()
    stream.native.synchronize()
    parts = [expected[offset : offset + MIB] for offset in range(0, len(expected), MIB)]
    same = actual is not None and actual.digests().tolist() == [_native.xxh3_64(part) for part in parts]
    emit(f"strided digest kernel, {name}: the host's digests", same)


def _rows(address: int, sizes: list[int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Columns of rows that begin at one address."""
    return np.full(len(sizes), address, np.uint64), np.array(sizes, np.uint64)


def _between(device: Accelerator, work: Callable[[], object]) -> float:
    """The device's seconds for the work that `work` puts into the current stream."""
    begin = device.mark()
    kept = work()
    end = device.mark()
    seconds = end() - begin()
    del kept
    return seconds


def _completions(device: Cuda) -> None:
    """The cost for a stream of copies of reporting each end: by nothing, an event, or a callback of the host.

    The callback is a function of libc that does nothing, so that only the driver's part is measured.
    """
    size, count = 1 * MIB, 256
    here, there = device.pinned(size), torch.empty(size, dtype=torch.uint8, device=device.device)
    driver, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
    stream = torch.cuda.Stream(device.device)
    handle = ctypes.c_void_p(stream.cuda_stream)
    events = [torch.cuda.Event() for _ in range(count)]
    ways: dict[str, Callable[[int], object]] = {
        "none": lambda _: None,
        "event": lambda index: events[index].record(stream),
        "callback": lambda _: driver.cuStreamAddCallback(handle, ctypes.cast(libc.getpid, ctypes.c_void_p), None, 0),
    }
    for way, tell in ways.items():
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with torch.cuda.stream(stream):
                for index in range(count):
                    here.copy_(there, non_blocking=True)
                    tell(index)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        emit(f"a copy of 1 MiB, completion told by: {way}", 1e6 * median(seconds[1:]) / count, "us")


def _pinning(device: Accelerator) -> None:
    """Pinning touched memory by cuMemHostRegister, in slabs like the arena's."""
    if not isinstance(device, Cuda):
        note("pinning is the driver's: the simulated device has none")
        return
    runtime = torch.cuda.cudart()
    for size in (8 * MIB, 256 * MIB, 1024 * MIB):
        slab = mmap.mmap(-1, size)
        array = np.frombuffer(slab, np.uint8)
        array[::4096] = 1
        begin = time.perf_counter()
        error = runtime.cudaHostRegister(array.ctypes.data, size, 0)
        taken = time.perf_counter() - begin
        if int(error) != 0:
            emit(f"pinning a slab of {_size(size)}", f"refused: {error}")
            continue
        emit(f"pinning a slab of {_size(size)}", taken / (size / 1e9), "s/GB")
        runtime.cudaHostUnregister(array.ctypes.data)


def _digest_rate() -> float:
    data, count = np.ones(32 * MIB, np.uint8), 8
    _native.xxh3_64(data)
    begin = time.perf_counter()
    for _ in range(count):
        _native.xxh3_64(data)
    return count * len(data) / 1e9 / (time.perf_counter() - begin)


def _file_system(place: Path, where: str, size: int, *, by_fio: bool) -> None:
    """By fio if it is installed, or else by threads that write and read aligned blocks with direct I/O."""
    folder = place / "flowstone-gpu-ceiling"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        if fio.is_installed() and by_fio:
            samples = fio.choose(folder, size // 4, passes=1, settle=lambda: None, on_done=lambda: None)
            for way in ("write", "read"):
                best = fio.best(samples, way)
                rate = max(s.gb_per_s for s in samples if s.direction == way)
                emit(f"{where} {way}", rate, "GB/s", by=f"fio, {best}")
            return
        emit(f"{where} write", _threaded(folder / "file", size, os.O_WRONLY | os.O_CREAT), "GB/s", by="threads")
        cool([folder / "file"])
        emit(f"{where} read", _threaded(folder / "file", size, os.O_RDONLY), "GB/s", by="threads")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _threaded(path: Path, size: int, flags: int) -> float:
    """GB/s of all bytes, with the sync. On a file system without O_DIRECT, through its cache."""
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    blocks = [mmap.mmap(-1, DISK_REQUEST_BYTES) for _ in range(DISK_THREADS)]
    for block in blocks:
        block.write(b"x" * DISK_REQUEST_BYTES)
    if flags & os.O_CREAT:
        os.posix_fallocate(fd, 0, size)
    failed: list[BaseException] = []

    def move(number: int) -> None:
        try:
            for i in range(number * DISK_REQUEST_BYTES, size, DISK_THREADS * DISK_REQUEST_BYTES):
                moved = os.pwrite(fd, blocks[number], i) if flags & os.O_CREAT else os.preadv(fd, [blocks[number]], i)
                if moved != DISK_REQUEST_BYTES:
                    raise OSError(f"{moved} of {DISK_REQUEST_BYTES} bytes")
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=move, args=(number,)) for number in range(DISK_THREADS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fsync(fd)
    seconds = time.perf_counter() - begin
    os.close(fd)
    if failed:
        raise failed[0]
    return size / 1e9 / seconds


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // 1024} KiB"
