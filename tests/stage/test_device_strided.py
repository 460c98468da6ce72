"""Strided tensors of a device: saved from their own memory, through the arena, while training continues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from test_device_memory import byte_writer
from torch import nn

import flowstone as fs
from flowstone import _native
from flowstone.config import Watch
from flowstone.torch import device_memory
from memory_taken import return_freed_memory, tried
from own_process import run_in_own_process
from simulated_device import SimulatedDevice, visible_device

MIB = 1 << 20


@pytest.fixture
def far() -> Iterator[SimulatedDevice]:
    with visible_device(SimulatedDevice(160 * MIB)) as device:
        device.sync = False
        yield device


@pytest.fixture(autouse=True)
def _no_copies_by_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """A save that has torch copy a tensor to new host memory fails, but where a test is for that."""
    if "by_torch" in request.fixturenames:
        yield
        return
    error = AssertionError("a whole tensor was copied to pageable memory")
    with mock.patch.object(device_memory, "host_copy", side_effect=error):
        yield


@pytest.fixture
def by_torch() -> None:
    """For tests of devices for which torch copies."""


def opened(path: Path, **options: object) -> fs.Checkpointer:
    watch = options.pop("watch", "auto")
    engine = fs.EngineOptions(request_bytes=2 * MIB, watch=watch)  # type: ignore[arg-type]
    return fs.Checkpointer(path, engine=engine, **{"budget_bytes": 8 * MIB, **options})  # type: ignore[arg-type]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """No two neighbours alike, in any direction."""
    count = torch.Size(shape).numel()
    drawn = torch.arange(count, dtype=torch.int64).mul_(2654435761) % 8191
    return (drawn % 251 if dtype.itemsize == 1 else drawn).to(dtype).view(shape)


def kinds(far: SimulatedDevice) -> dict[str, torch.Tensor]:
    """By what is strided about them; most of them longer than 64 KiB, some than a window of 2 MiB."""
    image = numbers(6, 40, 50, 60).to(memory_format=torch.channels_last)
    volume = numbers(2, 24, 10, 20, 16, dtype=torch.float16).to(memory_format=torch.channels_last_3d)
    bytes_ = far.tensor(numbers(3 * MIB, dtype=torch.uint8))
    heads = far.tensor(numbers(4, 300, 8, 64, dtype=torch.bfloat16))
    kinds = {
        "channels last": far.strided(image), "channels last 3d": far.strided(volume),
        "part of channels last": far.strided(image)[1:, 3:30, :, 5:], "heads": heads.transpose(1, 2),
        "columns": far.tensor(numbers(5000, 400))[:, 100:250],
        "narrow columns": far.tensor(numbers(60_000, 40))[:, 7:10],
        "turned": far.tensor(numbers(1200, 900)).t(), "every other": far.tensor(numbers(900, 800))[::3, ::2],
        "expanded": far.tensor(numbers(1, 300)).expand(2000, 300), "one number": far.tensor(numbers(1)).expand(50_000),
        "odd address": bytes_[1 : 1 + 2000 * 1001].view(1001, 2000).t(),
        "halves": heads.flatten()[3:][: 600 * 200].view(600, 200).t(),
        "by parts": far.tensor(numbers(40, 9, 700))[:, ::2, 30:], "short": far.tensor(numbers(70, 30)).t(),
        "short channels last": far.strided(numbers(8, 3, 3, 3).to(memory_format=torch.channels_last)),
        "nothing": far.tensor(numbers(40, 30))[:, 30:],
        "nothing of a turned one": far.tensor(numbers(40, 30)).t()[:, 40:],
        "dense": far.tensor(numbers(300_000)), "short and dense": far.tensor(numbers(30)),
    }
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.float64, torch.complex128):
        kinds[f"turned {dtype}"] = far.tensor(numbers(500, 300, dtype=dtype)).t()
    return kinds


@pytest.mark.parametrize("fence", ["manual", "auto"], ids=["lazy", "early"])
@pytest.mark.parametrize("budget_mib", [4, 64])
def test_every_kind_comes_back_bit_for_bit(store: Path, far: SimulatedDevice, fence: str, budget_mib: int) -> None:
    state = kinds(far)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with opened(store, budget_bytes=budget_mib * MIB) as checkpointer:
        save = checkpointer.save(1, state, fence=fence)  # type: ignore[arg-type]
        checkpoint = save.committed.result(60)
        checkpoint.verify()
        assert far.native.packed_copies > 0
        assert far.native.copies_of_rows > 0
        assert far.native.pageable_copies == 0
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.read(name), tensor), name
        targets = {name: torch.full_like(tensor, 3) for name, tensor in expected.items()}
        checkpointer.load(targets)
    assert all(torch.equal(targets[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_of_strided_tensors_on_a_device_is_that_of_the_same_on_the_host(
    tmp_path: Path, far: SimulatedDevice
) -> None:
    state = kinds(far)
    with opened(tmp_path / "far") as checkpointer:
        made = checkpointer.save(1, state, fence="manual").committed.result(60)
    with opened(tmp_path / "near") as checkpointer:
        near = {name: tensor.clone() for name, tensor in state.items()}
        other = checkpointer.save(1, near, fence="manual").committed.result(60)
    assert [made.tensors[name].shape for name in made.tensors] == [other.tensors[name].shape for name in made.tensors]
    assert all(torch.equal(made.read(name), other.read(name)) for name in made.tensors)


def test_memory_stays_inside_of_the_budget(store: Path) -> None:
    """A tensor many times as large as the arena: no copy of it is anywhere."""
    taken, pinned_bytes = run_in_own_process(_saved_in_a_small_budget, store)
    assert taken < 24 * MIB
    assert pinned_bytes <= 4 * MIB


def _saved_in_a_small_budget(path: Path) -> tuple[int, int]:
    """The memory that the second save took, and what is pinned."""
    return_freed_memory()
    with visible_device(SimulatedDevice(160 * MIB)) as far, opened(path, budget_bytes=4 * MIB) as checkpointer:
        far.sync = False
        state = {"x": far.tensor(torch.ones(6000, 5000)).t()}  # 114 MiB
        checkpointer.save(1, state, fence="manual").committed.result(60)
        state["x"].fill_(2)

        def save() -> None:
            save = checkpointer.save(2, state, fence="manual")
            checkpointer.fence()
            assert save.committed.result(60).manifest.io is not None

        outcome, taken = tried(save)
        assert outcome == "done"
        return taken, far.native.pinned_bytes


def test_save_and_fence_do_not_wait_for_strided_memory(store: Path, far: SimulatedDevice) -> None:
    lazy = far.tensor(numbers(600, 1000)).t()
    small = far.tensor(numbers(30, 40)).t()
    state, expected = {"lazy": lazy, "small": small}, {"lazy": lazy.clone(), "small": small.clone()}
    with opened(store, budget_bytes=64 * MIB) as checkpointer:
        checkpointer.save(1, state, fence="manual").committed.result(60)
        far.native.hold(True)
        copies = far.native.copies
        save = checkpointer.save(2, state, fence="manual")
        byte_writer(far, small, 9)  # behind the gather, on the current stream
        checkpointer.fence()
        byte_writer(far, lazy, 9)
        assert far.native.copies == copies
        assert not save.captured.done()
        far.native.hold(False)
        checkpoint = save.committed.result(60)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in expected.items())
    assert {lazy.unique().numel(), small.unique().numel()} == {1}


def test_what_is_not_lazy_may_change_on_the_stream_once_save_has_returned(store: Path, far: SimulatedDevice) -> None:
    tensor = far.tensor(numbers(600, 1000)).t()
    expected = tensor.clone()
    with opened(store, budget_bytes=64 * MIB) as checkpointer:
        far.native.hold(True)
        save = checkpointer.save(1, {"x": tensor})
        byte_writer(far, tensor, 9)
        far.native.hold(False)
        assert torch.equal(save.committed.result(60).read("x"), expected)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 80, 3), nn.Conv2d(80, 60, 5))
        self.narrow = nn.Parameter(torch.randn(700, 90))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x).mean() * self.narrow.square().mean()
        return out


def trained(far: SimulatedDevice) -> dict[str, object]:
    """A model of channels-last weights, and one narrowed, on the device; its optimizer has stepped, too."""
    model = Net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in model.body.parameters():
        parameter.data = far.strided(parameter.data)
    model.narrow.data = far.tensor(torch.randn(700, 120))[:, 10:100]
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    step(state)
    for slots in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            slots[name] = far.strided(slots[name].contiguous() if slots[name].dim() == 2 else slots[name])
    return state


def step(state: dict[str, object]) -> None:
    state["model"](torch.randn(1, 3, 12, 12)).backward()  # type: ignore[operator]
    state["optimizer"].step()  # type: ignore[attr-defined]


def held(state: dict[str, object]) -> list[torch.Tensor]:
    slots = [slot for of in state["optimizer"].state.values() for slot in of.values()]  # type: ignore[attr-defined]
    return [*(parameter.data for parameter in state["model"].parameters()), *slots]  # type: ignore[attr-defined]


def test_a_step_waits_for_the_capture_of_strided_parameters_and_slots(store: Path) -> None:
    # the processor plays the stream: the step waits for all copies
    with visible_device(SimulatedDevice(64 * MIB, delay_s=0.002)) as far:
        state = trained(far)
        saves = []
        with opened(store, saves_in_flight=3) as checkpointer:
            for number in range(1, 5):
                saves.append((checkpointer.save(number, state), [tensor.clone() for tensor in held(state)]))
                step(state)
            for save, _ in saves:
                save.committed.result(60).verify()
            checkpointer.load(state)
        assert far.native.packed_copies > 0
        assert all(map(torch.equal, held(state), saves[-1][1]))
    for save, expected in saves:
        checkpoint = save.committed.result()
        weights = [name for name in checkpoint.tensors if name.startswith("model.")]
        assert all(any(torch.equal(checkpoint.read(name), tensor) for tensor in expected) for name in weights)


def deep(far: SimulatedDevice) -> torch.Tensor:
    """With more dimensions apart in memory than a row of the kernel's table describes."""
    return far.tensor(numbers(2, 3, 2, 3, 2, 3, 2, 60)).permute(5, 2, 4, 0, 6, 3, 1, 7)[..., ::3]


