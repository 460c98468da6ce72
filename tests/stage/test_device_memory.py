"""States on a device: captured and restored by its side stream, without any access to its memory by the CPU."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import flowstone as fs
from distinct_values import distinct
from flowstone import _native
from flowstone.events.phases import Captured, Event
from flowstone.load import conductor as loading
from flowstone.stage import bounce, device, numa
from flowstone.state import describe
from flowstone.torch.device_memory import host_copy
from flowstone.torch.generators import cuda_states
from flowstone.torch.tensors import memory_of
from forge import split_rows
from simulated_device import SimulatedDevice, visible_device

MIB = 1 << 20


class Net(nn.Module):
    """Some 6 MB of parameters, more than a chunk each and less, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(600, 700), nn.Linear(700, 500), nn.Linear(500, 600), nn.Linear(600, 300))
        self.register_buffer("table", torch.zeros(100_000))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


@pytest.fixture
def far() -> Iterator[SimulatedDevice]:
    with visible_device(SimulatedDevice(64 * MIB, delay_s=0.0005)) as device:
        yield device


def training(far: SimulatedDevice, *, slots: bool = True) -> dict[str, object]:
    """A model on the device, stepped once. `slots`: its optimizer's are there, too, and else on the host."""
    model = Net()
    far.take(model)
    optimizer = torch.optim.AdamW(model.parameters())
    step({"model": model, "optimizer": optimizer})
    if slots:
        far.take_slots(optimizer)
    return {"model": model, "optimizer": optimizer, "step": 0}


def step(state: dict[str, object]) -> None:
    state["model"](torch.randn(2, 600)).square().mean().backward()  # type: ignore[operator]
    state["optimizer"].step()  # type: ignore[attr-defined]


