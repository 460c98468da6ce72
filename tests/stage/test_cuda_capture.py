"""Tests of capture and restore that need a GPU; `test_device_memory.py` tests the same path on a simulated device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import flowstone as fs
from flowstone import _native
from flowstone.torch.cuda_stream import CudaSideStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MIB = 1 << 20
_Read = TypeVar("_Read")


def training(**options: object) -> dict[str, object]:
    """Some 200 MB of parameters and slots."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)), nn.LayerNorm(2048)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]
    state = {"model": model, "optimizer": optimizer, "step": 0}
    step(state)
    return state


def step(state: dict[str, object]) -> None:
    x = torch.randn(8, 2048, device="cuda")
    state["model"](x).square().mean().backward()  # type: ignore[operator]
    state["optimizer"].step()  # type: ignore[attr-defined]


def held(state: dict[str, object]) -> list[torch.Tensor]:
    slots = [slot for of in state["optimizer"].state.values() for slot in of.values()]  # type: ignore[attr-defined]
    return [*(parameter.data for parameter in state["model"].parameters()), *slots]  # type: ignore[attr-defined]


def fill(state: dict[str, object], value: float) -> None:
    for tensor in held(state):
        tensor.fill_(value)
    state["step"] = int(value)


def values(checkpoint: fs.Checkpoint) -> set[float]:
    checkpoint.verify()
    values = {value for name in checkpoint.tensors for value in checkpoint.read(name).unique().tolist()}
    return values | {float(checkpoint.objects["step"])}


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_what_is_loaded_is_what_was_saved(store: Path, options: dict[str, object]) -> None:
    state = training(**options)
    with fs.Checkpointer(store, budget_bytes=32 * MIB) as checkpointer:
        save = checkpointer.save(1, state)
        expected = [tensor.clone() for tensor in held(state)]
        step(state)
        save.committed.result().verify()
        checkpointer.load(state)
    assert all(map(torch.equal, held(state), expected))


@pytest.mark.parametrize("budget_mib", [32, 512])
def test_every_checkpoint_holds_exactly_one_value(store: Path, budget_mib: int) -> None:
    state, saves = training(), []
    with fs.Checkpointer(store, budget_bytes=budget_mib * MIB, saves_in_flight=3) as checkpointer:
        for number in range(1, 11):
            torch.cuda._sleep(10_000_000)  # what `fill` and `save` put on the stream is still to come
            fill(state, number)
            saves.append(checkpointer.save(number, state))
            step(state)  # waits, on the host for what is not queued and on the device for what is not copied
    for save in saves:
        checkpoint = save.committed.result()
        assert values(checkpoint) == {float(checkpoint.step)}


def test_save_does_not_wait_for_what_the_stream_holds(store: Path) -> None:
    state = training()
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
        busy.record()
        save = checkpointer.save(2, state)
        assert not busy.query(), "save has waited for the device"
        save.committed.result().verify()


def test_a_change_that_escapes_is_noticed_or_came_too_late(store: Path) -> None:
    state = training()
    fill(state, 1)
    with fs.Checkpointer(store, budget_bytes=16 * MIB, on_error="continue") as checkpointer:
        save = checkpointer.save(1, state)
        with torch.no_grad():
            for parameter in state["model"].parameters():  # type: ignore[attr-defined]
                parameter.add_(1)
        error = save.committed.exception(60)
        if error is None:
            assert values(save.committed.result()) == {1.0}
        else:
            assert isinstance(error, fs.StateChangedError)
            assert error.names


def test_parts_casts_and_strides_reach_the_device(store: Path) -> None:
    tensor = torch.randn(512, 1024, device="cuda")
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": tensor, "y": tensor.t()}).committed.result()
        target = {"x": torch.zeros_like(tensor, dtype=torch.float64), "y": torch.zeros(512, 1024, device="cuda").t()}
        checkpointer.load(target, rules=[fs.Cast("*")])
    assert torch.equal(target["x"], tensor.double())
    assert torch.equal(target["y"], tensor.t())