def test_a_change_that_escapes_is_found_by_samples(store: Path, far: SimulatedDevice) -> None:
    tensor = far.tensor(numbers(1200, 900)).t()
    with opened(store, on_error="continue") as checkpointer:
        far.native.hold(True)
        save = checkpointer.save(1, {"dense": far.tensor(numbers(400_000)), "x": tensor}, fence="manual")
        far.native.settle()
        tensor.data.add_(1)
        far.native.hold(False)
        error = save.committed.exception(60)
        assert isinstance(error, fs.StateChangedError)
        assert error.names == ("x",)


@pytest.mark.parametrize("watch", ["digests", "exact"])
def test_one_byte_of_a_strided_tensor_that_changes_is_found_by_digests(
    store: Path, far: SimulatedDevice, watch: Watch
) -> None:
    state = {name: tensor for name, tensor in kinds(far).items() if tensor.numel() * tensor.itemsize >= 65_536}
    del state["halves"]  # in the memory of "heads", which would be named in its place
    size = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with opened(store, watch=watch, on_error="continue", max_unsaved_steps=None) as checkpointer:
        checkpoint = checkpointer.save(1, state, fence="manual").committed.result(60)
        io = checkpoint.manifest.io
        assert (io.exact_bytes, io.sampled_bytes, io.sampled_because) == (size, 0, None)
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in expected.items())
        for step, (name, tensor) in enumerate(state.items(), 2):
            far.native.hold(True)
            save = checkpointer.save(step, state, fence="manual")
            far.native.settle()
            spot = tensor[tuple(size // 2 + size // 3 for size in tensor.shape)]
            spot.data.view(1).view(torch.uint8)[-1] ^= 1
            far.native.hold(False)
            error = save.committed.exception(60)
            assert isinstance(error, fs.StateChangedError), name
            assert name in error.names
            spot.data.view(1).view(torch.uint8)[-1] ^= 1
        assert checkpointer.save(100, state, fence="manual").committed.exception(60) is None


def test_what_no_row_of_the_kernels_table_describes_is_sampled(store: Path, far: SimulatedDevice) -> None:
    dense, turned, odd = far.tensor(numbers(MIB)), far.tensor(numbers(1200, 900)).t(), deep(far)
    odd = odd.expand(30, *odd.shape)
    state = {"a": odd, "b": dense, "c": turned}
    with opened(store, watch="digests") as checkpointer:
        io = checkpointer.save(1, state, fence="manual").committed.result(60).manifest.io
    size = odd.numel() * 4
    assert (io.exact_bytes, io.sampled_bytes, io.sampled_because) == (4 * MIB + 1200 * 900 * 4, size, "strided")


def test_where_each_byte_is_to_be_watched_that_is_not_captured_late(store: Path, far: SimulatedDevice) -> None:
    dense, odd = far.tensor(numbers(MIB)), deep(far)
    state = {"a": odd.expand(30, *odd.shape), "b": dense}
    expected = state["a"].clone()
    with opened(store, watch="exact", budget_bytes=64 * MIB) as checkpointer:
        far.native.hold(True)
        save = checkpointer.save(1, state, fence="manual")
        byte_writer(far, state["a"], 9)  # behind its copy, on the current stream
        far.native.hold(False)
        checkpoint = save.committed.result(60)
    assert (checkpoint.manifest.io.exact_bytes, checkpoint.manifest.io.sampled_bytes) == (4 * MIB, 0)
    assert torch.equal(checkpoint.read("a"), expected)


def test_small_strided_tensors_are_gathered_by_one_launch_and_copied_by_none(store: Path, far: SimulatedDevice) -> None:
    shapes = [(16, 3 + index % 5, 3, 3) for index in range(300)]
    images = [numbers(*shape).to(memory_format=torch.channels_last) for shape in shapes]
    state = {f"t{index}": far.strided(image) for index, image in enumerate(images)}
    with opened(store) as checkpointer:
        checkpointer.save(1, state).committed.result(60)
        launches, copies = far.native.launches, far.native.copies
        checkpoint = checkpointer.save(2, state).committed.result(60)
        assert far.native.launches == launches + 1
        assert far.native.copies == copies
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in state.items())


def test_small_tensors_for_which_a_table_would_be_longer_than_they_are_go_through_the_arena(
    store: Path, far: SimulatedDevice
) -> None:
    state = {"deep": deep(far), "turned": far.tensor(numbers(30, 40)).t()}
    assert state["deep"].numel() * 4 < 64 << 10
    with opened(store) as checkpointer:
        checkpoint = checkpointer.save(1, state).committed.result(60)
    assert far.native.packed_copies == 1
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in state.items())