def held(state: dict[str, object]) -> list[torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    slots = [slot for of in optimizer.state.values() for slot in of.values()]
    return [*(parameter.data for parameter in model.parameters()), *model.buffers(), *slots]


def opened(path: Path, **options: object) -> fs.Checkpointer:
    engine = fs.EngineOptions(request_bytes=2 * MIB)
    return fs.Checkpointer(path, engine=engine, **{"budget_bytes": 8 * MIB, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [True, False], ids=["slots on the device", "slots on the host"])
def test_what_is_loaded_is_what_was_saved(store: Path, far: SimulatedDevice, slots: bool) -> None:
    state = training(far, slots=slots)
    expected = [tensor.clone() for tensor in held(state)]
    with opened(store) as checkpointer:
        saved = checkpointer.save(1, state).committed.result()
        saved.verify()
        copies = far.native.copies
        assert copies > 0
        for tensor in held(state):
            tensor.fill_(-1)
        checkpointer.load(state)
    assert all(map(torch.equal, held(state), expected))
    assert far.native.copies > copies


def test_a_state_on_the_device_is_stored_as_one_on_the_host_is(tmp_path: Path, far: SimulatedDevice) -> None:
    state = training(far)
    with opened(tmp_path / "far") as checkpointer:
        checkpointer.save(1, state)
    for parameter in state["model"].parameters():  # type: ignore[attr-defined]
        parameter.data = parameter.data.clone()
    with opened(tmp_path / "near") as checkpointer:
        checkpointer.save(1, state)
    checkpoint, other = fs.open(tmp_path / "far"), fs.open(tmp_path / "near")
    assert list(checkpoint.tensors) == list(other.tensors)
    for name in checkpoint.tensors:
        assert torch.equal(checkpoint.read(name), other.read(name)), name


def test_save_and_fence_do_not_wait_for_copies_that_are_queued(store: Path, far: SimulatedDevice) -> None:
    state = training(far)
    far.sync = False
    with opened(store, budget_bytes=64 * MIB) as checkpointer:
        checkpointer.save(1, state).committed.result()
        far.native.hold(True)
        copies, leads = far.native.copies, far.blocked_currents
        save = checkpointer.save(2, state)
        assert far.blocked_currents > leads, "what is not lazy is copied before what comes next on the current stream"
        leads = far.blocked_currents
        checkpointer.fence()
        assert far.blocked_currents > leads
        assert far.native.copies == copies
        assert not save.captured.done()
        far.native.hold(False)
        save.captured.result(60)
        save.committed.result(60).verify()


def test_without_an_optimizer_the_state_may_change_on_the_stream_as_soon_as_save_returns(
    store: Path, far: SimulatedDevice
) -> None:
    tensor = far.tensor(torch.full((MIB,), 1.0))
    with opened(store) as checkpointer:
        save = checkpointer.save(1, {"x": tensor})
        tensor.fill_(2)
        values = save.committed.result().read("x")
    assert values.unique().tolist() == [1.0]


def test_every_checkpoint_of_a_training_holds_exactly_one_value(store: Path, far: SimulatedDevice) -> None:
    chance, state, saves = random.Random(5), training(far), []
    with opened(store, saves_in_flight=3) as checkpointer:
        for number in range(1, 9):
            for tensor in held(state):
                tensor.fill_(number)
            state["step"] = number
            saves.append(checkpointer.save(number, state))
            chance.choice((lambda: step(state), checkpointer.fence, save_wait(saves[-1])))()
    for save in saves:
        checkpoint = save.committed.result()
        checkpoint.verify()
        values = {value for name in checkpoint.tensors for value in distinct(checkpoint.read(name))}
        assert values == {float(checkpoint.step)} == {float(checkpoint.objects["step"])}


def fill(state: dict[str, object], value: float) -> None:
    for tensor in held(state):
        tensor.fill_(value)


def save_wait(save: fs.Save) -> object:
    return lambda: save.captured.result(60)


def test_a_change_that_escapes_the_fence_fails_that_save_by_name(store: Path, far: SimulatedDevice) -> None:
    state = training(far)
    far.sync = False
    with opened(store, on_error="continue") as checkpointer:
        checkpointer.save(1, state).committed.result()
        far.native.hold(True)
        save = checkpointer.save(2, state)
        state["model"].body[1].weight.data.add_(1)  # type: ignore[attr-defined]
        far.native.hold(False)
        error = save.committed.exception(60)
        assert isinstance(error, fs.StateChangedError)
        assert error.names == ("model.body.1.weight",)
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.step == 1


def test_a_device_that_fails_fails_the_save_and_what_comes_after_by_its_name(store: Path, far: SimulatedDevice) -> None:
    state = training(far)
    with opened(store, on_error="continue") as checkpointer:
        checkpointer.save(1, state).committed.result()
        far.native.fail_after(2)
        error = checkpointer.save(2, state).committed.exception(60)
        assert isinstance(error, fs.StorageError)
        assert "copy from or to delayed:0 (CUDA_ERROR_LAUNCH_FAILED)" in str(error)
        for again in (lambda: checkpointer.load(state), lambda: checkpointer.save(3, state)):
            with pytest.raises(fs.StorageError, match=r"a stream of delayed:0 \(CUDA_ERROR_LAUNCH_FAILED\)"):
                again()  # before anything has changed


def test_a_device_that_fails_during_a_load_leaves_a_state_that_is_not_saved(store: Path, far: SimulatedDevice) -> None:
    state = training(far)
    with opened(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        far.native.fail_after(2)
        with pytest.raises(fs.FlowstoneError, match="copy from or to delayed:0"):
            checkpointer.load(state)
        with pytest.raises(fs.DamagedError):
            checkpointer.save(2, state)


def test_memory_stays_inside_the_budget_and_is_pinned_once(store: Path, far: SimulatedDevice) -> None:
    state = training(far)
    seen: list[Event] = []
    checkpointer = opened(store, on_event=seen.append)
    for number in range(1, 6):
        checkpointer.save(number, state).committed.result()
    assert 0 < far.native.pinned_bytes <= 8 * MIB
    checkpointer.close()
    assert far.native.pinned_bytes == 0
    assert all(event.early_bytes < 2 * MIB for event in seen if isinstance(event, Captured))


def test_a_part_of_a_state_is_loaded_onto_the_device(store: Path, far: SimulatedDevice) -> None:
    state = training(far)
    with opened(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        bias = far.tensor(torch.zeros(700))
        checkpointer.load({"model": {"body": {"0": {"bias": bias}}}}, rules=[fs.Skip("*")])
    assert torch.equal(bias, state["model"].body[0].bias.data)  # type: ignore[attr-defined]


def test_blocks_of_rows_and_of_columns_go_straight_onto_the_device(store: Path, far: SimulatedDevice) -> None:
    whole = torch.randn(2000, 600)
    split = lambda state, **how: split_rows(describe(state, **how), "x", 3)  # noqa: E731
    with mock.patch("flowstone.save.planning.describe", split), opened(store) as checkpointer:
        checkpointer.save(1, {"x": whole}).committed.result()
    rows, columns = far.tensor(torch.zeros(2000, 600)), far.tensor(torch.zeros(2000, 100))
    part, far_columns = far.tensor(torch.zeros(900, 600)), far.tensor(torch.zeros(2000, 300))
    for state in (
        {"x": rows}, {"x": fs.Shard(columns, (2000, 600), (0, 200))}, {"x": fs.Shard(part, (2000, 600), (500, 0))},
        {"x": fs.Shard(far_columns[:, 100:200], (2000, 600), (0, 500))},
    ):
        request = loading.request_load(fs.open(store), state, rules=(), rank=0, ranks=1)
        assert loading.plan_load(request, verify_first=False).destinations.bounced == ()
        with opened(store) as checkpointer:
            copies = far.native.copies
            checkpointer.load(state)
            assert 0 < far.native.copies - copies < 60, "not one copy for each row"
    assert torch.equal(rows, whole)
    assert torch.equal(columns, whole[:, 200:300])
    assert torch.equal(part, whole[500:1400])
    assert torch.equal(far_columns[:, 100:200], whole[:, 500:])
    assert not far_columns[:, :100].any()
    assert not far_columns[:, 200:].any()


def test_memory_of_a_load_lies_near_the_device(store: Path, far: SimulatedDevice) -> None:
    tensor = far.tensor(torch.ones(MIB))
    with opened(store) as checkpointer, mock.patch.object(numa, "node_of", return_value=(0, "")) as asked:
        checkpointer.save(1, {"x": tensor}).committed.result()
        checkpointer.load({"x": tensor.zero_()})
    assert asked.call_args.args == ("0000:3b:00.0",)
    assert tensor.unique().tolist() == [1.0]


def test_what_is_cast_or_turned_onto_the_device_goes_by_rounds(
    store: Path, far: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounce, "BOUNCE_BYTES", MIB)
    saved = {"cast": torch.randn(700, 600), "turned": torch.randn(500, 900), "plain": torch.randn(400, 300)}
    into = {
        "cast": far.tensor(torch.zeros(700, 600, dtype=torch.float64)),
        "turned": far.tensor(torch.zeros(900, 500)).t(), "plain": far.tensor(torch.zeros(400, 300)),
    }
    with opened(store) as checkpointer:
        checkpointer.save(1, saved).committed.result()
        request = loading.request_load(fs.open(store), into, rules=[fs.Cast("*")], rank=0, ranks=1)
        planned = loading.plan_load(request, verify_first=False).destinations
        assert len(planned.rounds) > 5
        assert {planned.pieces.names[index] for index in planned.bounced} == {"cast", "turned"}
        assert set(checkpointer.load(into, rules=[fs.Cast("*")]).matched) == set(saved)
    assert torch.equal(into["cast"], saved["cast"].double())
    assert torch.equal(into["turned"], saved["turned"])
    assert torch.equal(into["plain"], saved["plain"])


def test_what_rules_join_goes_straight_onto_the_device_and_what_they_turn_by_way_of_the_host(
    store: Path, far: SimulatedDevice
) -> None:
    parts = {f"p{n}": torch.randn(700, 500) for n in range(3)} | {f"e.{n}": torch.randn(300, 400) for n in range(4)}
    state = {"fused": far.tensor(torch.ones(2100, 500)), "stacked": far.tensor(torch.ones(4, 300, 400))}
    join = fs.RuleSet([fs.Fuse(("p0", "p1", "p2"), "fused"), fs.Stack("e.{n}", "stacked")], complete=True)
    turn = fs.RuleSet([*join.rules, fs.Transpose("fused"), fs.Pad("stacked", 300, 304, 1)])
    turned = {"fused": far.tensor(torch.ones(500, 2100)), "stacked": far.tensor(torch.ones(4, 304, 400))}
    with opened(store) as checkpointer:
        checkpointer.save(1, {"model": parts}).committed.result()
        checkpointer.load({"model": state}, rules=join)
    assert torch.equal(state["fused"], torch.cat([parts[f"p{n}"] for n in range(3)]))
    assert torch.equal(state["stacked"], torch.stack([parts[f"e.{n}"] for n in range(4)]))
    for tensors, rules, aside, padded in ((state, join, 0, 0), (turned, turn, 3, 1)):
        request = loading.request_load(fs.open(store), {"model": tensors}, rules=[rules], rank=0, ranks=1)
        planned = loading.plan_load(request, verify_first=False)
        assert planned.arranged is not None
        assert (len(planned.destinations.bounced), len(planned.arranged.zeros)) == (aside, padded)


def byte_writer(far: SimulatedDevice, tensor: torch.Tensor, value: int) -> None:
    """A kernel on the current stream that sets all bytes of a tensor."""
    far.native.write(far.native.current, tensor.data_ptr(), tensor.numel() * tensor.element_size(), value)


def test_a_save_inside_of_a_graph_capture_is_refused_and_leaves_the_capture_whole(
    store: Path, far: SimulatedDevice
) -> None:
    state = training(far)
    with opened(store) as checkpointer:
        checkpointer.save(1, state).committed.result()
        far.native.begin_capture(far.native.current)
        with pytest.raises(fs.StateError, match="cannot save inside of a CUDA graph capture"):
            checkpointer.save(2, state)
        with pytest.raises(fs.StateError, match="cannot save or load inside of a CUDA graph capture"):
            checkpointer.load(state)
        assert far.native.end_capture(far.native.current)
        checkpointer.save(2, state).committed.result().verify()


def test_a_fence_inside_of_a_graph_capture_is_refused_while_a_save_is_not_captured(
    store: Path, far: SimulatedDevice
) -> None:
    state = training(far)
    far.sync = False
    with opened(store, budget_bytes=64 * MIB) as checkpointer:
        checkpointer.save(1, state).committed.result()
        far.native.hold(True)
        save = checkpointer.save(2, state)
        far.native.begin_capture(far.native.current)
        with pytest.raises(fs.StateError, match=r"call fence\(\) before you record the graph"):
            step(state)
        far.native.hold(False)
        save.captured.result(60)
        checkpointer.fence()  # there is nothing to wait for
        assert far.native.end_capture(far.native.current), "copies of the save are part of the graph"
        save.committed.result(60).verify()


def test_a_recorded_step_is_told_of_and_its_replay_is_noticed_unless_a_fence_came_before(
    store: Path, far: SimulatedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    state = training(far)
    weight, other = state["model"].body[1].weight.data, far.native.make_stream()  # type: ignore[attr-defined]
    far.sync = False
    with opened(store, budget_bytes=64 * MIB, on_error="continue") as checkpointer:
        checkpointer.save(1, state).committed.result()
        far.native.begin_capture(far.native.current)
        step(state)  # its hook runs now, and never again
        byte_writer(far, weight, 1)
        assert far.native.end_capture(far.native.current)
        for number, is_fenced in ((2, True), (3, False)):
            weight.fill_(number)
            far.native.hold(True)
            save = checkpointer.save(number, state)
            if is_fenced:
                checkpointer.fence()
                far.native.replay(far.native.current)  # it waits behind the copies
                far.native.hold(False)
                tensor = save.committed.result(60).read("model.body.1.weight")
                far.native.wait_for(far.native.current)
                assert tensor.unique().tolist() == [float(number)]
            else:
                far.native.replay(other)
                far.native.wait_for(other)
                far.native.hold(False)
                error = save.committed.exception(60)
                assert isinstance(error, fs.StateChangedError)
                assert error.names == ("model.body.1.weight",)
    assert caplog.text.count("Call fence() before each replay") == 1


def test_an_optimizer_that_steps_on_another_stream_waits_for_the_copies_too(store: Path, far: SimulatedDevice) -> None:
    parameters = [nn.Parameter(far.tensor(torch.full((MIB,), 1.0))) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
    state = {"p": nn.ParameterList(parameters), "one": optimizers[0], "two": optimizers[1]}
    far.sync = False
    streams = far.native.current, far.native.make_stream()
    with opened(store, budget_bytes=64 * MIB) as checkpointer:
        checkpointer.save(1, state).committed.result()
        far.native.hold(True)
        save = checkpointer.save(2, state)
        for stream, optimizer, parameter in zip(streams, optimizers, parameters, strict=True):
            far.native.make_current(stream)
            optimizer.step()  # without gradients: its hook is all that runs
            byte_writer(far, parameter.data, 0)
        time.sleep(0.2)  # a stream that does not wait for the copies writes now
        are_kept = all(parameter.all() for parameter in parameters)
        far.native.hold(False)
        assert are_kept
        checkpoint = save.committed.result(60)
        assert [checkpoint.read(f"p.{n}").unique().tolist() for n in range(2)] == [[1.0], [1.0]]
        for stream in streams:
            far.native.wait_for(stream)
    assert not any(parameter.any() for parameter in parameters)


def test_memory_that_a_device_writes_is_read_when_the_stream_has_come_there(store: Path) -> None:
    seen: list[str] = []
    pinned = torch.zeros(MIB)

    class Stream:
        def synchronize(self) -> None:
            seen.append("waited")
            pinned.fill_(1)  # the copy that was under way

    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch.UntypedStorage, "is_pinned", lambda tensor: tensor.data_ptr() == pinned.data_ptr()),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() == pinned.data_ptr()),
        mock.patch.object(torch.cuda, "current_stream", return_value=Stream()),
        opened(store) as checkpointer,
    ):
        values = checkpointer.save(1, {"ema": pinned}).committed.result().read("ema")
        assert seen == ["waited"]
        checkpointer.save(2, {"ema": pinned.clone()}).committed.result()
    assert seen == ["waited"], "memory that is not pinned waits for nothing"
    assert values.unique().tolist() == [1.0]


def test_a_tensor_without_elements_has_no_address_and_is_copied_all_the_same() -> None:
    assert host_copy(memory_of(torch.arange(6.0)[:0])).shape == (0,)
    assert host_copy(memory_of(torch.ones(4, 3)[:, 3:])).shape == (4, 0)


def test_a_device_error_number_is_no_errno(store: Path, far: SimulatedDevice) -> None:
    with opened(store, on_error="continue") as checkpointer:
        checkpointer.save(1, {"x": far.tensor(torch.ones(MIB))}).committed.result()
        far.native.fail_after(0)
        assert checkpointer.save(2, {"x": far.tensor(torch.ones(MIB))}).committed.exception(60) is not None
    with pytest.raises(OSError, match=r"wait for delayed:0 \(CUDA_ERROR_LAUNCH_FAILED\)") as caught:
        far.native.synchronize()
    assert caught.value.errno == errno.EIO


def test_rocm_is_not_asked_for_cudas_driver() -> None:
    with (
        mock.patch.object(torch.version, "hip", "6.4"),
        mock.patch.object(_native, "cuda_device", side_effect=AssertionError("asked")),
    ):
        assert device.SideStreams(device.OPENERS).of("cuda:0") is None


def test_generators_of_a_gpu_that_is_not_in_use_yet_are_saved() -> None:
    states = [torch.ones(16, dtype=torch.uint8)]
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "is_initialized", return_value=False),
        mock.patch.object(torch.cuda, "get_rng_state_all", return_value=states),
    ):
        assert cuda_states() == states, "what was seeded before the first use would be lost"
        with mock.patch.object(torch.cuda, "_is_in_bad_fork", return_value=True):
            assert cuda_states() == []


def test_a_save_asks_the_device_for_one_gather_and_no_copy_of_a_small_tensor(store: Path, far: SimulatedDevice) -> None:
    small = {f"s{index}": far.tensor(torch.full((1 + index % 40,), float(index))) for index in range(300)}
    steps = {f"t{index}": far.tensor(torch.tensor(float(index))) for index in range(300)}  # as a capturable Adam's
    state = {"small": small, "steps": steps, "large": far.tensor(torch.ones(MIB))}
    with opened(store) as checkpointer:
        for step in (1, 2):
            launches, copies = far.native.launches, far.native.copies
            checkpoint = checkpointer.save(step, state).committed.result()
            assert far.native.launches - launches == 1
            assert far.native.copies - copies <= 4, "4 MiB in windows of 2"
            checkpoint.verify()
        for kind in ("small", "steps"):
            for name, tensor in state[kind].items():  # type: ignore[attr-defined]
                assert torch.equal(checkpoint.read(f"{kind}.{name}"), tensor), name


def test_small_tensors_may_change_on_the_stream_as_soon_as_save_returns(store: Path, far: SimulatedDevice) -> None:
    tensors = {f"t{index}": far.tensor(torch.full((100,), 1.0)) for index in range(50)}
    far.sync = False
    with opened(store) as checkpointer:
        checkpointer.save(1, tensors).committed.result()
        save = checkpointer.save(2, tensors)
        for tensor in tensors.values():
            byte_writer(far, tensor, 0)
        checkpoint = save.committed.result(60)
    assert {value for name in tensors for value in checkpoint.read(name).tolist()} == {1.0}


def test_a_device_that_has_no_memory_left_is_saved(store: Path, far: SimulatedDevice) -> None:
    state = training(far)
    with opened(store, saves_in_flight=2) as checkpointer:
        checkpointer.prepare(state)
        made = far.native.host_allocations
        far.native.fill(True)
        for number in range(1, 4):
            fill(state, number)
            committed = checkpointer.save(number, state).committed.result()
            assert {value for name in committed.tensors for value in distinct(committed.read(name))} == {float(number)}
        assert far.native.host_allocations == made, "prepare has made the memory for what is gathered"
        far.native.fill(False)


def test_blocks_are_as_long_as_windows_where_the_budget_holds_enough_of_them(
    tmp_path: Path, far: SimulatedDevice
) -> None:
    on_device, on_host = {"x": far.tensor(torch.ones(2 * MIB))}, {"x": torch.ones(2 * MIB)}
    for number, (state, budget_mib, block_mib) in enumerate(
        [(on_device, 1024, 32), (on_device, 256, 16), (on_device, 64, 8), (on_host, 1024, 8)]
    ):
        with fs.Checkpointer(tmp_path / str(number), budget_bytes=budget_mib * MIB) as checkpointer:
            copied = far.native.copied_bytes
            save = checkpointer.save(1, state)
            save.committed.result().verify()
            assert checkpointer._saves.captures.arena.block_bytes == block_mib * MIB  # type: ignore[attr-defined]
            assert far.native.copied_bytes - copied == (8 * MIB if state is on_device else 0), "no byte is copied twice"
            assert checkpointer.prepare(state).bytes <= budget_mib * MIB


def test_streams_are_destroyed_with_the_last_checkpointer(store: Path) -> None:
    streams = device.SideStreams({"delayed": lambda _: SimulatedDevice(MIB)})
    with mock.patch.object(device, "_streams", return_value=streams):
        first = device.side_stream("delayed:0")
        assert device.side_stream("delayed:0") is first
        with opened(store) as checkpointer:
            checkpointer.save(1, {"x": torch.ones(3)}).committed.result()
        assert device.side_stream("delayed:0") is not first