def test_rows_and_columns_go_straight_to_their_place(store: Path) -> None:
    whole = torch.randn(3000, 1000, device="cuda")
    wide = torch.zeros(3000, 500, device="cuda")
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": whole}).committed.result()
        for target, (row, column) in (
            (torch.zeros(900, 1000, device="cuda"), (700, 0)), (torch.zeros(3000, 125, device="cuda"), (0, 250)),
            (wide[:, 100:200], (0, 900)), (torch.zeros(11, 3, device="cuda"), (500, 333)),
        ):
            checkpointer.load({"x": fs.Shard(target, (3000, 1000), (row, column))})
            assert torch.equal(target, whole[row : row + target.shape[0], column : column + target.shape[1]])
    assert not wide[:, :100].any()
    assert not wide[:, 200:].any()


def test_copies_do_not_wait_for_streams_of_torchs_pool(store: Path) -> None:
    state = training()
    pool = [torch.cuda.Stream() for _ in range(64)]  # twice what torch has: each of its streams is busy
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        torch.cuda.synchronize()
        for stream in pool:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(4_000_000_000)
        busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
        busy.record(pool[-1])
        checkpointer.save(2, state).committed.result().verify()
        assert not busy.query(), "copies have waited for a stream of the pool"
        torch.cuda.synchronize()


def test_a_save_inside_of_a_graph_capture_is_refused_and_leaves_the_capture_whole(store: Path) -> None:
    state, x = training(), torch.ones(1024, device="cuda")
    with fs.Checkpointer(store) as checkpointer:
        save = checkpointer.save(1, state)
        graph = torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph):  # the default mode refuses unsafe calls of every thread
            x.add_(1)
            with pytest.raises(fs.StateError, match="inside of a CUDA graph capture"):
                checkpointer.save(2, state)
        save.committed.result().verify()
        graph.replay()
        assert x.unique().tolist() == [2.0]


def test_replays_of_a_step_wait_for_the_save_at_a_fence(store: Path) -> None:
    state, value = training(capturable=True), torch.zeros((), device="cuda")
    held_tensors, saves = held(state), []
    graph = torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph):
        value.add_(1)
        for tensor in held_tensors:
            tensor.copy_(value.expand_as(tensor))
    with fs.Checkpointer(store, budget_bytes=64 * MIB, saves_in_flight=3) as checkpointer:
        for number in range(1, 11):
            checkpointer.fence()
            graph.replay()
            state["step"] = number
            saves.append(checkpointer.save(number, state))
    for save in saves:
        checkpoint = save.committed.result()
        assert values(checkpoint) == {float(checkpoint.step)}


def test_an_optimizer_that_steps_on_another_stream_waits_for_the_copies_too(store: Path) -> None:
    layers = [nn.Linear(2048, 2048).cuda() for _ in range(2)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in layers]
    state = {"model": nn.ModuleList(layers), "one": optimizers[0], "two": optimizers[1]}
    streams = torch.cuda.current_stream(), torch.cuda.Stream()
    with fs.Checkpointer(store, budget_bytes=32 * MIB) as checkpointer:
        for number in range(1, 6):
            for layer in layers:
                for parameter in layer.parameters():
                    parameter.data.fill_(number)
            streams[1].wait_stream(streams[0])
            save = checkpointer.save(number, state)
            for stream, layer, optimizer in zip(streams, layers, optimizers, strict=True):
                with torch.cuda.stream(stream):
                    optimizer.step()
                    for parameter in layer.parameters():
                        parameter.data.zero_()
            streams[0].wait_stream(streams[1])
            saved = save.committed.result()
            assert {value for name in saved.tensors for value in saved.read(name).unique().tolist()} == {float(number)}