def test_prepare_makes_all_memory_that_saves_need_and_a_full_device_saves_too(
    store: Path, far: SimulatedDevice
) -> None:
    state = kinds(far)
    with opened(store, budget_bytes=16 * MIB, saves_in_flight=2) as checkpointer:
        checkpointer.prepare(state)
        made = far.native.host_allocations
        far.native.fill(True)
        for number in range(1, 4):
            checkpointer.save(number, state, fence="manual").committed.result(60)
        far.native.fill(False)
        assert far.native.host_allocations == made
        assert far.native.packed_copies > 0


def test_a_device_that_fails_half_way_fails_that_save_and_leaves_the_one_before(
    store: Path, far: SimulatedDevice
) -> None:
    state = {"x": far.tensor(numbers(1200, 1900)).t()}
    with opened(store, budget_bytes=4 * MIB, on_error="continue") as checkpointer:
        checkpointer.save(1, state, fence="manual").committed.result(60)
        assert far.native.packed_copies > 3
        state["x"].data.add_(1)
        far.native.fail_after(2)
        error = checkpointer.save(2, state, fence="manual").committed.exception(60)
        assert isinstance(error, fs.StorageError)
        assert "delayed:0" in str(error)
        newest = checkpointer.latest()
        assert newest is not None
        assert newest.step == 1
        newest.verify()


def test_memory_that_was_given_back_fails_that_save_and_not_the_device(store: Path, far: SimulatedDevice) -> None:
    gone, kept = far.tensor(numbers(1200, 900)).t(), far.tensor(numbers(700, 900)).t()
    with opened(store, on_error="continue", max_unsaved_steps=None) as checkpointer:
        far.native.hold(True)
        save = checkpointer.save(1, {"x": far.tensor(numbers(9 * MIB)), "y": gone}, fence="manual")
        far.native.settle()
        far.native.unmap(gone.data_ptr() - far.native.inside, 4 * MIB)
        far.native.hold(False)
        assert isinstance(save.committed.exception(60), fs.FlowstoneError)
        far.native.unmap(0, 0)
        assert torch.equal(checkpointer.save(2, {"y": kept}).committed.result(60).read("y"), kept)


def test_where_host_memory_cannot_be_pinned_strided_memory_is_copied_run_by_run(
    store: Path, far: SimulatedDevice
) -> None:
    state = {name: tensor for name, tensor in kinds(far).items() if tensor.numel() < 300_000}
    far.native.limit_pinned(0)
    with opened(store) as checkpointer:
        checkpoint = checkpointer.save(1, state, fence="manual").committed.result(60)
        assert far.native.pageable_copies > 0
        assert far.native.packed_copies == 0
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in state.items())


@pytest.mark.usefixtures("by_torch")
def test_where_the_driver_refuses_the_kernel_torch_copies_before_save_returns(store: Path) -> None:
    with visible_device(SimulatedDevice(160 * MIB, refuses_kernels=True)) as far:
        state = kinds(far)
        expected = {name: tensor.clone() for name, tensor in state.items()}
        with opened(store) as checkpointer:
            checkpointer.prepare(state)
            save = checkpointer.save(1, state, fence="manual")
            for name, tensor in state.items():
                if not tensor.is_contiguous() and tensor.numel():
                    tensor.untyped_storage().fill_(0)
                else:
                    expected.pop(name)
            checkpoint = save.committed.result(60)
            assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in expected.items())


def test_a_kernel_that_the_driver_has_taken_says_so(far: SimulatedDevice) -> None:
    assert far.native.packs
    assert not _native_packs_of(SimulatedDevice(MIB, refuses_kernels=True))


def _native_packs_of(far: SimulatedDevice) -> bool:
    device: _native.Device = far.native
    return device.packs