def test_pinned_memory_that_the_gpu_still_writes_is_saved_when_it_has(store: Path) -> None:
    average, source = torch.zeros(64 * MIB, pin_memory=True), torch.ones(64 * MIB, device="cuda")
    with fs.Checkpointer(store) as checkpointer:
        torch.cuda._sleep(500_000_000)
        average.copy_(source, non_blocking=True)
        checkpoint = checkpointer.save(1, {"average": average}).committed.result()
    assert checkpoint.read("average").unique().tolist() == [1.0]


def read_between_changes(
    source: torch.Tensor, read: Callable[[CudaSideStream], _Read]
) -> tuple[_Read, NDArray[np.uint8]]:
    """What comes of work that the current stream gets between two changes of `source`; and what `source` was then."""
    stream = CudaSideStream("cuda:0")
    source[0] = 1  # behind it in the stream
    content = read(stream)
    source_then = source.clone()
    source.zero_()
    stream.wait_current()
    stream.native.synchronize()
    return content, source_then.cpu().numpy()


@pytest.mark.parametrize("odd", [0, 1, 4, 16])
def test_the_kernel_gathers_what_torch_reads(odd: int) -> None:
    source = torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8, device="cuda")
    lengths = np.array([0, 1, 15, 16, 17, 63, 64, 4096, 65_535, *range(100, 3000)], np.uint32)
    begins = (np.arange(len(lengths), dtype=np.uint64) * 1024 + odd) % (3 * MIB)
    address, offset = begins + np.uint64(source.data_ptr()), 0
    actual, expected = read_between_changes(source, lambda stream: stream.gather(
        address=address, begin=np.zeros(len(lengths), np.uint64), length=lengths,
        layout=np.full(len(lengths), -1, np.int64), layouts=(),
    ))
    for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
        assert np.array_equal(actual[offset : offset + length], expected[begin : begin + length]), (begin, length)
        offset += -(-length // _native.GATHERED_ALIGNMENT_BYTES) * _native.GATHERED_ALIGNMENT_BYTES


@pytest.mark.parametrize("lazy", [True, False])
def test_strided_memory_of_every_kind_comes_back_while_the_stream_changes_it(store: Path, lazy: bool) -> None:
    state = strided_kinds()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with fs.Checkpointer(store, budget_bytes=32 * MIB) as checkpointer:
        save = checkpointer.save(1, state, fence="manual" if lazy else "auto")
        checkpointer.fence()
        for tensor in state.values():
            if tensor.numel():
                tensor.untyped_storage().fill_(0)
        checkpoint = save.committed.result()
    checkpoint.verify()
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor.cpu()), name


def strided_kinds() -> dict[str, torch.Tensor]:
    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randint(0, 120, shape, device="cuda").to(dtype)

    raw = numbers(3 * MIB, dtype=torch.uint8)
    kinds = {
        "channels last": numbers(64, 200, 50, 60).to(memory_format=torch.channels_last),
        "channels last 3d": numbers(4, 96, 20, 30, 16).to(memory_format=torch.channels_last_3d),
        "heads": numbers(16, 1000, 16, 64, dtype=torch.bfloat16).transpose(1, 2),
        "columns": numbers(9000, 4000)[:, 7:2000], "narrow columns": numbers(90_000, 40)[:, 7:10],
        "turned": numbers(5000, 3000).t(), "every other": numbers(900, 800)[::3, ::2],
        "expanded": numbers(1, 300).expand(9000, 300), "odd address": raw[1:2_002_001].view(1000, 2002)[:, 1:].t(),
        "short": numbers(70, 30).t(), "nothing": numbers(40, 30)[:, 30:],
    }
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.float64, torch.complex128):
        kinds[f"turned {dtype}"] = numbers(2500, 1300, dtype=dtype).t()
    return kinds


@pytest.mark.parametrize("odd", [0, 1, 4, 8])
def test_the_kernel_digests_what_torch_reads(odd: int) -> None:
    source = torch.randint(0, 256, (8 * MIB,), dtype=torch.uint8, device="cuda")
    sizes = [1, 16, 240, 241, 256, 1024, 1025, 1088, 65_535, MIB - 1, MIB, MIB + 240, MIB + 241, 3 * MIB + 7]
    lengths = np.array(sizes, np.uint64)
    begins = np.arange(len(lengths), dtype=np.uint64) * np.uint64(1000 * 16) + np.uint64(odd)
    address, number = begins + np.uint64(source.data_ptr()), 0
    actual, expected = read_between_changes(source, lambda stream: stream.digest(address, lengths))
    assert actual is not None, "the driver has refused the kernel"
    for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
        for offset in range(begin, begin + length, MIB):
            expected_digest = _native.xxh3_64(expected[offset : min(offset + MIB, begin + length)])
            assert actual.digests()[number] == expected_digest, (offset, length)
            number += 1


def test_the_kernel_digests_strided_memory_as_its_bytes_in_order() -> None:
    for name, tensor in strided_kinds().items():
        if not tensor.numel():
            continue
        packed = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
        strides = [item * tensor.itemsize for item in tensor.stride()]
        layout = _native.GatherLayout(item_bytes=tensor.itemsize, shape=tensor.shape, strides_bytes=strides)
        stream = CudaSideStream("cuda:0")
        address, length = np.array([tensor.data_ptr()], np.uint64), np.array([len(packed)], np.uint64)
        actual = stream.digest(address, length, np.zeros(1, np.int64), (layout,))
        stream.wait_current()
        stream.native.synchronize()
        assert actual is not None, "the driver has refused the kernel"
        assert actual.digests().tolist() == [
            _native.xxh3_64(packed[offset : offset + MIB]) for offset in range(0, len(packed), MIB)
        ], name


def test_a_byte_that_changes_before_its_capture_is_found_or_came_too_late(store: Path) -> None:
    tensor = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    engine = fs.EngineOptions(watch="digests")
    with fs.Checkpointer(store, budget_bytes=64 * MIB, engine=engine, on_error="continue") as checkpointer:
        assert checkpointer.save(1, {"x": tensor}, fence="manual").committed.result().manifest.io.sampled_bytes == 0
        for step in range(2, 12):
            torch.cuda.synchronize()
            save = checkpointer.save(step, {"x": tensor}, fence="manual")
            torch.cuda.current_stream().synchronize()  # the digests are there
            with torch.cuda.stream(side):
                tensor[-1] = step
            error = save.committed.exception(60)
            if error is None:
                assert save.committed.result().read("x")[-1].item() == step - 1
            else:
                assert isinstance(error, fs.StateChangedError)
            side.synchronize()


def test_a_gpu_that_is_full_is_saved(store: Path) -> None:
    state, hoard = training(capturable=True), []
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.prepare(state)
        for size in (1 << 30, 1 << 26, 1 << 21, 1 << 16, 512):
            try:
                while True:
                    hoard.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.cuda.OutOfMemoryError:
                pass
        for step in (1, 2):
            checkpointer.save(step, state).committed.result().verify()
        del hoard


def test_a_save_of_many_small_tensors_does_not_wait_for_each(store: Path) -> None:
    state = {f"t{index}": torch.full((), float(index), device="cuda") for index in range(2000)}
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        torch.cuda._sleep(1_000_000_000)
        busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
        busy.record()
        save = checkpointer.save(2, state)
        assert not busy.query(), "save has waited for the stream"
        checkpoint = save.committed.result()
    assert all(checkpoint.read(name).item() == float(name[1:]) for name in state)


def test_a_tensor_without_elements_is_saved_and_loaded(store: Path) -> None:
    whole = torch.ones(4, 3, device="cuda")
    with fs.Checkpointer(store) as checkpointer:
        checkpointer.save(1, {"x": whole[:0], "y": whole[:, 3:], "z": whole}).committed.result().verify()
        checkpointer.load({"x": whole[:0], "y": whole[:, 3:], "z": whole.zero_()})
    assert whole.unique().tolist() == [1.0]
